"""What a checkpoint of a run holds: everything that decides how it goes on.

Tensors: what is trained, buffers, optimizer state, generators. Numbers: counts, the place in the data, the loss scale,
and the settings that were changed on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecard import console
from onecard.data.batches import Position
from onecard.train import changes, checkpoint

if TYPE_CHECKING:
    from onecard.train.loop import Loop


def tensors(loop: Loop) -> dict[str, Tensor]:
    """By name: model/, optimizer/ and generator/."""
    made = _of_the_model(loop)
    made |= {f"optimizer/{name}": value for name, value in loop.optimizers.state_tensors().items()}
    made["generator/cpu"] = torch.get_rng_state()
    if loop.precision.device == "cuda":
        made["generator/cuda"] = torch.cuda.get_rng_state()
    return made


def _of_the_model(loop: Loop) -> dict[str, Tensor]:
    parameters = list(loop.model.named_parameters())
    if any(parameter.requires_grad for _, parameter in parameters):
        # What is frozen is as it was when the run began.
        parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    named = [*parameters, *loop.model.named_buffers()]
    return {f"model/{name}": tensor.detach() for name, tensor in named}


def numbers(loop: Loop) -> dict[str, Any]:
    """What goes into state.json."""
    return {
        "step": loop.step,
        "taken": loop.taken,
        "tokens": loop.tokens,
        "seconds": loop.seconds,
        "skipped": loop.skipped,
        "watchdog": loop.watchdog.state(),
        "loss_scale": loop.loss_scale.state(),
        "optimizers": loop.optimizers.kinds(),
        "order": {
            "rows_per_update": loop.order.rows_per_update,
            "weights": loop.order.weights,
            "first": list(loop.order.first),
        },
        "changes": loop.changes,
    }


def restore_model(loop: Loop, path: Path) -> None:
    """Put the weights where they were when the checkpoint was written, and nothing else."""
    _load(loop, path, only="model/")


def _load(loop: Loop, path: Path, *, only: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill the model from a checkpoint; its numbers, and all of its tensors whose names begin with `only`."""
    targets = _of_the_model(loop)
    loaded = {}
    for name, (dtype, shape) in checkpoint.tensor_names(path).items():
        if not name.startswith(only):
            continue
        # Straight into the weights where they are kept in the same format as then.
        fits = name in targets and targets[name].dtype == dtype
        loaded[name] = targets[name] if fits else torch.empty(shape, dtype=dtype)
    found = checkpoint.load(path, loaded)
    with torch.no_grad():
        for name, target in targets.items():
            if loaded[name] is not target:
                target.copy_(loaded[name])
    return found, loaded


def restore(loop: Loop, path: Path) -> None:
    """Put a loop where it was when the checkpoint was written."""
    found, loaded = _load(loop, path)
    _restore_optimizers(loop, found, loaded)
    torch.set_rng_state(loaded["generator/cpu"])
    if loop.precision.device == "cuda" and "generator/cuda" in loaded:
        torch.cuda.set_rng_state(loaded["generator/cuda"])
    for name, value in found["changes"].items():
        changes.make(loop, name, value)
    order = found["order"]
    loop.close()
    loop.order = loop.order.moved(
        Position(*order["first"]), rows_per_update=order["rows_per_update"], weights=order["weights"]
    )
    loop.step, loop.taken, loop.tokens = found["step"], found["taken"], found["tokens"]
    loop.seconds, loop.skipped = found["seconds"], found["skipped"]
    loop.watchdog.load(found["watchdog"])
    loop.loss_scale.load(found["loss_scale"])
    loop.control.reach(loop.step)


def _restore_optimizers(loop: Loop, found: dict[str, Any], loaded: dict[str, Tensor]) -> None:
    if found["optimizers"] != loop.optimizers.kinds():
        console.warn(
            f"The optimizer is another one now ({', '.join(loop.optimizers.kinds())}; it was "
            f"{', '.join(found['optimizers'])}): what it remembered is dropped."
        )
        return
    loop.optimizers.load_state_tensors(
        {name.removeprefix("optimizer/"): t for name, t in loaded.items() if name.startswith("optimizer/")}
    )
