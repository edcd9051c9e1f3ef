"""The table of `bench memory`: rows from the real loop, what is left out and why, ratios beside the first row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.config import MemoryBenchConfig
from onecard.errors import ConfigError
from onecard.train import memory_bench, peak_memory
from onecard.train.peak_memory import PeakMemory

MEGABYTE = 1 << 20


def config(tmp_path: Path, **changes: Any) -> MemoryBenchConfig:
    tiny: dict[str, Any] = {"size": "2M", "vocabulary_size": 384, "max_length": 64, "batch_size": [2], "updates": 2}
    return MemoryBenchConfig(**(tiny | {"compile": False, "output": tmp_path / "memory"} | changes))


def rates(monkeypatch: pytest.MonkeyPatch, **rates: float) -> None:
    found = {"torch.float32": rates["fp32"], "torch.bfloat16": rates["bf16"]}
    monkeypatch.setattr(memory_bench, "default_device", lambda: "cpu")
    monkeypatch.setattr(memory_bench, "matrix_rate", lambda dtype, _: found[str(dtype)])


def test_the_verb_measures_in_a_process_and_writes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates(monkeypatch, fp32=100e9, bf16=1e9)
    result = memory_bench.memory(config(tmp_path, only=["fp32 + Adafactor", "pure"]))
    skipped, measured = result["rows"]
    assert skipped["name"] == "pure bf16" and "bf16 products run at 1 GFLOP/s here" in skipped["skipped"]
    assert measured["settings"] == {"precision": "fp32", "optimizer": "adafactor"}
    # At least weights and gradients; the model has about 1.4M parameters.
    assert 2 * 4 * result["parameters"] < measured["peak_bytes"] < 400 * MEGABYTE
    assert len(measured["seconds"]) == 2 and measured["tokens_per_second"] > 0
    assert measured["memory_ratio"] == measured["speed_ratio"] == 1
    written = json.loads((tmp_path / "memory" / "memory.json").read_text())
    assert written["rows"] == result["rows"]
    page = (tmp_path / "memory" / "report.html").read_text()
    assert "fp32 + Adafactor" in page and page.count("<figure") == 2
    assert "fp32 + Adafactor" in capsys.readouterr().out


def test_rows_are_named_after_the_format_that_is_fast_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates(monkeypatch, fp32=100e9, bf16=300e9)
    ways = memory_bench._ways(config(tmp_path), "cpu")
    reasons = {measure.name: reason for measure, reason in ways}
    assert [reasons[name] for name in ("fp32", "bf16", "pure bf16")] == ["", "", ""]
    assert "host already" in reasons["bf16 + activations on the host"]
    assert "bf16 + full checkpointing + 8-bit AdamW" in reasons
    with pytest.raises(ConfigError, match="No measurement has flash in its name"):
        memory_bench._ways(config(tmp_path, only=["flash"]), "cpu")


def test_a_measurement_whose_process_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        return type("Done", (), {"returncode": 1, "stdout": "", "stderr": "Traceback\nValueError: broken\n"})

    monkeypatch.setattr(memory_bench.subprocess, "run", wrong)
    assert memory_bench._in_a_process(config(tmp_path), 1, {}) == {"skipped": "ValueError: broken"}


def test_settings_that_exclude_each_other_are_never_measured() -> None:
    asked = {"size": "2M", "max_length": 64, "batch_size": 1, "max_steps": 2, "compile": False, "precision": "fp32"}
    with pytest.raises(ConfigError, match="max_grad_norm"):
        memory_bench.measure({"settings": asked | {"optimizer_in_backward": True}, "vocabulary_size": 384})


def test_ratios_are_beside_the_first_measured_row_of_a_batch_size() -> None:
    rows: list[dict[str, Any]] = [
        {"batch_size": 1, "skipped": "slow"},
        {"batch_size": 1, "peak_bytes": 200, "tokens_per_second": 10.0},
        {"batch_size": 1, "peak_bytes": 50, "tokens_per_second": 8.0},
        {"batch_size": 8, "peak_bytes": 900, "tokens_per_second": 16.0},
    ]
    memory_bench._relate(rows)
    assert [row.get("memory_ratio") for row in rows] == [None, 1.0, 0.25, 1.0]
    assert [row.get("speed_ratio") for row in rows] == [None, 1.0, 0.8, 1.0]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_peak_is_seen_though_it_is_over(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sampled:
        monkeypatch.setattr(peak_memory, "_reset_high_water_mark", lambda: False)
        monkeypatch.setattr(peak_memory, "SAMPLE_SECONDS", 0.001)
    before = np.ones(100 * MEGABYTE, dtype=np.uint8)
    del before  # a peak of the past does not count
    peak = PeakMemory("cpu")
    held = np.ones(64 * MEGABYTE, dtype=np.uint8)
    if sampled:
        sampler = peak._sampler
        assert sampler is not None
        while peak._most - peak._before < 60 * MEGABYTE:
            assert sampler.is_alive()
    del held
    assert 60 * MEGABYTE < peak.bytes() < 90 * MEGABYTE
