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
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

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
    """Write the checkpoint after update `step`, then remove all but the newest `keep_last`."""
    target = directory_of(run, step)
    with artifact.new_directory(target, replace=True) as temporary, warnings.catch_warnings():
        # One process is what is meant here; the library warns that no process group was set up.
        warnings.simplefilter("ignore", UserWarning)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        dcp.save(contiguous, storage_writer=HuggingFaceStorageWriter(path=str(temporary)), no_dist=True)
        artifact.write_json_atomically(temporary / "state.json", state)
        artifact.write_manifest(temporary, "checkpoint", settings={"step": step})
    for _, old in found(run)[:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest_whole(run: Path) -> tuple[int, Path] | None:
    """The newest checkpoint whose files all have their recorded hashes; damaged ones are named and passed over."""
    for step, path in reversed(found(run)):
        try:
            artifact.verify(path)
        except ArtifactError as fault:
            console.warn(f"The checkpoint of update {step} is passed over: {fault.what}")
            continue
        return step, path
    return None


def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` (by name, in place) from a checkpoint and return its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
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
