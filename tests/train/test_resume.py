"""A run that was stopped, wherever and however, ends like one that was not: bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Process, Stop, events, pretrain_settings, run, steps, weights, write_corpus

from onecard.data.batches import RowOrder
from onecard.data.packing import StreamRows, gather
from onecard.data.tokens import TokenStore
from onecard.train import checkpoint


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    """A folder with a corpus and a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    status, errors = run("pretrain", pretrain_settings(folder, tiny_tokenizer_directory))
    assert (status, errors) == (0, "")
    return folder


def settings_beside(undisturbed: Path, tokenizer: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return pretrain_settings(undisturbed, tokenizer, **changes) | {"output": str(output)}


def assert_same_end(undisturbed: Path, output: Path) -> None:
    assert steps(output) == list(range(1, 13))
    assert weights(output) == weights(undisturbed / "run")


@pytest.mark.parametrize(
    "stop",
    [
        Stop("update", 2, signal.SIGTERM),  # warm-up, between two micro-batches
        Stop("update", 7, signal.SIGINT, times=2),
        Stop("evaluate", 4, signal.SIGHUP),
        Stop("save", 6, signal.SIGTERM, times=2),  # signals cannot spoil a save
    ],
    ids=str,
)
def test_after_a_signal(undisturbed: Path, tiny_tokenizer_directory: Path, tmp_path: Path, stop: Stop) -> None:
    settings = settings_beside(undisturbed, tiny_tokenizer_directory, tmp_path / "run")
    status, errors = run("pretrain", settings, stop)
    assert status == 130
    assert "everything is saved" in errors and "Run the same command again" in errors
    done = steps(tmp_path / "run")
    assert done == list(range(1, done[-1] + 1))
    # A save in the background lasts some updates; what comes during it is obeyed after the next one that ends.
    assert stop.step < done[-1] < 12 if stop.place == "save" else done[-1] == stop.step
    assert [row["step"] for row in events(tmp_path / "run", "pause")] == [done[-1]]
    assert run("pretrain", settings)[0] == 0
    assert_same_end(undisturbed, tmp_path / "run")


@pytest.mark.parametrize(
    "stop",
    [
        Stop("update", 1, signal.SIGKILL),  # nothing saved yet
        Stop("save", 9, signal.SIGKILL),
        Stop("saved", 12, signal.SIGKILL),  # trained to the end, no model yet
        Stop("model", 12, signal.SIGKILL),  # model half written
        Stop("finish", 12, signal.SIGKILL),  # model written, manifest missing
    ],
    ids=str,
)
def test_after_a_kill(undisturbed: Path, tiny_tokenizer_directory: Path, tmp_path: Path, stop: Stop) -> None:
    settings = settings_beside(undisturbed, tiny_tokenizer_directory, tmp_path / "run")
    assert run("pretrain", settings, stop)[0] == -signal.SIGKILL
    assert run("pretrain", settings)[0] == 0
    assert_same_end(undisturbed, tmp_path / "run")
    # Nothing half-written stays behind.
    assert [p.name for p in (tmp_path / "run").rglob(".*")] == []
    assert not (tmp_path / "run" / "tokens").exists()


def test_after_kills_at_random_times(undisturbed: Path, tiny_tokenizer_directory: Path, tmp_path: Path) -> None:
    settings = settings_beside(undisturbed, tiny_tokenizer_directory, tmp_path / "run")
    chance = random.Random(7)
    for _ in range(3):
        process = Process("pretrain", settings)
        time.sleep(chance.uniform(0.3, 1.5))
        process.kill()
        if process.wait()[0] == 0:
            break
    if not (tmp_path / "run" / "onecard.json").exists():
        assert run("pretrain", settings)[0] == 0
    assert_same_end(undisturbed, tmp_path / "run")


def _mounted(folder: Path, options: str) -> bool:
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return mount is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(undisturbed: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints at most."""
    folder = tmp_path / "disk"
    folder.mkdir()
    checkpoint_files = next((undisturbed / "run" / "checkpoints").iterdir()).iterdir()
    if not _mounted(folder, f"size={sum(file.stat().st_size for file in checkpoint_files) * 5 // 2}"):
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_with_what_and_what_to_do(
    undisturbed: Path, tiny_tokenizer_directory: Path, small_disk: Path, tmp_path: Path
) -> None:
    settings = settings_beside(undisturbed, tiny_tokenizer_directory, small_disk / "run")
    process = Process("pretrain", settings, errors=tmp_path / "stderr")
    status, errors = process.wait()
    assert status == 2
    warned, _, failed = errors.partition("error: ")
    # Three checkpoints and the model do not fit: said before the first update.
    assert warned.startswith("warning: A checkpoint takes")
    assert "not enough for 3 checkpoints" in " ".join(warned.split())
    assert [line[:6] for line in failed.splitlines()] == ["The di", "  fix:"], errors
    assert "The disk is full" in errors and "Free some space" in errors
    newest = checkpoint.newest_whole(small_disk / "run")
    assert newest is not None and newest[0] in (3, 6, 9), errors
    assert _mounted(small_disk, "remount,size=8m")
    assert Process("pretrain", settings, errors=tmp_path / "stderr").wait()[0] == 0
    assert_same_end(undisturbed, small_disk / "run")


def test_a_damaged_newest_checkpoint_costs_only_its_updates(
    undisturbed: Path, tiny_tokenizer_directory: Path, tmp_path: Path
) -> None:
    settings = settings_beside(undisturbed, tiny_tokenizer_directory, tmp_path / "run")
    assert run("pretrain", settings, Stop("save", 12, signal.SIGKILL))[0] == -signal.SIGKILL
    file = next((tmp_path / "run" / "checkpoints" / "step-00000009").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, errors = run("pretrain", settings)
    assert status == 0
    assert "The checkpoint of update 9 is passed over" in errors
    assert [row["step"] for row in events(tmp_path / "run", "resume")] == [6]
    assert_same_end(undisturbed, tmp_path / "run")


def test_a_place_far_on_is_reached_at_once(tmp_path: Path) -> None:
    """100 million tokens in 182,000 documents, in the middle of the eighth epoch: well under a second of work."""
    count, size = 182_000, 550
    np.save(tmp_path / "documents.npy", np.arange(count + 1, dtype=np.int64) * size)
    np.save(tmp_path / "sources.npy", (np.arange(count) % 2).astype(np.uint16))
    with (tmp_path / "tokens.bin").open("wb") as file:
        file.truncate(2 * count * size)  # a hole: nothing is read but the rows of one update
    meta = {"dtype": "uint16", "count": count * size, "sources": ["a", "b"]}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    began = time.process_time()
    rows = StreamRows(TokenStore(tmp_path), 1024)
    order = RowOrder(rows.per_source, [1.0, 2.5], seed=0, rows_per_update=32)
    batch = gather(rows, order.rows_of_update(7 * order.updates_per_epoch + order.updates_per_epoch // 2), pad_id=0)
    assert time.process_time() - began < 1
    assert batch.input_ids.shape == (32 * 1024,)
