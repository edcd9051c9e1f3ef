"""Figures of a classifier beside hand-computed ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onecard.train import class_metrics


def one_hot(numbers: list[int], classes: int) -> np.ndarray:
    return np.arange(classes) == np.array(numbers)[:, None]


def test_accuracy_precision_recall_and_f1_by_hand() -> None:
    wanted, said = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 0]
    found = class_metrics.summary(one_hot(wanted, 3), one_hot(said, 3))
    assert found["texts"] == 6
    assert found["accuracy"]["value"] == pytest.approx(3 / 6)
    first, second, third = found["classes"]
    assert (first["texts"], first["precision"], first["recall"]) == (3, 2 / 4, 2 / 3)
    assert first["f1"] == pytest.approx(2 * 2 / (2 * 2 + 2 + 1))
    assert second == {"texts": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert third == {"texts": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert found["macro_f1"]["value"] == pytest.approx((4 / 7 + 0.5 + 0) / 3)
    assert found["accuracy"]["low"] < 0.5 < found["accuracy"]["high"]
    again = class_metrics.summary(one_hot(wanted, 3), one_hot(said, 3))
    assert again == found


def test_an_interval_is_as_wide_as_the_binomial_one() -> None:
    wanted = [0] * 400
    said = [0] * 320 + [1] * 80
    each = class_metrics.summary(one_hot(wanted, 2), one_hot(said, 2))["accuracy"]
    half = 1.96 * math.sqrt(0.8 * 0.2 / 400)
    assert each["low"] == pytest.approx(0.8 - half, abs=0.01)
    assert each["high"] == pytest.approx(0.8 + half, abs=0.01)


def test_confusion_counts_rows_of_the_label_and_columns_of_what_was_said() -> None:
    made = class_metrics.confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]), 3)
    assert made.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_the_temperature_undoes_a_known_overconfidence() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(20000, 3))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = one_hot([int(draw.choice(3, p=row)) for row in shares], 3)
    assert class_metrics.temperature(4 * logits, wanted, several=False) == pytest.approx(4, rel=0.05)
    each = draw.random((20000, 3)) < 1 / (1 + np.exp(-logits))
    assert class_metrics.temperature(4 * logits, each, several=True) == pytest.approx(4, rel=0.05)


def test_log_loss_of_one_class_and_of_several() -> None:
    logits = np.array([[0.0, math.log(3)]])
    assert class_metrics.log_loss(logits, one_hot([1], 2), several=False) == pytest.approx(-math.log(0.75))
    several = class_metrics.log_loss(logits, np.array([[True, False]]), several=True)
    assert several == pytest.approx((-math.log(0.5) - math.log(0.25)) / 2)


def test_calibration_is_the_distance_of_bins_from_what_came_true() -> None:
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    right = np.array([True, False, True, True])
    assert class_metrics.calibration_error(confidence, right) == pytest.approx((0.45 + 0.45) / 2)


def test_a_threshold_lies_where_f1_is_highest() -> None:
    shares = np.array([[0.9, 0.2], [0.7, 0.2], [0.4, 0.2], [0.1, 0.2]])
    wanted = np.array([[True, False], [True, False], [False, False], [True, False]])
    # Of three wanted: the first two give F1 4/5, all four 6/7.
    first, second = class_metrics.best_thresholds(shares, wanted)
    assert first == pytest.approx(0.05)
    assert second == 0.5  # no text has it
    wanted[3, 0] = False
    assert class_metrics.best_thresholds(shares, wanted)[0] == pytest.approx(0.55)
