"""Every number format and way of saving memory, through the verb: what it learns, and how it goes on when stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import events, lines, pretrain_settings, quicken

from onecard.config import PretrainConfig
from onecard.errors import ConfigError
from onecard.settings import build
from onecard.train.loop import Loop
from onecard.train.pretrain import pretrain

# With these gradients and steps are those of the plain way.
SAME: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "selective"},
    {"optimizer_in_backward": True},
    {"optimizer_in_backward": True, "activation_checkpointing": "full"},
    {"batch_size": 4, "gradient_accumulation_steps": 1},
    {"batch_size": 1, "gradient_accumulation_steps": 4},
]
# With these they are not, but the model learns as well.
NEAR: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "pure_bf16"},
    {"gradients": "bf16"},
    {"optimizer_states": "8bit"},
    {"activation_compression": "8bit"},
    {"precision": "pure_bf16", "optimizer_states": "8bit", "optimizer_in_backward": True},
    {"precision": "pure_bf16", "optimizer": "muon", "optimizer_states": "8bit", "gradients": "bf16"},
    {"activation_compression": "8bit", "activation_checkpointing": 2},
]
# With these it goes another way.
OTHER: list[dict[str, Any]] = [
    {"optimizer": "adafactor"},
    {"optimizer": "muon"},
    {"precision": "pure_bf16", "optimizer": "adafactor"},
]


pytestmark = pytest.mark.usefixtures("quick")


def settings(folder: Path, tokenizer: Path, output: Path, changes: dict[str, Any]) -> PretrainConfig:
    plain = {"optimizer": "adamw", "max_grad_norm": 0.0, "start": "random", "learning_rate": 0.01}
    made = pretrain_settings(folder, tokenizer, **{**plain, **changes})
    if made.get("optimizer_in_backward"):
        made |= {"batch_size": 4, "gradient_accumulation_steps": 1}
    return build(PretrainConfig, made | {"output": str(output)})


def trained(folder: Path, tokenizer: Path, output: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    pretrain(settings(folder, tokenizer, output, changes))
    return load_file(output / "model" / "model.safetensors")


def losses(output: Path) -> list[float]:
    return [row["held_out_loss"] for row in lines(output / "metrics.jsonl") if "held_out_loss" in row]


@pytest.fixture(scope="module")
def plain(folder: Path, tiny_tokenizer_directory: Path) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        return trained(folder, tiny_tokenizer_directory, folder / "plain", {})


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_what_changes_memory_only_changes_nothing_else(
    folder: Path,
    plain: dict[str, torch.Tensor],
    tiny_tokenizer_directory: Path,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    made = trained(folder, tiny_tokenizer_directory, tmp_path / "run", changes)
    for name, value in plain.items():
        torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", NEAR, ids=str)
def test_what_loses_digits_learns_as_well(
    folder: Path,
    plain: dict[str, torch.Tensor],
    tiny_tokenizer_directory: Path,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    made = trained(folder, tiny_tokenizer_directory, tmp_path / "run", changes)
    before, after = losses(folder / "plain"), losses(tmp_path / "run")
    assert before[-1] < before[0] - 0.5  # it learns something in 12 updates
    if changes.get("optimizer") != "muon":
        assert after == pytest.approx(before, abs=0.1) and after != before
    assert after[-1] < after[0] - 0.5
    assert all(bool(torch.isfinite(value).all()) for value in made.values())
    matrices = {value.dtype for value in made.values() if value.ndim == 2}
    assert matrices == {torch.bfloat16 if changes.get("precision") == "pure_bf16" else torch.float32}


@pytest.mark.parametrize("changes", OTHER, ids=str)
def test_other_optimizers_learn(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trained(folder, tiny_tokenizer_directory, tmp_path / "run", changes)
    after = losses(tmp_path / "run")
    assert after[-1] < after[0] - 0.3


@pytest.mark.parametrize("changes", [SAME[4], NEAR[1], *NEAR[6:8], OTHER[0]], ids=str)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    folder: Path,
    tiny_tokenizer_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    whole = trained(folder, tiny_tokenizer_directory, tmp_path / "whole", changes)
    original = Loop.update

    def fail(self: Loop, number: int) -> Any:
        if number == 7:
            raise RuntimeError("power cut")
        return original(self, number)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Loop, "update", fail)
        trained(folder, tiny_tokenizer_directory, tmp_path / "cut", changes)
    resumed = trained(folder, tiny_tokenizer_directory, tmp_path / "cut", changes)
    assert [row["step"] for row in events(tmp_path / "cut", "resume")] == [6]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_an_overflow_of_fp16_costs_no_step(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale far too large is halved until gradients are finite; every row is learned, the schedule is whole."""
    monkeypatch.setattr("onecard.train.scaling.START", 2.0**40)
    trained(folder, tiny_tokenizer_directory, tmp_path / "run", {"precision": "fp16"})
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert not list(events(tmp_path / "run", "skip"))
    overflows = list(events(tmp_path / "run", "overflow"))
    assert len([row for row in overflows if row["step"] == 1]) > 5
    assert [row["loss_scale"] for row in overflows] == [2.0 ** (39 - i) for i in range(len(overflows))]
    assert all(row["grad_norm"] is not None for row in rows)


def test_what_cannot_be_combined_is_named_before_any_work(folder: Path, tiny_tokenizer_directory: Path) -> None:
    output = folder / "never"
    for changes, names in (
        ({"optimizer_in_backward": True, "max_grad_norm": 1.0}, ("optimizer_in_backward", "max_grad_norm")),
        ({"optimizer": "adafactor", "optimizer_states": "8bit"}, ("adafactor", "8bit")),
        ({"cuda_graphs": True, "compile": False}, ("cuda_graphs", "compile")),
    ):
        with pytest.raises(ConfigError) as fault:
            pretrain(settings(folder, tiny_tokenizer_directory, output, changes))
        assert all(name in fault.value.what for name in names)
        assert not output.exists()
