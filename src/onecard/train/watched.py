"""Telling a recorder where a training step is: in which part, layer and module, and what are gradients.

In: a model, and an objective that the loop calls. Out: hooks, and an objective that does the same and says so.
It does not know why the step is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from onecard.data.packing import RowBatch
from onecard.plan.trace import Recorder
from onecard.train.compilation import decoder_layers
from onecard.train.objectives import Objective, _padded, accepted, packed_inputs


def place(name: str) -> tuple[int | None, str]:
    """The layer that a parameter or module belongs to, and its name there."""
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    if found is None:
        return None, name
    return int(found[1]), name[found.end() :] or "layer"


class WholeLogits(Objective):
    """The loss that a model of transformers computes itself, from all logits at once; or that of a classifier."""

    def __init__(self, *, packed: bool, classes: bool) -> None:
        self._packed, self._classes = packed, classes

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """As `Objective.loss`."""
        inputs, labels_N = (packed_inputs if self._packed else _padded)(batch, row_tokens, device)
        ids_BT: Tensor = inputs["input_ids"]
        labels = torch.zeros(len(ids_BT), dtype=torch.int64) if self._classes else labels_N.view(ids_BT.shape)
        with nullcontext() if learn else torch.no_grad():
            made: Tensor = model(**accepted(model, inputs), labels=labels).loss * scale
        return made if learn else made.detach()


class Watched(Objective):
    """Tells a recorder which part of the step it is in."""

    def __init__(self, inner: Objective, recorder: Recorder) -> None:
        self.inner, self._recorder = inner, recorder

    def loss(
        self, model: torch.nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """That of the inner one."""
        recorder = self._recorder
        recorder.begin("forward" if learn else "evaluation")
        made = self.inner.loss(model, batch, scale=scale, device=device, row_tokens=row_tokens, learn=learn)

        def backward(_: Tensor) -> None:
            recorder.begin("backward")
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: recorder.begin("optimizer"))

        if learn:
            made.register_hook(backward)  # type: ignore[no-untyped-call]
        return made

    def begin(self, model: torch.nn.Module, batches: Iterable[RowBatch], *, device: str, row_tokens: int) -> None:
        """That of the inner one."""
        self.inner.begin(model, batches, device=device, row_tokens=row_tokens)


def watch(model: Any, recorder: Recorder) -> list[Any]:
    """Hooks that tell the recorder in which layer and module a pass is, and what gradients are."""
    handles: list[Any] = []
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        handles += _watch_layer(layer, number, recorder, is_last=number == len(layers) - 1)
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            short = place(name)[1]
            handles.append(module.register_forward_pre_hook(lambda *_, short=short: recorder.enter_module(short)))
            handles.append(module.register_forward_hook(lambda *_: recorder.leave_module(), always_call=True))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer_number, short = place(name)

            def claim(tensor: Tensor, layer: int | None = layer_number, short: str = short) -> None:
                assert tensor.grad is not None
                recorder.claim(tensor.grad, "gradients", f"gradient of {short}", layer)

            handles.append(parameter.register_post_accumulate_grad_hook(claim))
    return handles


def _watch_layer(layer: torch.nn.Module, number: int, recorder: Recorder, *, is_last: bool) -> list[Any]:
    def back_in(_: Tensor) -> None:
        recorder.enter(number)

    def back_out(_: Tensor) -> None:
        recorder.enter(None)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.enter(number)
        entering = args[0] if args else kwargs.get("hidden_states")
        if number == 0 and isinstance(entering, Tensor) and entering.requires_grad:
            entering.register_hook(back_out)  # type: ignore[no-untyped-call]

    def after(_: Any, __: Any, output: Any) -> None:
        if is_last:
            recorder.enter(None)
        leaving = output[0] if isinstance(output, tuple) else output
        if leaving.requires_grad:
            leaving.register_hook(back_in)

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]
