"""The short form of `make chaos`, and single misfortunes: two processes on one run, a full disk, a clock set back."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from misfortunes import Misfortune
from tiny_runs import Process, Stop, events, run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import chaos
from onecard.train import checkpoint


@pytest.fixture(scope="module")
def whole(folder: Path, tiny_tokenizer_directory: Path) -> chaos.Whole:
    """The best is kept beside the newest alone, so most of what can be lost is removed."""
    return chaos.undisturbed(folder, tiny_tokenizer_directory, "adamw, the best kept")


@pytest.mark.slow
def test_runs_end_the_same_whatever_befalls_them(
    whole: chaos.Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "HOLDS", (3,))
    befell: list[str] = []
    for number in range(2):
        kinds, wrong = chaos.disturb(whole, tmp_path / str(number), random.Random(f"short {number}"))
        assert wrong == "", (kinds, wrong)
        befell += kinds
    assert len(befell) >= 5 and any(kind.startswith("killed while saving") for kind in befell)


def test_a_difference_is_seen(whole: chaos.Whole, folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path) -> None:
    settings = whole.settings | {"output": str(tmp_path / "run"), "learning_rate": 0.0021}
    assert run("pretrain", settings)[0] == 0
    assert chaos.compare(whole.directory, tmp_path / "run") == "other weights"
    assert chaos.compare(whole.directory, whole.directory) == ""


def test_best_and_latest_are_what_is_kept(whole: chaos.Whole) -> None:
    """keep_last = 1 and the best; an evaluation every 2 updates, a save every 3."""
    saved = {event["step"]: event for event in events(whole.directory, "checkpoint")}
    measured = {step: event["held_out_loss"] for step, event in saved.items() if "held_out_loss" in event}
    best = min(measured, key=lambda step: (measured[step], step))
    assert [step for step, _ in checkpoint.found(whole.directory)] == sorted({best, 12})
    assert saved[12]["best"] == best and saved.keys() >= {3, 6, 9, 12}
    found = checkpoint.best(whole.directory)
    assert found is not None and found[0] == best and found[2] == measured[best]


def test_a_full_disk_ends_the_run_with_all_that_was_whole(whole: chaos.Whole, tmp_path: Path) -> None:
    """From the middle of the second half of the operations on."""
    settings = whole.settings | {"output": str(tmp_path / "run")}
    full = Misfortune("full", operation=whole.operations * 3 // 4, where="checkpoints/")
    status, errors = Process("pretrain", settings, misfortune=full).wait()
    assert status == 2
    assert "The disk is full" in errors and "run the same command again" in errors
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    (pause,) = events(tmp_path / "run", "pause")
    assert pause["reason"].startswith("The disk is full while writing")
    newest = checkpoint.newest_whole(tmp_path / "run")
    assert newest is not None and newest[0] == max(event["step"] for event in events(tmp_path / "run", "checkpoint"))
    assert run("pretrain", settings)[0] == 0
    assert chaos.compare(whole.directory, tmp_path / "run") == ""


def test_a_clock_set_back_changes_nothing(whole: chaos.Whole, tmp_path: Path) -> None:
    settings = whole.settings | {"output": str(tmp_path / "run")}
    assert run("pretrain", settings, Stop("update", 8, signal.SIGKILL))[0] == -signal.SIGKILL
    oldest_first = [path for _, path in checkpoint.found(tmp_path / "run")]
    newest = oldest_first[-1]
    for index, path in enumerate(oldest_first):  # the newest looks oldest
        os.utime(path, (1e9 - index,) * 2)
    earlier = Misfortune(clock_seconds=chaos.YEAR_SECONDS)
    assert Process("pretrain", settings, misfortune=earlier).wait()[0] == 0
    (resumed,) = events(tmp_path / "run", "resume")
    assert checkpoint.directory_of(tmp_path / "run", resumed["step"]) == newest
    (start,) = events(tmp_path / "run", "start")
    assert resumed["time"] < start["time"]
    assert chaos.compare(whole.directory, tmp_path / "run") == ""


def test_a_second_process_on_a_run_is_refused_and_harms_nothing(whole: chaos.Whole, tmp_path: Path) -> None:
    settings = whole.settings | {"output": str(tmp_path / "run")}
    first = Process("pretrain", settings, Stop("save", 6, signal.SIGSTOP))
    deadline = time.monotonic() + 60
    part = tmp_path / "run" / "checkpoints"
    while not (list(part.glob(".step-00000006.*")) and _is_stopped(first)):
        assert time.monotonic() < deadline and first.process.is_alive()
        time.sleep(0.02)
    half = sorted(path.name for path in part.iterdir())
    status, errors = Process("pretrain", settings, errors=tmp_path / "second").wait()
    assert status == 2 and "Another process is training in" in errors
    assert sorted(path.name for path in part.iterdir()) == half
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait()[0] == 0
    assert chaos.compare(whole.directory, tmp_path / "run") == ""


def _is_stopped(process: Process) -> bool:
    import psutil

    return psutil.Process(process.process.pid).status() == psutil.STATUS_STOPPED
