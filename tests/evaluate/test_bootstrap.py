"""The paired bootstrap: intervals that cover the truth, and verdicts that claim no more than the rows can carry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onecard.evaluate.bootstrap import Difference, paired, ratio


def rows(values: object) -> list[list[float]]:
    return [[float(value), 1.0] for value in values]  # type: ignore[attr-defined]


def test_the_interval_is_that_of_all_resamples() -> None:
    # Of four rows there are 4^4 = 256 resamples, all equally likely: the exact quantiles are known.
    base, model = [0.0, 1.0, 2.0, 5.0], [1.0, 1.0, 4.0, 5.0]
    means = [np.mean([model[i] - base[i] for i in drawn]) for drawn in itertools.product(range(4), repeat=4)]
    found = paired(rows(base), rows(model), resamples=40_000)
    assert (found.base, found.model, found.value, found.rows) == (2.0, 2.75, 0.75, 4)
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=1e-12)
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=1e-12)


def test_rows_are_paired() -> None:
    # Each row is better by 0.1, whatever its own level: no doubt is left, though the levels differ by much more.
    levels = np.linspace(0, 100, 50)
    found = paired(rows(levels), rows(levels - 0.1))
    assert found.value == pytest.approx(-0.1)
    assert found.low == pytest.approx(-0.1)
    assert found.high == pytest.approx(-0.1)
    assert found.verdict(higher_is_better=False) == "better"
    assert found.verdict(higher_is_better=True) == "worse"


def test_a_mean_by_token_weighs_rows_by_their_tokens() -> None:
    # 4 tokens of mean 1 and 60 of mean 3 are 184 / 64 = 2.875, for the base twice that.
    found = paired([[8.0, 4.0], [360.0, 60.0]], [[4.0, 4.0], [180.0, 60.0]])
    assert found.model == 2.875
    assert found.base == 5.75
    assert ratio(np.array([3.0, 0.0])) == 0.0


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(1).normal(size=(2, 30))
    assert paired(rows(values[0]), rows(values[1]), seed=3) == paired(rows(values[0]), rows(values[1]), seed=3)
    assert paired(rows(values[0]), rows(values[1]), seed=3) != paired(rows(values[0]), rows(values[1]), seed=4)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        base = draw.normal(size=60)
        found = paired(rows(base), rows(base + draw.normal(0.5, 1.0, size=60)), seed=trial, resamples=400)
        held += found.low <= 0.5 <= found.high
    assert 180 <= held <= 198  # 95 % of 200 is 190


def test_verdicts() -> None:
    assert Difference(1, 2, 0.5, 1.5, 60).verdict(higher_is_better=True) == "better"
    assert Difference(1, 2, 0.5, 1.5, 60).verdict(higher_is_better=False) == "worse"
    assert Difference(2, 1, -1.5, -0.5, 60).verdict(higher_is_better=True) == "worse"
    assert Difference(1, 1, -0.1, 0.1, 60).verdict(higher_is_better=True) == "undecided"
    assert Difference(1, 1, 0.0, 0.0, 60).verdict(higher_is_better=True) == "undecided"
    assert Difference(1, 2, 0.5, 1.5, 9).verdict(higher_is_better=True) == "too_few_rows"


def test_rows_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired(rows([1, 2]), rows([1]))
    with pytest.raises(ValueError, match="cannot be paired"):
        paired([], [])
