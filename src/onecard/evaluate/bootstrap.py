"""Is the second better than the first? The paired bootstrap over rows, with a 95 % interval of the difference.

In: for each row what it adds to the sums of both models, and the number that is made of sums (a mean, a loss by token,
BLEU). Out: both numbers, their difference, and where the difference lies in 95 % of resamples: rows drawn with
replacement, the same rows for both models (Efron 1979; Koehn 2004). Rows are whole chats or documents: answers of one
chat are not independent of each other.

Percentile intervals are a little narrow for few rows; below `FEWEST_ROWS` nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

RESAMPLES = 10_000
FEWEST_ROWS = 10
_CELLS_AT_ONCE = 1 << 22

Verdict = Literal["better", "worse", "undecided", "too_few_rows"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What both models reach, and the 95 % interval of model - base."""

    base: float
    model: float
    low: float
    high: float
    rows: int

    @property
    def value(self) -> float:
        """model - base."""
        return self.model - self.base

    def verdict(self, *, higher_is_better: bool) -> Verdict:
        """What can be said of the model: better or worse only where the interval does not hold 0."""
        if self.rows < FEWEST_ROWS:
            return "too_few_rows"
        if self.low <= 0 <= self.high:
            return "undecided"
        return "better" if (self.low > 0) == higher_is_better else "worse"

    def plain(self, *, higher_is_better: bool) -> dict[str, Any]:
        """For a report."""
        return {
            "base": self.base,
            "model": self.model,
            "difference": self.value,
            "low": self.low,
            "high": self.high,
            "rows": self.rows,
            "verdict": self.verdict(higher_is_better=higher_is_better),
        }


def ratio(sums: Numbers) -> Numbers:
    """Of sums (..., 2): the first over the second. A loss by token, or a mean where each row adds (value, 1)."""
    import numpy as np

    found: Numbers = np.divide(sums[..., 0], sums[..., 1], out=np.zeros_like(sums[..., 0]), where=sums[..., 1] > 0)
    return found


def paired(
    base: Sequence[Sequence[float]],
    model: Sequence[Sequence[float]],
    statistic: Callable[[Numbers], Numbers] = ratio,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """Compare two models on the same R rows; `base` and `model` are R x K, what row by row goes into K sums.

    `statistic` makes one number of K sums, along the last axis. ValueError if the rows are not as many, or none.
    """
    import numpy as np

    base_RK, model_RK = (np.asarray(values, dtype=np.float64) for values in (base, model))
    rows = len(base_RK)
    if not rows or len(model_RK) != rows:
        raise ValueError(f"{rows} rows of the base and {len(model_RK)} of the model cannot be paired")
    draw = np.random.default_rng(seed)
    together = max(1, _CELLS_AT_ONCE // rows)
    differences = []
    for start in range(0, resamples, together):
        # How often each row was drawn.
        counts = draw.multinomial(rows, np.full(rows, 1 / rows), size=min(together, resamples - start)).astype(float)
        differences.append(statistic(counts @ model_RK) - statistic(counts @ base_RK))
    low, high = np.quantile(np.concatenate(differences), [0.025, 0.975])
    return Difference(
        float(statistic(base_RK.sum(0))), float(statistic(model_RK.sum(0))), float(low), float(high), rows
    )
