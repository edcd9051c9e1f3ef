"""Which documents are held out: decided by a hash of seed and id, so that it depends on neither order nor machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ENOUGH_DOCUMENTS = 10


def held_out_count(documents: int, share: float) -> int:
    """How many of a source's documents are held out: the rounded share, and at least one of ten or more."""
    if share <= 0:
        return 0
    return max(round(documents * share), 1 if documents >= _ENOUGH_DOCUMENTS else 0)


def held_out(ids_by_source: Mapping[str, Sequence[str]], share: float, seed: int) -> set[str]:
    """The ids of the held-out documents: in each source those with the smallest hashes of (seed, id)."""
    import xxhash

    chosen: set[str] = set()
    for ids in ids_by_source.values():
        ranked = sorted(ids, key=lambda name: (xxhash.xxh3_64_intdigest(f"{seed}\0{name}".encode()), name))
        chosen.update(ranked[: held_out_count(len(ids), share)])
    return chosen
