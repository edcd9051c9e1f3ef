"""Checkpoints of a run: checkpoints/step-00000120/, whole or absent, the newest whole one is resumed.

Tensors (weights, optimizer state, generators) go through torch.distributed.checkpoint in its safetensors form, so no
pickle is read back and another number of processes can read them later; numbers go into state.json. The manifest
(onecard.json, with a hash of each file) is written last.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from onecard import artifact, console
from onecard.errors import ArtifactError

_NAME = re.compile(r"step-(\d{8})")


def directory_of(run: Path, step: int) -> Path:
    """Where the checkpoint after update `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def found(run: Path) -> list[tuple[int, Path]]:
    """All checkpoint directories of a run by update, oldest first; temporary ones are not among them."""
    matches = ((_NAME.fullmatch(path.name), path) for path in (run / "checkpoints").glob("step-*"))
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def save(run: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, keep_last: int) -> Path:
    """Write the checkpoint after update `step`, then remove all but the newest `keep_last` up to it.

    Later ones, which were damaged and passed over, neither count nor go: the run will write over them.
    """
    target = directory_of(run, step)
    with artifact.new_directory(target, replace=True) as temporary, warnings.catch_warnings():
        # One process is what is meant here; the library warns that no process group was set up.
        warnings.simplefilter("ignore", UserWarning)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        try:
            state_dict_saver.save(
                contiguous, storage_writer=HuggingFaceStorageWriter(path=str(temporary)), no_dist=True
            )
        except CheckpointException as fault:
            raise _cause(fault) from fault
        artifact.write_json_atomically(temporary / "state.json", state)
        artifact.write_manifest(temporary, "checkpoint", settings={"step": step})
    for _, old in [entry for entry in found(run) if entry[0] <= step][:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _cause(fault: CheckpointException) -> BaseException:
    """What went wrong inside the library, such as an OSError of a full disk; its own exception is no Exception."""
    for error, _ in fault.failures.values():
        # safetensors wraps what the file system said.
        inner: BaseException | None = error
        while inner is not None:
            if isinstance(inner, OSError) and inner.errno is not None:
                return inner
            inner = inner.__cause__ or inner.__context__
        return error
    return RuntimeError(str(fault))


def newest_whole(run: Path) -> tuple[int, Path] | None:
    """The newest checkpoint whose files all have their recorded hashes; damaged ones are named and passed over."""
    for step, path in reversed(found(run)):
        try:
            artifact.verify(path)
        except ArtifactError as fault:
            console.warn(f"The checkpoint of update {step} is passed over: {fault.what}")
            continue
        return step, path
    if found(run):
        console.warn("No checkpoint is whole: the run begins anew.")
    return None


def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` (by name, in place) from a checkpoint and return its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


def tensor_names(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of the tensors in a checkpoint."""
    from safetensors import safe_open

    made = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor = opened.get_tensor(name)
                made[name] = (tensor.dtype, tuple(tensor.shape))
    return made
