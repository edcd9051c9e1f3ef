"""How well classes are told: accuracy and F1 with their intervals, calibration, thresholds. Pure functions of arrays.

Shapes: S texts, C classes. Intervals are those of 1,000 bootstrap samples of the texts, 2.5 to 97.5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP_SAMPLES = 1000
_BINS = 10


@dataclass(frozen=True)
class Interval:
    """An estimate, and where it lies in 95 % of resamples."""

    value: float
    low: float
    high: float

    def plain(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def counts_of(wanted_SC: NDArray[np.bool_], said_SC: NDArray[np.bool_]) -> NDArray[np.int64]:
    """C x 3: right, wrongly said, missed, of each class."""
    return np.stack(
        [(wanted_SC & said_SC).sum(0), (~wanted_SC & said_SC).sum(0), (wanted_SC & ~said_SC).sum(0)], axis=1
    )


def f1_of(counts_C3: NDArray[np.int64]) -> NDArray[np.float64]:
    """F1 of each class; 0 for one that was neither wanted nor said."""
    right, wrong, missed = counts_C3.T.astype(float)
    counted = 2 * right + wrong + missed
    found: NDArray[np.float64] = np.divide(2 * right, counted, out=np.zeros_like(right), where=counted > 0)
    return found


def summary(wanted_SC: NDArray[np.bool_], said_SC: NDArray[np.bool_], *, seed: int = 0) -> dict[str, Any]:
    """Accuracy (all classes of a text right), macro F1; and of each class precision, recall, F1, number of texts."""
    right_S = (wanted_SC == said_SC).all(1)
    counts = counts_of(wanted_SC, said_SC)
    draw = np.random.default_rng(seed)
    accuracies, f1s = [], []
    for _ in range(BOOTSTRAP_SAMPLES):
        chosen = draw.integers(0, len(right_S), len(right_S))
        accuracies.append(right_S[chosen].mean())
        f1s.append(f1_of(counts_of(wanted_SC[chosen], said_SC[chosen])).mean())

    def interval(value: float, samples: list[float]) -> dict[str, float]:
        low, high = np.quantile(samples, [0.025, 0.975])
        return Interval(float(value), float(low), float(high)).plain()

    classes = []
    for (right, wrong, missed), f1 in zip(counts.tolist(), f1_of(counts).tolist()):
        classes.append(
            {
                "texts": right + missed,
                "precision": right / (right + wrong) if right + wrong else 0.0,
                "recall": right / (right + missed) if right + missed else 0.0,
                "f1": f1,
            }
        )
    return {
        "texts": len(right_S),
        "accuracy": interval(right_S.mean(), accuracies),
        "macro_f1": interval(f1_of(counts).mean(), f1s),
        "classes": classes,
    }


def confusion(wanted_S: NDArray[np.int64], said_S: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """C x C: how many texts of the class of the row were said to be of the class of the column."""
    return np.bincount(wanted_S * classes + said_S, minlength=classes**2).reshape(classes, classes)


def log_loss(logits_SC: NDArray[np.float64], wanted_SC: NDArray[np.bool_], *, several: bool) -> float:
    """Mean cross-entropy in nats: of a text, or of a class of a text."""
    if several:
        # log(1 + e^x) - x where it is wanted
        return float((np.logaddexp(0, logits_SC) - logits_SC * wanted_SC).mean())
    normal = np.logaddexp.reduce(logits_SC, axis=1)
    return float((normal - logits_SC[wanted_SC]).mean())


def temperature(logits_SC: NDArray[np.float64], wanted_SC: NDArray[np.bool_], *, several: bool) -> float:
    """By which the logits are divided so that their log loss on these texts is least (Guo et al. 2017), 0.05 to 20."""
    low, high = math.log(0.05), math.log(20.0)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):  # the log loss has one minimum
        left, right = high - golden * (high - low), low + golden * (high - low)
        losses = [log_loss(logits_SC / math.exp(at), wanted_SC, several=several) for at in (left, right)]
        low, high = (low, right) if losses[0] <= losses[1] else (left, high)
    return math.exp((low + high) / 2)


def calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """How far stated probabilities are from how often they come true, in the mean over ten bins (expected error)."""
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    error = 0.0
    for number in range(_BINS):
        chosen = bins == number
        if chosen.any():
            error += chosen.mean() * abs(confidence[chosen].mean() - right[chosen].mean())
    return float(error)


def best_thresholds(probabilities_SC: NDArray[np.float64], wanted_SC: NDArray[np.bool_]) -> list[float]:
    """For each class the threshold with the highest F1 on these texts; 0.5 for a class that none of them has."""
    found = []
    for column, wanted in zip(probabilities_SC.T, wanted_SC.T):
        if not wanted.any():
            found.append(0.5)
            continue
        order = np.argsort(-column, kind="stable")
        hits = np.cumsum(wanted[order])
        f1 = 2 * hits / (np.arange(1, len(order) + 1) + wanted.sum())
        # A threshold lies between two different probabilities.
        last = np.append(column[order][:-1] > column[order][1:], True)
        best = int(np.argmax(np.where(last, f1, -1.0)))
        below = column[order][best + 1] if best + 1 < len(order) else 0.0
        found.append(float((column[order][best] + below) / 2))
    return found
