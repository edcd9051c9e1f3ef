"""The order of rows, as a function of (seed, epoch, index): any position is reached without walking to it.

An update takes the next rows of its epoch; the last update of an epoch takes what is left, so that every row is used
exactly once an epoch and the number of updates is known before the run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Position(NamedTuple):
    """A place between two rows: so many of the rows of `epoch` are behind it."""

    epoch: int
    rows: int


START = Position(0, 0)


class RowOrder:
    """Shuffled rows of several sources, each passed over `weight` times an epoch; update 0 begins at `first`."""

    def __init__(
        self,
        per_source: list[int],
        weights: list[float],
        *,
        seed: int,
        rows_per_update: int,
        first: Position = START,
    ) -> None:
        assert len(per_source) == len(weights) and rows_per_update > 0
        self._per_source, self._seed = per_source, seed
        self.weights, self.rows_per_update, self.first = list(weights), rows_per_update, first
        self._first_row = np.concatenate([[0], np.cumsum(per_source)]).astype(np.int64)
        self._taken = [round(count * weight) for count, weight in zip(per_source, weights)]
        self.rows_per_epoch = sum(self._taken)
        self.updates_per_epoch = -(-self.rows_per_epoch // rows_per_update)
        assert self.rows_per_epoch > 0, "callers check that there is a row"
        assert first.rows < self.rows_per_epoch
        # What is left of the epoch that the order begins in.
        self._first_updates = -(-(self.rows_per_epoch - first.rows) // rows_per_update)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def position(self, update: int) -> Position:
        """Where an update begins, counted from 0 over the whole order."""
        if update < self._first_updates:
            return Position(self.first.epoch, self.first.rows + update * self.rows_per_update)
        epoch, index = divmod(update - self._first_updates, self.updates_per_epoch)
        return Position(self.first.epoch + 1 + epoch, index * self.rows_per_update)

    def rows_of_update(self, update: int) -> list[int]:
        """The row numbers of an update."""
        epoch, begin = self.position(update)
        found: list[int] = self._epoch(epoch)[begin : begin + self.rows_per_update].tolist()
        return found

    def has_rows(self, weights: list[float]) -> bool:
        """Whether another mix would take any row in an epoch."""
        return any(round(count * weight) for count, weight in zip(self._per_source, weights))

    def changed(
        self, update: int, *, rows_per_update: int | None = None, weights: list[float] | None = None
    ) -> RowOrder:
        """The order that goes on where `update` would begin, in other steps or, from the next epoch on, another mix."""
        first = self.position(update)
        if weights is not None and weights != self.weights:
            first = Position(first.epoch + (first.rows > 0), 0)
        return self.moved(
            first, rows_per_update=rows_per_update or self.rows_per_update, weights=weights or self.weights
        )

    def moved(self, first: Position, *, rows_per_update: int, weights: list[float]) -> RowOrder:
        """The same rows and seed from another place on."""
        return RowOrder(self._per_source, weights, seed=self._seed, rows_per_update=rows_per_update, first=first)

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        parts = []
        for source, (count, taken) in enumerate(zip(self._per_source, self._taken)):
            # A source is an endless sequence of its own shuffled passes; each epoch takes its next `taken` rows, so
            # that every row comes round equally often whatever the weight.
            at, left = epoch * taken, taken
            while left:
                number, offset = divmod(at, count)
                shuffled = _permutation(count, self._seed, 1 + source, number)
                piece = shuffled[offset : offset + left]
                parts.append(piece + self._first_row[source])
                at, left = at + len(piece), left - len(piece)
        rows = np.concatenate(parts)
        made: NDArray[np.int64] = rows[_permutation(len(rows), self._seed, 0, epoch)]
        return made


def _permutation(count: int, seed: int, stream: int, number: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, number])))
    return generator.permutation(count)
