"""Whether the disk has room for the checkpoints of a run, asked before its first update.

In: the loop, whose tensors say how large a checkpoint is. Out: nothing, a warning, or DoesNotFit, all with the numbers.
What other programs write meanwhile it does not know: each save looks again.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from onecard import console
from onecard.errors import DoesNotFit
from onecard.train import checkpoint, state, tensor_files

if TYPE_CHECKING:
    from onecard.train.loop import Loop

# Bytes that each kind of optimizer keeps for a weight, at most, before it has kept any.
_STATE_BYTES = {"Muon": 4.0, "AdamW": 8.0, "AdamW8bit": 2.1, "Adafactor": 0.1}


def checkpoint_bytes(loop: Loop) -> int:
    """Size of a checkpoint: known from the tensors, and before the first update estimated for the optimizer's."""
    tensors = state.tensors(loop)
    known = tensor_files.size_bytes(tensors)
    if any(name.startswith("optimizer/") for name in tensors):
        return known
    for unit in loop.optimizers.units:
        kind = type(unit.part).__name__ + ("8bit" if getattr(unit.part, "eight_bit", False) else "")
        known += round(_STATE_BYTES.get(kind, 8.0) * sum(parameter.numel() for parameter in unit.parameters))
    return known


def check(loop: Loop) -> None:
    """Warn where the checkpoints that are kept, one more and the model do not fit; DoesNotFit where not even two do.

    One always stays while the next is written.
    """
    settings = loop.settings
    size = checkpoint_bytes(loop)
    saves = -(-(settings.max_steps - loop.step) // settings.save_every)
    kept = settings.keep_last + settings.keep_best
    if settings.keep_every is not None:
        kept += settings.max_steps // settings.keep_every
    present = checkpoint.found(loop.run_directory)
    count = min(kept + 1, len(present) + saves)
    if not saves or not count:
        return
    model = sum(parameter.numel() * parameter.element_size() for parameter in loop.model.parameters())
    used = sum(file.stat().st_size for _, path in present for file in path.iterdir())
    free = shutil.disk_usage(loop.run_directory).free
    needed = count * size + model
    if free + used >= needed:
        return
    numbers = (
        f"A checkpoint takes {console.format_bytes(size)}, the model {console.format_bytes(model)}, and "
        f"{console.format_bytes(free)} are free in {loop.run_directory}"
    )
    if free + used < min(2, count) * size:
        raise DoesNotFit(
            f"{numbers}: not even {'two checkpoints' if count > 1 else 'one checkpoint'} would fit.",
            f"Free {console.format_bytes(needed - free - used)}, or choose another --output.",
        )
    console.warn(
        f"{numbers}: that is not enough for {count} checkpoints (those kept, and one being written) and the model, "
        f"{console.format_bytes(needed)}. When the disk is full the run stops, and can be resumed; a lower keep_last "
        "takes less."
    )
