"""Changing settings of a loop while it runs: what each of `control.MEANWHILE` touches, and what comes too late.

In: a loop between two updates. A change holds from the next update on; the checkpoint keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.data.batches import RowOrder
from onecard.train.control import Request

if TYPE_CHECKING:
    from onecard.train.loop import Loop

_SCHEDULE = {"kind", "max_steps", "warmup_ratio", "decay_ratio", "final_ratio"}
_SETTINGS = {"max_steps", "max_grad_norm", "evaluate_every", "save_every", "keep_last", "log_every", "batch_size"}


def settled(loop: Loop, request: Request) -> Request | None:
    """A change as it can be made now: None, with the reason said, if it cannot."""
    name, value = request.name, request.value
    if name == "mix" and not loop.order.has_rows([value.get(s, 1.0) for s in loop.rows.store.sources]):
        console.warn(f"mix = {value} leaves no row of any source: it stays as it is.")
        return None
    if name == "max_steps" and value <= loop.step:
        if loop.at_end:
            console.note(f"  max_steps = {value} changes nothing: the run is at its end, after update {loop.step}")
            return None
        console.note(f"  update {loop.step} is done already: the run ends after the next one")
        return replace(request, value=loop.step + 1)
    return request


def make(loop: Loop, name: str, value: Any) -> None:
    """Give a setting another value from the next update on."""
    loop.changes[name] = value
    if name in ("learning_rate", "muon_learning_rate", "weight_decay"):
        loop.optimizers.change(name, value)
    elif name == "gradient_accumulation_steps":
        _reorder(loop, loop.order.changed(loop.taken, rows_per_update=value * loop.settings.batch_size))
    elif name == "mix":
        weights = [float(value.get(source, 1.0)) for source in loop.rows.store.sources]
        _reorder(loop, loop.order.changed(loop.taken, weights=weights))
    else:
        field = {"schedule": "kind", "final_learning_rate_ratio": "final_ratio"}.get(name, name)
        if field in _SCHEDULE:
            loop.schedule = replace(loop.schedule, **{field: value})
        if field in _SETTINGS:
            loop.settings = replace(loop.settings, **{field: value})


def _reorder(loop: Loop, order: RowOrder) -> None:
    loop.close()  # what was made ahead is of the old order
    loop.order, loop.taken = order, 0
