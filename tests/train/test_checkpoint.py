from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onecard.errors import ArtifactError
from onecard.train import checkpoint
from onecard.train.checkpoint import Keep


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Every form that a run has: matrices, a 0-dim counter, 16 bits, integers, a slice, an empty one."""
    return {
        "model/weight": torch.arange(12.0).view(3, 4) * scale,
        "model/half": (torch.arange(5.0) * scale).to(torch.bfloat16),
        "model/turned": torch.arange(6.0).view(2, 3).T * scale,
        "optimizer/weight/step": torch.tensor(7.0),
        "generator/cpu": torch.arange(16, dtype=torch.uint8),
    }


def save(run: Path, step: int, *, keep_last: int = 2) -> Path:
    return checkpoint.save(run, step, tensors(step), {"step": step}, keep=Keep(keep_last))


def names(run: Path) -> list[int]:
    return [step for step, _ in checkpoint.found(run)]


def test_everything_is_read_back(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    found = checkpoint.tensor_names(path)
    assert found["optimizer/weight/step"] == (torch.float32, ())
    assert found["model/half"] == (torch.bfloat16, (5,))
    read = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in found.items()}
    assert checkpoint.load(path, read) == {"step": 3}
    for name, value in tensors(3).items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value), name


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    (file,) = set(index["weight_map"].values())
    read = load_file(path / file)
    assert read.keys() == tensors().keys() == index["weight_map"].keys()
    assert all(torch.equal(read[name], value) for name, value in tensors(3).items())


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    checkpoint.load(path, {"model/weight": parameter.detach()})
    assert torch.equal(parameter.detach(), tensors()["model/weight"])


def test_rotation_is_by_number_and_leaves_other_things_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-old").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "step-00001000").mkdir(parents=True)
    for step in (9_999_999, 10_000_000, 10_000_001):
        save(tmp_path, step)
    assert names(tmp_path) == [10_000_000, 10_000_001]
    assert (tmp_path / "checkpoints" / "step-old").is_dir()
    assert (tmp_path / "other" / "checkpoints" / "step-00001000").is_dir()


def test_order_is_that_of_numbers_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 1000)
    for step in (9000, 10000):
        save(new, step, keep_last=1)
    assert names(new) == [10000]
    save(old, 1010, keep_last=2)
    shutil.rmtree(new)
    shutil.copytree(old, new)
    save(new, 10, keep_last=1)  # what was there before, and later in number, is not of its past
    assert names(new) == [10, 1000, 1010] and names(old) == [1000, 1010]
    checkpoint.forget_after(new, 10)
    assert names(new) == [10]


def test_each_of_a_multiple_stays(tmp_path: Path) -> None:
    for step in range(2, 13, 2):
        checkpoint.save(tmp_path, step, tensors(), {}, keep=Keep(last=1, every=4))
    assert names(tmp_path) == [4, 8, 12]
    checkpoint.save(tmp_path, 14, tensors(), {}, keep=Keep(last=2, every=None))
    assert names(tmp_path) == [12, 14]


def test_large_ones_lie_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 60)
    path = save(tmp_path, 3)
    assert len(list(path.glob("*.safetensors"))) == 2  # 48 + 10 bytes, then 24 + 4 + 16
    read = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in checkpoint.tensor_names(path).items()}
    checkpoint.load(path, read)
    assert read.keys() == tensors().keys()
    assert all(torch.equal(read[name], value) for name, value in tensors(3).items())
    next(path.glob("*2-of*.safetensors")).unlink()
    assert checkpoint.newest_whole(tmp_path) is None


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=65_600))
    monkeypatch.setattr(checkpoint.tensor_files, "write", None)
    with pytest.raises(ArtifactError, match="The disk is full: a checkpoint takes 102 B, and 64.1 KiB are free in"):
        save(tmp_path, 20)
    assert names(tmp_path) == [10]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest"])
def test_a_damaged_newest_one_is_named_and_passed_over(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(data[:-3])
    elif damage == "flipped":
        data[-3] ^= 1
        file.write_bytes(data)
    elif damage == "missing":
        file.unlink()
    else:
        (path / "onecard.json").unlink()
    newest = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest[0] == 10
    said = capsys.readouterr().err
    assert "The checkpoint of update 20 is passed over" in said
    assert "step-00000020" in said


def test_a_new_checkpoint_is_not_removed_for_a_later_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 10, keep_last=1)
    damaged = save(tmp_path, 20, keep_last=2)
    (damaged / "state.json").write_text("{}")
    save(tmp_path, 15, keep_last=1)
    newest = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest[0] == 15
    assert names(tmp_path) == [15, 20]
    save(tmp_path, 20, keep_last=1)
    assert names(tmp_path) == [20]
    newest = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest[0] == 20


def test_if_none_is_whole_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.newest_whole(tmp_path) is None
    assert capsys.readouterr().err == ""
    (save(tmp_path, 10) / "state.json").unlink()
    assert checkpoint.newest_whole(tmp_path) is None
    assert "No checkpoint is whole: the run begins anew" in capsys.readouterr().err


@pytest.mark.parametrize("step", [10, 20])
def test_a_write_that_fails_leaves_the_older_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    save(tmp_path, 10)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="disk is full"):
        save(tmp_path, step)
    monkeypatch.undo()
    newest = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest[0] == 10
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount, folder = shutil.which("mount"), tmp_path / "disk"
    folder.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    save(small_disk, 10)
    large: dict[str, Any] = {"model/weight": torch.zeros(400_000)}
    with pytest.raises(ArtifactError, match="disk is full") as fault:
        checkpoint.save(small_disk, 20, large, {"step": 20}, keep=Keep(1))
    assert fault.value.exit_status == 2
    assert "Free some space" in fault.value.remedy
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-00000010"]
    newest = checkpoint.newest_whole(small_disk)
    assert newest is not None and newest[0] == 10
    save(small_disk, 20)  # there is room again
