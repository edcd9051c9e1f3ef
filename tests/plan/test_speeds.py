"""Measured speeds: how far the planner is from them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("speeds")


def test_every_measured_speed_is_within_the_uncertainty_that_is_said(speeds: Any) -> None:
    assert len(speeds.ROWS) == 12
    for row in speeds.ROWS:
        found = speeds.predicted(row)
        ratio = found.tokens_per_second / row.tokens_per_second
        assert 1 / found.uncertainty < ratio < found.uncertainty, row.title


def test_the_table_has_the_measured_beside_the_predicted(speeds: Any) -> None:
    lines = speeds.table()
    rows = [line for line in lines if line.startswith("| ") and "RTX 5090" in line]
    assert len(rows) == 3
    assert "| 3,800 |" in rows[-1]
    assert lines[-1].startswith("Mean factor of error 1.")
