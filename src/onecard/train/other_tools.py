"""What other tools' updates do otherwise than the engine's own, to forecast the memory that they were measured to take.

In: a job whose `Engine` says so, and parts of the step that `forecast` traces. Out: the same parts, changed: optimizer
states in the weights' format, gradients that stay, logits that wait for backward. Used in forecasts only, on tensors
without content; no run goes this way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onecard.data.packing import RowBatch
from onecard.model.loss import Head
from onecard.plan.job import Job
from onecard.train.objectives import Objective, _padded, accepted, packed_inputs
from onecard.train.optimizers import Optimizers

# Parts into which torchtune cuts the logits of a batch for its loss.
LOGIT_CHUNKS = 8


def adapters_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Put the adapters of a model with frozen weights into a format."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def states_like_weights(made: Optimizers, *, fused: bool) -> None:
    """Let torch.optim.AdamW step the weights themselves, as most tools do: no fp32 copies, states in their format."""
    settings: dict[str, Any] = {"lr": 1e-4, "fused": True} if fused else {"lr": 1e-4, "foreach": True}
    wide = [unit for unit in made.units if unit._widened]
    for unit in wide:
        unit._widened, unit.targets = False, unit.parameters
    if made.in_backward:
        for unit in wide:
            unit.part = torch.optim.AdamW([{"params": unit.parameters, "decays": True}], **settings)
    elif wide:
        first = wide[0]
        first.parameters = [parameter for unit in wide for parameter in unit.parameters]
        first.targets = first.parameters
        first.part = torch.optim.AdamW([{"params": first.parameters, "decays": True}], **settings)
        made.units[:] = [first, *(unit for unit in made.units if unit not in wide)]
        made._peaks = [[group["lr"] for group in part.param_groups] for part in made.parts]


def keep_gradients(made: Optimizers) -> list[nn.Parameter]:
    """Let gradients be set to zero instead of dropped, and be there from the beginning; returns their parameters."""
    parameters = [parameter for unit in made.units for parameter in unit.parameters]

    def to_zero() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    made.zero_grad = to_zero  # type: ignore[method-assign]
    return parameters


class _WidenedCrossEntropy(torch.autograd.Function):
    """The sum of cross-entropies of 16-bit logits, which are all that is kept; computed in fp32, both times.

    `compiled`: as one kernel each, without room for what is between.
    """

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, labels_C: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(logits_CV)
        ctx.compiled = compiled
        return logits_CV.new_zeros((), dtype=torch.float32) if compiled else F.log_softmax(logits_CV.float(), 1).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits_CV,) = ctx.saved_tensors
        made = torch.empty_like(logits_CV) if ctx.compiled else F.softmax(logits_CV.float(), 1).to(logits_CV.dtype)
        return made, None, None


class KeptLogits(Objective):
    """A loss on chunks of positions whose logits all stay until backward, in the format of the products (torchtune)."""

    def __init__(self, head: Head, *, packed: bool, compiled: bool) -> None:
        self._head, self._packed, self._compiled = head, packed, compiled

    def loss(
        self, model: nn.Module, batch: RowBatch, *, scale: float, device: str, row_tokens: int, learn: bool = True
    ) -> Tensor:
        """As `Objective.loss`."""
        inputs, labels_N = (packed_inputs if self._packed else _padded)(batch, row_tokens, device)
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        hidden_ND = decoder(**accepted(decoder, inputs)).last_hidden_state.flatten(0, 1)
        if not learn:
            hidden_ND = hidden_ND.detach()
        # All logits are made before the first loss: the model's forward pass ends with them.
        logits = [F.linear(part, self._head.weight, self._head.bias) for part in hidden_ND.tensor_split(LOGIT_CHUNKS)]
        total: Tensor = hidden_ND.new_zeros((), dtype=torch.float32)
        for logits_CV, labels_C in zip(logits, labels_N.tensor_split(LOGIT_CHUNKS)):
            total = total + _WidenedCrossEntropy.apply(logits_CV, labels_C, self._compiled)  # type: ignore[no-untyped-call]
        scaled: Tensor = total * scale
        return scaled


def needs_states_like_weights(job: Job) -> bool:
    """Whether the states of the job's optimizer follow the weights: 8-bit ones and those of Adafactor do not."""
    return job.engine.states_like_weights and job.optimizer == "adamw" and job.optimizer_states == "fp32"
