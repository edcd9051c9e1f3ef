"""Which documents repeat which: decided once for all shards, the same whatever the number of workers.

In: the shards of a working folder. Out: `Verdicts`. The earlier of two equal texts is kept; of two near-duplicates the
earlier (`keep = first`) or the longer. A document goes only if its true similarity to one that is kept reaches the
threshold; of several such, the most similar is named.

Each band of hashes is sorted on its own (a worker a band), which puts documents that share it into groups. Then blocks
of documents, in the order of preference, are compared with the kept ones of their groups: first those of earlier
blocks, then their own. Memory grows by about 50 bytes a document and 8 for each group that a kept one shares.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.config import CleanConfig
from onecard.data import dedup
from onecard.data.shards import arrays_of, shard_file
from onecard.data.workers import Workers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

EXACT = 2.0
"""Stands for the similarity of equal texts."""

_BLOCK_DOCUMENTS = 100_000
_PAIRS_AT_ONCE = 100_000
_PAIRS_A_CALL = 1_000
_BYTES_COMPARED_AT_ONCE = 500_000
# The estimate of 128 hashes deviates by about 0.045; over four times that below the threshold is no match.
_ESTIMATE_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class Table:
    """The documents of all shards: where each shard's begin, and each text's place in its shard's file."""

    folder: Path
    starts: Integers
    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    characters: NDArray[np.int32]

    @property
    def documents(self) -> int:
        """How many there are."""
        return int(self.starts[-1])

    def places(self, documents: Integers) -> NDArray[np.int64]:
        """(n, 3): shard, offset and length in bytes of each text."""
        import numpy as np

        shards = np.searchsorted(self.starts, documents, side="right") - 1
        return np.stack((shards, self.offsets[documents], self.lengths[documents]), axis=1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`repeats[d]`: the kept document that d repeats, -1 for a kept one; `similarity[d]`: EXACT, or the true one."""

    repeats: Integers
    similarity: NDArray[np.float32]


def read_table(folder: Path, shards: int) -> Table:
    """Gather what the shards say of where their texts lie."""
    import numpy as np

    # A shard's texts are a few megabytes: 32 bits are enough for all three.
    parts: list[list[NDArray[np.int32]]] = [[np.empty(0, dtype=np.int32)] for _ in range(3)]
    counts = [0]
    for number in range(shards):
        ends, characters = arrays_of(folder, number, ["ends", "characters"])
        lengths = np.diff(ends, prepend=0)
        for part, values in zip(parts, (ends - lengths, lengths, characters)):
            part.append(values.astype(np.int32))
        counts.append(len(ends))
    return Table(folder, np.cumsum(counts, dtype=np.int64), *map(np.concatenate, parts))


def _joined(parts: Sequence[NDArray[Any]]) -> Integers:
    import numpy as np

    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def decide(config: CleanConfig, table: Table, workers: Workers) -> Verdicts:
    """Find exact duplicates, then (where the settings say so) near ones among the rest."""
    import numpy as np

    repeats = exact(table)
    similarity = np.where(repeats >= 0, EXACT, 0).astype(np.float32)
    if config.near_duplicates and table.documents:
        alone = np.flatnonzero(repeats < 0)
        if config.keep == "longest":
            alone = alone[np.argsort(-table.characters[alone], kind="stable")]
        near, found = _near(config, table, alone, workers)
        removed = near >= 0
        repeats[alone[removed]] = alone[near[removed]]
        similarity[alone[removed]] = found[removed]
        # A copy of a document that went repeats what that one repeats.
        copies = np.flatnonzero(similarity == EXACT)
        of = repeats[copies]
        again = repeats[of] >= 0
        repeats[copies[again]] = repeats[of[again]]
        similarity[copies[again]] = similarity[of[again]]
    return Verdicts(repeats, similarity)


def exact(table: Table) -> Integers:
    """For each document the first equal one before it, or -1."""
    import numpy as np

    shards = len(table.starts) - 1
    found = np.concatenate(
        [np.empty((0, 2), np.uint64), *(arrays_of(table.folder, n, ["digests"])[0] for n in range(shards))]
    )
    order = np.lexsort((found[:, 1], found[:, 0]))  # stable: equal ones stay in their order
    ordered = found[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    leaders = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    repeats = np.full(len(order), -1, dtype=np.int64)
    repeats[order[~first]] = leaders[~first]
    return repeats


def _near(config: CleanConfig, table: Table, order: Integers, workers: Workers) -> tuple[Integers, NDArray[np.float32]]:
    """By place in `order`: the place of the kept document that it repeats (or -1), and how similar they are."""
    import numpy as np

    bands = dedup.bands_for(config.near_duplicate_threshold)
    np.save(table.folder / "order.npy", order.astype(np.int32))
    calls = [(table.folder, table.starts.tolist(), band) for band in range(bands)]
    groups = np.concatenate(([0], np.cumsum(list(workers.map(group_band, calls))))).astype(np.int64)
    with _Sketches(table, order) as sketches:
        similarities = _Similarities(table, order, workers)
        resolver = _Resolver(config.near_duplicate_threshold, int(groups[-1]) + 1, sketches.of, similarities)
        near, found = np.full(len(order), -1, dtype=np.int64), np.zeros(len(order), dtype=np.float32)
        for start in range(0, len(order), _BLOCK_DOCUMENTS):
            stop = min(start + _BLOCK_DOCUMENTS, len(order))
            members, numbers = _entries(table.folder, bands, groups, start, stop)
            names, best = resolver.block(start, stop - start, members, numbers)
            near[start:stop], found[start:stop] = names, best
    for band in range(bands):
        _column(table.folder, band).unlink()
    return near, found


def _column(folder: Path, band: int) -> Path:
    return folder / f"groups-{band:03d}"


def group_band(folder: Path, starts: list[int], band: int) -> int:
    """Number the groups of documents that share their hash in one band: written as int32 in the order of preference, 0
    for a document that shares it with none; returns how many groups there are."""
    import numpy as np

    order = np.load(folder / "order.npy")
    column = np.empty(starts[-1], dtype=np.uint32)
    for number, (start, stop) in enumerate(zip(starts, starts[1:])):
        path = shard_file(folder, number, "bands")
        column[start:stop] = np.fromfile(path, np.uint32, count=stop - start, offset=band * (stop - start) * 4)
    column = column[order]
    del order
    # 32 bits wherever they do: there are as many of these as documents, in every worker.
    by_hash = np.argsort(column, kind="stable").astype(np.int32)
    column = column[by_hash]
    first = np.ones(len(column), dtype=bool)
    first[1:] = column[1:] != column[:-1]
    starts_of_runs = np.flatnonzero(first)
    sizes = np.diff(starts_of_runs, append=len(column))
    shared = (sizes > 1) & (column[starts_of_runs] != 0)
    del column, first, starts_of_runs
    groups = np.empty(len(by_hash), dtype=np.int32)
    groups[by_hash] = np.repeat((np.cumsum(shared) * shared).astype(np.int32), sizes)
    groups.tofile(_column(folder, band))
    return int(shared.sum())


def _entries(folder: Path, bands: int, groups: Integers, start: int, stop: int) -> tuple[Integers, Integers]:
    """(member, group) of each document of a block in each band that it shares, sorted by group, then member."""
    import numpy as np

    members, numbers = [], []
    for band in range(bands):
        column = np.fromfile(_column(folder, band), np.int32, count=stop - start, offset=start * 4)
        within = np.flatnonzero(column)
        members.append(within)
        numbers.append(column[within].astype(np.int64) + groups[band])
    member, number = _joined(members), _joined(numbers)
    by_group = np.argsort(number, kind="stable")
    return member[by_group], number[by_group]


class _Resolver:
    """Takes block after block; remembers the kept documents of each group as chains of (place, next)."""

    def __init__(
        self,
        threshold: float,
        groups: int,
        sketches_of: Callable[[Integers], NDArray[np.uint8]],
        similarities: Callable[[Integers, Integers], NDArray[np.float64]],
    ) -> None:
        import numpy as np

        self._threshold = threshold
        self._sketches_of = sketches_of
        self._similarities = similarities
        self._head = np.full(groups, -1, dtype=np.int32)
        self._place, self._next = np.empty(1024, dtype=np.int32), np.empty(1024, dtype=np.int32)
        self._links = 0

    def block(self, start: int, size: int, member: Integers, group: Integers) -> tuple[Integers, NDArray[np.float64]]:
        """Decide on the documents at `start` to start + size; returns (what each repeats or -1, similarity)."""
        import numpy as np

        self._start = start
        self._names, self._best = np.full(size, -1, dtype=np.int64), np.zeros(size)
        undecided = np.zeros(size, dtype=bool)
        undecided[member] = True
        self._judge(self._kept_beside(member, group))
        undecided &= self._names < 0
        kept = np.zeros(size, dtype=bool)
        judged: list[Integers] = []
        m, g = member, group
        while undecided.any():
            m, g = m[undecided[m]], g[undecided[m]]
            first = np.ones(len(m), dtype=bool)
            first[1:] = g[1:] != g[:-1]
            # Who comes first among the undecided of all its groups has met every kept one before it: it is kept.
            safe = undecided.copy()
            safe[m[~first]] = False
            leader = m[np.maximum.accumulate(np.where(first, np.arange(len(m)), 0))]
            met = ~first & safe[leader]
            judged.append(np.unique(_pair(m[met], leader[met] + start)))
            self._judge(judged[-1])
            kept |= safe
            undecided &= ~safe & (self._names < 0)
        self._keep(member[kept[member]] + start, group[kept[member]])
        gone = self._names[member] >= 0
        others = self._kept_beside(member[gone], group[gone])
        i, j = _unpaired(others)
        later = others[(j >= start) & (j < i + start)]
        self._judge(later[~np.isin(later, _joined(judged))])
        return self._names, self._best

    def _kept_beside(self, member: Integers, group: Integers) -> Integers:
        """Every pair of a member of the block and a kept document of one of its groups, once."""
        import numpy as np

        found, waiting = np.empty(0, dtype=np.int64), 0
        parts: list[Integers] = []
        links = self._head[group]
        while True:
            live = links >= 0
            member, links = member[live], links[live]
            if not len(links):
                return np.unique(_joined([found, *parts]))
            parts.append(_pair(member, self._place[links]))
            waiting += len(links)
            if waiting > 4_000_000:
                found, parts, waiting = np.unique(_joined([found, *parts])), [], 0
            links = self._next[links]

    def _judge(self, pairs: Integers) -> None:
        """Compare pairs, first by estimate, then truly; remember for each member the most similar it repeats."""
        import numpy as np

        for begin in range(0, len(pairs), _PAIRS_AT_ONCE):
            i, j = _unpaired(pairs[begin : begin + _PAIRS_AT_ONCE])
            distinct, back = np.unique(np.concatenate((i + self._start, j)), return_inverse=True)
            sketches = self._sketches_of(distinct)
            seemed = dedup.estimate(sketches[back[: len(i)]], sketches[back[len(i) :]])
            likely = seemed >= self._threshold - _ESTIMATE_MARGIN
            i, j = i[likely], j[likely]
            true = self._similarities(i + self._start, j)
            reached = true >= self._threshold
            i, j, true = i[reached], j[reached], true[reached]
            order = np.lexsort((j, -true, i))
            i, j, true = i[order], j[order], true[order]
            first = np.ones(len(i), dtype=bool)
            first[1:] = i[1:] != i[:-1]
            i, j, true = i[first], j[first], true[first]
            better = (true > self._best[i]) | ((true == self._best[i]) & (j < self._names[i]))
            self._names[i[better]], self._best[i[better]] = j[better], true[better]

    def _keep(self, places: Integers, group: Integers) -> None:
        """Put kept documents into the chains of their groups; sorted by group, then place."""
        import numpy as np

        count, total = len(places), self._links + len(places)
        while total > len(self._place):
            self._place, self._next = (
                np.concatenate((part, np.empty_like(part))) for part in (self._place, self._next)
            )
        links = np.arange(self._links, total)
        first = np.ones(count, dtype=bool)
        first[1:] = group[1:] != group[:-1]
        self._place[self._links : total] = places
        self._next[self._links : total] = np.where(first, self._head[group], links - 1)
        last = np.roll(first, -1) if count else first
        self._head[group[last]] = links[last]
        self._links = total


def _pair(members: Integers, places: NDArray[Any]) -> Integers:
    """A member of the block and a place as one number."""
    made: Integers = (members << 32) | places
    return made


def _unpaired(pairs: Integers) -> tuple[Integers, Integers]:
    return pairs >> 32, pairs & 0xFFFFFFFF


class _Sketches:
    """The sketches of all documents in one file, read where they are wanted."""

    def __init__(self, table: Table, order: Integers) -> None:
        self._path = table.folder / "sketches"
        self._order = order
        with self._path.open("wb") as whole:
            for number in range(len(table.starts) - 1):
                whole.write(shard_file(table.folder, number, "sketches").read_bytes())

    def __enter__(self) -> _Sketches:
        self._file = os.open(self._path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._path.unlink()

    def of(self, places: Integers) -> NDArray[np.uint8]:
        """(n, 128), by place in the order."""
        import numpy as np

        size = dedup.PERMUTATIONS
        rows = [os.pread(self._file, size, document * size) for document in self._order[places].tolist()]
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, size)


class _Similarities:
    """True similarities of pairs, by the workers where there are many."""

    def __init__(self, table: Table, order: Integers, workers: Workers) -> None:
        self._table = table
        self._order = order
        self._workers = workers

    def __call__(self, first: Integers, second: Integers) -> NDArray[np.float64]:
        import numpy as np

        order = np.lexsort((first, second))
        places = [self._table.places(self._order[part[order]]) for part in (first, second)]
        one, other = places
        slices = [slice(begin, begin + _PAIRS_A_CALL) for begin in range(0, len(first), _PAIRS_A_CALL)]
        found = np.empty(len(first))
        if len(slices) == 1:
            together = [similarities(self._table.folder, one, other)]
        else:
            calls = ((self._table.folder, one[part], other[part]) for part in slices)
            together = list(self._workers.map(similarities, calls))
        found[order] = np.concatenate([np.empty(0), *together])
        return found


def similarities(folder: Path, first: Integers, second: Integers) -> NDArray[np.float64]:
    """The Jaccard index of each pair of texts, given as rows of `Table.places`; sorted by the second."""
    import numpy as np

    found = np.empty(len(first))
    # Pairs of so much text at once: for each pair alone numpy's calls would cost more than its work.
    portions = np.cumsum(first[:, 2] + second[:, 2]) // _BYTES_COMPARED_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(portions)) + 1).tolist(), len(first)]
    with TextReader(folder) as texts:
        for begin, end in itertools.pairwise(cuts):
            ones, others = (list(map(tuple, part[begin:end].tolist())) for part in (first, second))
            places = list(dict.fromkeys([*others, *ones]))
            of = dict(zip(places, dedup.shingles_of([texts.read(*place) for place in places])))
            found[begin:end] = [dedup.jaccard(of[one], of[other]) for one, other in zip(ones, others)]
    return found


class TextReader:
    """Reads single texts out of the shards; keeps the files open that it read last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}

    def __enter__(self) -> TextReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, shard: int, offset: int, length: int) -> str:
        """The text at a place of `Table.places`."""
        if shard not in self._open:
            if len(self._open) >= 128:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(shard_file(self._folder, shard, "text"), os.O_RDONLY)
        parts = []
        while length > 0 and (part := os.pread(self._open[shard], length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts).decode()
