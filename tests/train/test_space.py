"""Room on the disk, asked for before a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard.errors import DoesNotFit
from onecard.train import checkpoint, space, state
from onecard.train.checkpoint import Keep

# A model of 1000 weights and 24 bytes of generator: with AdamW's state 4000 + 8000 + 24 bytes a checkpoint.
MODEL, CHECKPOINT = 4_000, 12_024


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `space` looks at of a loop: 12 updates, a save every 3, two kept."""
    model = torch.nn.Linear(100, 10, bias=False)
    held: dict[str, torch.Tensor] = {"model/weight": model.weight.detach(), "generator/cpu": torch.zeros(3).double()}
    monkeypatch.setattr(state, "tensors", lambda _: held)
    unit = SimpleNamespace(part=torch.optim.AdamW(model.parameters()), parameters=[model.weight])
    settings = SimpleNamespace(max_steps=12, save_every=3, keep_last=2, keep_best=False, keep_every=None)
    return SimpleNamespace(
        run_directory=tmp_path,
        model=model,
        step=0,
        settings=settings,
        optimizers=SimpleNamespace(units=[unit]),
        held=held,
    )


def free(patch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil.disk_usage("/")
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=count))


def warned(loop: Any, capsys: pytest.CaptureFixture[str]) -> bool:
    space.check(loop)
    return "not enough" in " ".join(capsys.readouterr().err.split())


def test_the_size_is_known_from_the_tensors(loop: Any) -> None:
    assert space.checkpoint_bytes(loop) == CHECKPOINT
    loop.held["optimizer/weight/momentum"] = torch.zeros(1000, dtype=torch.bfloat16)
    assert space.checkpoint_bytes(loop) == 4_024 + 2_000


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"keep_best": True}, 4),
        ({"keep_every": 6, "save_every": 1}, 5),
        ({"keep_last": 9}, 4),  # no more than are written at all
        ({"max_steps": 3}, 1),
    ],
    ids=str,
)
def test_those_kept_one_more_and_the_model_must_fit(
    loop: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    count: int,
) -> None:
    loop.settings = SimpleNamespace(**vars(loop.settings) | changes)
    needed = count * CHECKPOINT + MODEL
    free(monkeypatch, needed)
    assert not warned(loop, capsys)
    free(monkeypatch, needed - 1)
    assert warned(loop, capsys)


def test_where_not_even_two_fit_nothing_begins(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * CHECKPOINT)
    space.check(loop)
    free(monkeypatch, 2 * CHECKPOINT - 1)
    with pytest.raises(
        DoesNotFit, match="A checkpoint takes 11.7 KiB, the model 3.9 KiB, and 23.5 KiB are free"
    ) as fault:
        space.check(loop)
    assert "not even two checkpoints" in fault.value.what and "Free 15.6 KiB" in fault.value.remedy


def test_what_is_there_already_counts(
    loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.save(tmp_path, 3, {"a": torch.zeros(2_500)}, {}, keep=Keep())
    used = sum(file.stat().st_size for file in path.iterdir())
    loop.step = 3
    free(monkeypatch, 3 * CHECKPOINT + MODEL - used)
    assert not warned(loop, capsys)
    free(monkeypatch, 3 * CHECKPOINT + MODEL - used - 1)
    assert warned(loop, capsys)


def test_a_run_that_is_done_needs_nothing(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    loop.step = 12
    space.check(loop)
