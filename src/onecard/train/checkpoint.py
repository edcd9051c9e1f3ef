"""Checkpoints of a run: checkpoints/step-00000120/, whole or absent, the newest whole one is resumed.

Tensors (weights, optimizer state, generators) lie in the safetensors form of torch.distributed.checkpoint, which reads
them: no pickle, and another number of processes can read them later. Numbers go into state.json. The manifest
(onecard.json, with a hash of each file and the loss on held-out rows, if it was measured at that update) is written
last. It does not know when to save, nor threads: see background.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from onecard import artifact, console
from onecard.errors import ArtifactError
from onecard.train import tensor_files

_NAME = re.compile(r"step-(\d{8,})")
# No file is larger than this, unless a single tensor is.
FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `last`, the `best` on held-out rows, and each multiple of `every`."""

    last: int = 2
    best: bool = False
    every: int | None = None


def directory_of(run: Path, step: int) -> Path:
    """Where the checkpoint after update `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def found(run: Path) -> list[tuple[int, Path]]:
    """All checkpoint directories of a run by update, oldest first; temporary ones are not among them."""
    matches = ((_NAME.fullmatch(path.name), path) for path in (run / "checkpoints").glob("step-*"))
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def save(
    run: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    *,
    keep: Keep,
    held_out_loss: float | None = None,
    best_step: int = -1,
) -> Path:
    """Write the checkpoint after update `step`, then remove what need not be kept of those up to it.

    `best_step` is the update of the best one, damaged ones left out of account.
    Later ones, which were damaged and passed over, neither count nor go: the run will write over them.
    ArtifactError if there is no room for it; whatever happens, the older ones stay until it is whole.
    """
    target = directory_of(run, step)
    _need_room(run, tensor_files.size_bytes(tensors))
    with artifact.new_directory(target, replace=True) as temporary:
        tensor_files.write(temporary, tensors, file_bytes=FILE_BYTES)
        artifact.write_json_atomically(temporary / "state.json", state)
        measured = held_out_loss is not None and math.isfinite(held_out_loss)
        result = {"held_out_loss": held_out_loss} if measured else {}
        artifact.write_manifest(temporary, "checkpoint", settings={"step": step}, result=result)
    _rotate(run, step, keep, best_step)
    return target


def _need_room(run: Path, needed_bytes: int) -> None:
    folder = next(path for path in (run / "checkpoints", run, *run.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + (64 << 10):
        raise ArtifactError(
            f"The disk is full: a checkpoint takes {console.format_bytes(needed_bytes)}, and "
            f"{console.format_bytes(free)} are free in {folder}.",
            "Free some space (a lower keep_last takes less) and run the same command again; finished work is kept.",
        )


def _rotate(run: Path, step: int, keep: Keep, best_step: int) -> None:
    entries = [entry for entry in found(run) if entry[0] <= step]
    kept = {number for number, _ in entries[-keep.last :]}
    if keep.every is not None:
        kept |= {number for number, _ in entries if number % keep.every == 0}
    if keep.best:
        kept.add(best_step)
    for number, path in entries:
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _by_loss(run: Path, at_most: int | None) -> list[tuple[int, Path, float]]:
    """Checkpoints whose loss on held-out rows is known, lowest first, and of equal ones the earlier."""
    made = []
    for step, path in found(run):
        try:
            loss = artifact.read_manifest(path, "checkpoint").result.get("held_out_loss")
        except ArtifactError:
            continue
        if loss is not None and (at_most is None or step <= at_most):
            made.append((step, path, float(loss)))
    return sorted(made, key=lambda entry: (entry[2], entry[0]))


def best(run: Path, *, at_most: int | None = None) -> tuple[int, Path, float] | None:
    """Update, directory and loss (nats) of the whole checkpoint with the lowest loss on held-out rows.

    `at_most` leaves later ones out of account. Load it into a loop with `state.restore`.
    """
    for step, path, loss in _by_loss(run, at_most):
        if _is_whole(step, path):
            return step, path, loss
    return None


def newest_whole(run: Path, *, before: int | None = None) -> tuple[int, Path] | None:
    """The newest checkpoint whose files all have their recorded hashes; damaged ones are named and passed over.

    With `before`, only those of earlier updates count.
    """
    entries = [entry for entry in found(run) if before is None or entry[0] < before]
    for step, path in reversed(entries):
        if _is_whole(step, path):
            return step, path
    if entries and before is None:
        console.warn("No checkpoint is whole: the run begins anew.")
    return None


def _is_whole(step: int, path: Path) -> bool:
    try:
        artifact.verify(path)
    except ArtifactError as fault:
        console.warn(f"The checkpoint of update {step} is passed over: {fault.what}")
        return False
    return True


def forget_after(run: Path, step: int) -> None:
    """Remove the checkpoints of later updates: the run goes on from `step` in another way than it did."""
    for number, path in found(run):
        if number > step:
            shutil.rmtree(path)


def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` (by name, in place) from a checkpoint and return its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


def tensor_names(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of the tensors in a checkpoint, from the heads of its files."""
    from safetensors import safe_open

    made = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = opened.get_slice(name)
                made[name] = (tensor_files.DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return made
