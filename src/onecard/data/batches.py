"""The order of rows, as a function of (seed, epoch, index): any position is reached without walking to it.

An update takes the next rows of its epoch; the last update of an epoch takes what is left, so that every row is used
exactly once an epoch and the number of updates is known before the run.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class RowOrder:
    """Shuffled rows of several sources, each passed over `weight` times an epoch."""

    def __init__(self, per_source: list[int], weights: list[float], *, seed: int, rows_per_update: int) -> None:
        assert len(per_source) == len(weights) and rows_per_update > 0
        self._per_source, self._seed = per_source, seed
        self._first_row = np.concatenate([[0], np.cumsum(per_source)]).astype(np.int64)
        self._taken = [round(count * weight) for count, weight in zip(per_source, weights)]
        self.rows_per_epoch = sum(self._taken)
        self.rows_per_update = rows_per_update
        self.updates_per_epoch = -(-self.rows_per_epoch // rows_per_update)
        assert self.rows_per_epoch > 0, "callers check that there is a row"
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def rows_of_update(self, update: int) -> list[int]:
        """The row numbers of an update, counted from 0 over the whole run."""
        epoch, index = divmod(update, self.updates_per_epoch)
        begin = index * self.rows_per_update
        found: list[int] = self._epoch(epoch)[begin : begin + self.rows_per_update].tolist()
        return found

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
