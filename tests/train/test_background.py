"""Checkpoints in the background: what is saved, what it waits for, and what becomes of faults."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_runs import events

from onecard import artifact
from onecard.errors import ArtifactError
from onecard.train import checkpoint
from onecard.train.background import Saver
from onecard.train.checkpoint import Keep
from onecard.train.metrics import RunLog


class Gate:
    """Holds the writer before its manifest until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, self.reached = threading.Event(), threading.Event()
        original = artifact.write_manifest

        def held(*arguments: Any, **settings: Any) -> Any:
            self.reached.set()
            assert self._open.wait(20)
            return original(*arguments, **settings)

        patch.setattr(artifact, "write_manifest", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    made = Saver(tmp_path, RunLog(tmp_path))
    yield made
    made.close()


def values(path: Path) -> tuple[list[float], dict[str, Any]]:
    read = {"model/weight": torch.empty(3)}
    found = checkpoint.load(path, read)
    return read["model/weight"].tolist(), found


def save(saver: Saver, step: int, weight: torch.Tensor, **settings: Any) -> None:
    saver.save(step, {"model/weight": weight}, {"step": step}, **{"keep": Keep(9)} | settings)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_saved_is_the_state_at_that_time(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    weight, numbers = torch.tensor([1.0, 2.0, 3.0]), {"changes": {"learning_rate": 0.1}}
    saver.save(3, {"model/weight": weight}, numbers, keep=Keep())
    assert gate.reached.wait(20)
    weight.mul_(10)
    numbers["changes"]["learning_rate"] = 0.2
    saver.look()  # does not wait
    assert checkpoint.found(tmp_path) == [] and not (tmp_path / "events.jsonl").exists()
    gate.open()
    saver.finish()
    path = checkpoint.directory_of(tmp_path, 3)
    assert values(path) == ([1.0, 2.0, 3.0], {"changes": {"learning_rate": 0.1}})
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3]


def test_the_next_one_waits_for_it_and_uses_the_same_memory(saver: Saver, tmp_path: Path) -> None:
    weight = torch.zeros(3)
    for step in range(1, 6):
        weight.fill_(step)
        save(saver, step, weight)
        if step == 1:
            place = saver._copies["model/weight"].data_ptr()
    weight.fill_(-1)
    saver.finish()
    assert saver._copies["model/weight"].data_ptr() == place
    made = [(step, values(path)) for step, path in checkpoint.found(tmp_path)]
    assert made == [(step, ([float(step)] * 3, {"step": step})) for step in range(1, 6)]


def test_tensors_of_other_shapes_are_copied_too(saver: Saver, tmp_path: Path) -> None:
    """The optimizer has no state before its first step, and may have another kind later."""
    saver.save(1, {"a": torch.ones(2, 3).T}, {}, keep=Keep(9))
    saver.save(2, {"a": torch.ones(2, 3).T, "b": torch.ones((), dtype=torch.bfloat16)}, {}, keep=Keep(9))
    saver.save(3, {"a": torch.ones(5, dtype=torch.int8)}, {}, keep=Keep(9))
    saver.finish()
    kinds = [checkpoint.tensor_names(path) for _, path in checkpoint.found(tmp_path)]
    assert kinds == [
        {"a": (torch.float32, (3, 2))},
        {"a": (torch.float32, (3, 2)), "b": (torch.bfloat16, ())},
        {"a": (torch.int8, (5,))},
    ]


@pytest.mark.parametrize("next_call", ["look", "finish", "save"])
def test_a_full_disk_is_met_at_the_next_look(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_call: str
) -> None:
    save(saver, 1, torch.ones(3))
    saver.finish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        save(saver, 2, torch.ones(3) * 2)
        assert saver._writing is not None
        saver._writing.exception(20)
    calls: dict[str, Callable[[], None]] = {
        "look": saver.look,
        "finish": saver.finish,
        "save": lambda: save(saver, 3, torch.ones(3)),
    }
    with pytest.raises(ArtifactError, match="disk is full"):
        calls[next_call]()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    saver.look()  # said once
    save(saver, 3, torch.ones(3))
    saver.finish()
    assert [step for step, _ in checkpoint.found(tmp_path)] == [1, 3]


def test_when_something_else_ends_the_run_a_fault_is_only_said(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    save(saver, 7, torch.ones(3))
    saver.close()
    assert "The checkpoint of update 7 could not be written: The disk is full" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_closing_waits_for_what_is_being_written(saver: Saver, tmp_path: Path) -> None:
    save(saver, 7, torch.ones(3))
    saver.close()
    assert [step for step, _ in checkpoint.found(tmp_path)] == [7]
    save(saver, 8, torch.ones(3))  # and may go on
    saver.finish()
    assert [step for step, _ in checkpoint.found(tmp_path)] == [7, 8]


@pytest.mark.parametrize("free_bytes", [23, 24])
def test_without_room_for_a_copy_the_loop_waits(
    saver: Saver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free_bytes: int,
) -> None:
    """12 bytes of copies may take half of what is free."""
    memory = psutil.virtual_memory()._replace(available=free_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    threads = []
    original = checkpoint.save

    def watched(*arguments: Any, **settings: Any) -> Path:
        threads.append(threading.current_thread())
        return original(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "save", watched)
    for step in (1, 2):
        save(saver, step, torch.ones(3))
    saver.finish()
    waited = free_bytes == 23
    assert [thread is threading.main_thread() for thread in threads] == [waited] * 2
    assert capsys.readouterr().err.count("while the run waits") == waited
    assert [step for step, _ in checkpoint.found(tmp_path)] == [1, 2]


def test_the_best_and_the_latest_stay(saver: Saver, tmp_path: Path) -> None:
    """Saved every 3 updates, evaluated every 2, one kept: a better evaluation is saved at once."""
    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 2.5, 12: 9.0}
    kept, keep = {}, Keep(last=1, best=True)
    for step in range(1, 13):
        loss = losses.get(step)
        if saver.is_best(loss) or step % 3 == 0:
            save(saver, step, torch.full((3,), float(step)), keep=keep, held_out_loss=loss)
            saver.finish()
        kept[step] = [number for number, _ in checkpoint.found(tmp_path)]
    assert [kept[step] for step in (2, 3, 4, 6, 8, 9, 10, 12)] == [
        [2],
        [2, 3],
        [4],
        [4, 6],
        [4, 6],  # as low as the best is no better
        [4, 9],
        [10],
        [10, 12],
    ]
    found = checkpoint.best(tmp_path)
    assert found == (10, checkpoint.directory_of(tmp_path, 10), 2.5)
    assert values(found[1])[0] == [10.0] * 3
    assert [(event["step"], event["best"]) for event in events(tmp_path, "checkpoint")] == [
        (2, 2),
        (3, 2),
        (4, 4),
        (6, 4),
        (9, 4),
        (10, 10),
        (12, 10),
    ]
    saver.reach(12)
    assert not saver.is_best(2.5) and saver.is_best(2.4)
    saver.reach(9)  # as if the run went back: what came after is not of its past
    assert saver.best == (-1, float("inf"))


def test_a_damaged_best_one_is_passed_over(saver: Saver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It must not stand in the way of the best that is whole."""
    keep = Keep(last=1, best=True)
    for step, loss in ((1, 2.0), (2, 1.0), (3, float("nan"))):
        save(saver, step, torch.ones(3), held_out_loss=loss)
    saver.finish()
    (checkpoint.directory_of(tmp_path, 2) / "state.json").write_text(json.dumps({"step": 2, "other": 1}))
    found = checkpoint.best(tmp_path)
    assert found is not None and found[0] == 1
    assert "The checkpoint of update 2 is passed over" in capsys.readouterr().err
    saver.reach(3)
    assert saver.is_best(1.5) and not saver.is_best(float("nan"))
    for step, loss in ((4, 1.5), (5, 1.7)):
        save(saver, step, torch.ones(3), held_out_loss=loss, keep=keep)
    saver.finish()
    assert [step for step, _ in checkpoint.found(tmp_path)] == [4, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_card_computes_next_comes_after_the_copy(saver: Saver, tmp_path: Path) -> None:
    weight = torch.ones(1 << 24, device="cuda")
    for step in range(1, 5):
        saver.save(step, {"a": weight, "b": torch.full((2,), float(step))}, {}, keep=Keep(9))
        for _ in range(20):
            weight.add_(1)
    saver.finish()
    assert saver._copies["a"].is_pinned() and not saver._copies["b"].is_pinned()
    for step, path in checkpoint.found(tmp_path):
        read = {"a": torch.empty(1 << 24), "b": torch.empty(2)}
        checkpoint.load(path, read)
        assert read["a"].unique().tolist() == [1 + 20 * (step - 1)] and read["b"].tolist() == [step] * 2
