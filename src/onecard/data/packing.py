"""Rows of at most `max_length` tokens, made of whole documents (chats) or of pieces of a stream (plain text).

A row is a list of segments of the token store. Documents never see each other: each segment is attended alone and its
positions restart. Nothing is predicted across the end of a document. For a model that cannot keep documents apart in
one row there are rows of one document each.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onecard.data.tokens import TokenStore
from onecard.errors import DataError

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [begin, end) of the store; `document_end` is where their document ends."""

    begin: int
    end: int
    document_end: int


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows laid end to end. N = rows x max_length.

    input_ids, labels, position_ids: int64, N. boundaries: int32, documents + 1,
    then filled with N. row_lengths: int64, rows: tokens of each but padding.
    labelled: how many labels are learned. tokens: all but padding.
    values: float64, pieces x columns, what the store keeps of the document of each
    piece (NaN for padding); None if it keeps nothing.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    boundaries: NDArray[np.int32]
    row_lengths: NDArray[np.int64]
    longest: int
    labelled: int
    tokens: int
    values: NDArray[np.float64] | None = None

    def moved(self, place: Callable[[NDArray[Any]], NDArray[Any]]) -> RowBatch:
        """The same batch with the large arrays put elsewhere by `place`."""
        return replace(
            self,
            input_ids=place(self.input_ids),
            labels=place(self.labels),
            position_ids=place(self.position_ids),
            boundaries=place(self.boundaries),
        )


class Rows(Protocol):
    """A numbered set of rows over a token store; `per_source` counts the rows of each source, in order."""

    store: TokenStore
    max_length: int
    per_source: list[int]

    def segments(self, row: int) -> list[Segment]: ...


class StreamRows:
    """Plain text: the documents of each source end to end, cut every `max_length` tokens; every token is used once."""

    def __init__(self, store: TokenStore, max_length: int) -> None:
        self.store, self.max_length = store, max_length
        lengths = store.lengths()
        self._documents = [np.flatnonzero(store.source_of == index) for index in range(len(store.sources))]
        # Running length within each source's own stream: where each of its documents begins there.
        self._running = [np.concatenate([[0], np.cumsum(lengths[found])]) for found in self._documents]
        self.per_source = [-(-int(running[-1]) // max_length) for running in self._running]
        self._first_row = np.concatenate([[0], np.cumsum(self.per_source)])
        if not sum(self.per_source):
            raise DataError("There is no token to train on.", "Give more text.")

    def segments(self, row: int) -> list[Segment]:
        """The pieces of documents in a row."""
        source = int(np.searchsorted(self._first_row, row, side="right")) - 1
        running, documents = self._running[source], self._documents[source]
        begin = (row - int(self._first_row[source])) * self.max_length
        stop = min(begin + self.max_length, int(running[-1]))
        found = []
        index = int(np.searchsorted(running, begin, side="right")) - 1
        while begin < stop:
            piece_end = min(stop, int(running[index + 1]))
            if piece_end > begin:
                shift = int(self.store.starts[documents[index]]) - int(running[index])
                found.append(Segment(begin + shift, piece_end + shift, int(running[index + 1]) + shift))
            begin, index = piece_end, index + 1
        return found


class PackedRows:
    """Chats: whole documents put together by best fit, longest first. None may be longer than `max_length`."""

    def __init__(self, store: TokenStore, max_length: int) -> None:
        self.store, self.max_length = store, max_length
        lengths = store.lengths()
        assert not len(lengths) or lengths.max() <= max_length, "chats are cut before they are stored"
        self._rows: list[list[int]] = []
        self.per_source = []
        for source in range(len(store.sources)):
            packed = best_fit(lengths, np.flatnonzero(store.source_of == source), max_length)
            self.per_source.append(len(packed))
            self._rows += packed
        if not self._rows:
            raise DataError("There is no row to train on.", "Give more rows.")

    def segments(self, row: int) -> list[Segment]:
        """The documents in a row."""
        starts = self.store.starts
        return [Segment(int(starts[d]), int(starts[d + 1]), int(starts[d + 1])) for d in self._rows[row]]


class PairRows:
    """Pairs of documents that are learned from together: each two, one after the other, stand in one row.

    Documents 2 i and 2 i + 1 of the store are a pair, of one source. Put together by best fit, longest first; none is
    longer than `max_length`.
    """

    def __init__(self, store: TokenStore, max_length: int) -> None:
        self.store, self.max_length = store, max_length
        lengths = store.lengths().reshape(-1, 2).sum(1)
        assert not len(lengths) or lengths.max() <= max_length, "longer pairs are set aside before they are stored"
        self._rows: list[list[int]] = []
        self.per_source = []
        for source in range(len(store.sources)):
            packed = best_fit(lengths, np.flatnonzero(store.source_of[::2] == source), max_length)
            self.per_source.append(len(packed))
            self._rows += packed
        if not self._rows:
            raise DataError("There is no row to train on.", "Give more rows.")

    def segments(self, row: int) -> list[Segment]:
        """The documents in a row, the two of a pair side by side."""
        starts = self.store.starts
        documents = [document for pair in self._rows[row] for document in (2 * pair, 2 * pair + 1)]
        return [Segment(int(starts[d]), int(starts[d + 1]), int(starts[d + 1])) for d in documents]


class PaddedRows:
    """One document a row; a document longer than `max_length` is cut into several rows, each token used once."""

    def __init__(self, store: TokenStore, max_length: int) -> None:
        self.store, self.max_length = store, max_length
        lengths = store.lengths()
        self._rows: list[Segment] = []
        self.per_source = []
        for source in range(len(store.sources)):
            before = len(self._rows)
            for document in np.flatnonzero((store.source_of == source) & (lengths > 0)).tolist():
                begin, end = int(store.starts[document]), int(store.starts[document + 1])
                self._rows += [Segment(at, min(at + max_length, end), end) for at in range(begin, end, max_length)]
            self.per_source.append(len(self._rows) - before)
        if not self._rows:
            raise DataError("There is no row to train on.", "Give more rows.")

    def segments(self, row: int) -> list[Segment]:
        """The document (or piece of one) in a row."""
        return [self._rows[row]]


def best_fit(lengths: NDArray[np.int64], documents: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing; deterministic. Each document goes into the fullest row that still takes it."""
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free space -> rows with just that much
    spaces: list[int] = []  # the keys of open_rows, sorted
    for document in sorted(documents.tolist(), key=lambda d: (-int(lengths[d]), d)):
        length = int(lengths[document])
        position = bisect.bisect_left(spaces, length)
        if position < len(spaces):
            space = spaces[position]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[position]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        left = space - length
        if left > 0:
            if left not in open_rows:
                open_rows[left] = []
                bisect.insort(spaces, left)
            open_rows[left].append(row)
    return rows


def gather(rows: Rows, numbers: list[int], *, pad_id: int, row_count: int | None = None) -> RowBatch:
    """Lay rows end to end, each filled up to `max_length` with `pad_id` (never learned, attended alone).

    `row_count` fills up with empty rows, so that the last micro-batch of an epoch has the shape of all others.
    """
    store, width = rows.store, rows.max_length
    total = (row_count or len(numbers)) * width
    input_ids = np.full(total, pad_id, dtype=np.int64)
    labels = np.full(total, IGNORED, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    row_lengths = np.zeros(row_count or len(numbers), dtype=np.int64)
    boundaries = [0]
    documents: list[int] = []  # of each piece; -1: padding
    for order in range(row_count or len(numbers)):
        at = order * width
        for segment in rows.segments(numbers[order]) if order < len(numbers) else []:
            size = segment.end - segment.begin
            input_ids[at : at + size] = store.tokens[segment.begin : segment.end]
            # The label of a token is the one after it in the same document, which may lie beyond this row.
            last = min(segment.end + 1, segment.document_end)
            following = store.tokens[segment.begin + 1 : last].astype(np.int64)
            if store.learned is not None:
                following = np.where(store.learned[segment.begin + 1 : last] == 1, following, IGNORED)
            labels[at : at + following.size] = following
            positions[at : at + size] = np.arange(size)
            at += size
            boundaries.append(at)
            documents.append(int(np.searchsorted(store.starts, segment.begin, side="right")) - 1)
        row_end = (order + 1) * width
        row_lengths[order] = at - order * width
        if at < row_end:
            positions[at:row_end] = np.arange(row_end - at)
            boundaries.append(row_end)
            documents.append(-1)
    longest = max(end - begin for begin, end in zip(boundaries, boundaries[1:]))
    # Compiled layers are made for one shape: the boundaries are filled up with empty documents to a fixed number.
    capacity = total // 8 + 2 if len(boundaries) <= total // 8 + 2 else total + 1
    edges = np.full(capacity, total, dtype=np.int32)
    edges[: len(boundaries)] = boundaries
    return RowBatch(
        input_ids,
        labels,
        positions,
        edges,
        row_lengths,
        longest,
        labelled=int((labels != IGNORED).sum()),
        tokens=int(row_lengths.sum()),
        values=None if store.values is None else _values_of(store.values, documents),
    )


def _values_of(values: NDArray[np.float64], documents: list[int]) -> NDArray[np.float64]:
    padding = np.full((1, values.shape[1]), np.nan)
    return np.concatenate([values, padding])[documents]
