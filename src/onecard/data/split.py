"""Which documents are held out: decided by a hash of seed and id, so that it depends on neither order nor machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ENOUGH_DOCUMENTS = 10


def held_out_count(documents: int, share: float) -> int:
    """How many of a source's documents are held out: the rounded share, and at least one of ten or more."""
    if share <= 0:
        return 0
    return max(round(documents * share), 1 if documents >= _ENOUGH_DOCUMENTS else 0)


def rank(seed: int, name: bytes) -> int:
    """The place of a document among those of its source, as 64 bits of (seed, id)."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{seed}\0".encode() + name)


def held_out(ranks: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which of the documents of one source are held out: those with the smallest ranks."""
    import numpy as np

    chosen = np.zeros(len(ranks), dtype=bool)
    chosen[np.argsort(ranks, kind="stable")[: held_out_count(len(ranks), share)]] = True
    return chosen
