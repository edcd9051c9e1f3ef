from __future__ import annotations

from typing import Any

import pytest
import torch

from onecard.machine import calibrate


def test_the_rate_is_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which each product takes 0.25 s: 2 x 256^3 / 0.25 FLOP a second, and no second product."""
    times = iter(k * 0.25 for k in range(100))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(times))
    assert calibrate.matrix_rate(torch.float32, "cpu") == 2 * 256**3 / 0.25
    assert next(times) == 0.5


def test_larger_products_follow_quick_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(k * 0.001 for k in range(100))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(times))
    assert calibrate.matrix_rate(torch.float32, "cpu") == pytest.approx(2 * 1024**3 / 0.001)


@pytest.mark.parametrize(("half", "dtype"), [(119.0, torch.float32), (121.0, torch.bfloat16)])
def test_bf16_is_taken_where_it_is_a_fifth_faster(
    monkeypatch: pytest.MonkeyPatch, half: float, dtype: torch.dtype
) -> None:
    rates: dict[Any, float] = {torch.float32: 100.0, torch.bfloat16: half}
    monkeypatch.setattr(calibrate, "matrix_rate", lambda dtype, device: rates[dtype])
    assert calibrate.fastest_training_dtype("cpu") == (dtype, {"fp32": 100.0, "bf16": half})
