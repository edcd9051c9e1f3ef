"""Muon: momentum orthogonalised by Newton-Schulz, for the matrices of a model.

Own code because torch.optim.Muon orthogonalises in bf16 whatever the machine, which processors without bf16 units do
hundreds of times slower than fp32, and one matrix at a time; here matrices of one shape go through together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard.train.eight_bit import Moment, ranges
from onecard.train.rounding import write

# Quintic coefficients of the Newton-Schulz iteration that Keller Jordan published with Muon (2024): they drive all
# singular values to about 1 in five steps.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Numbers in a stack of matrices: enough for full speed, little beside a model.
STACK = 1 << 22


def orthogonalise(matrices_KMN: Tensor, *, steps: int = 5) -> Tensor:
    """The nearest matrices with singular values near 1 (0.7 to 1.2), for a stack K x M x N, in its dtype."""
    a, b, c = _NEWTON_SCHULZ
    made = matrices_KMN
    transposed = made.shape[-2] > made.shape[-1]
    if transposed:
        made = made.mT
    made = made / (made.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = made @ made.mT
        made = a * made + torch.baddbmm(square, square, square, beta=b, alpha=c) @ made
    result: Tensor = made.mT if transposed else made
    return result


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), with decoupled weight decay.

    The step of an M x N matrix is scaled by 0.2 sqrt(max(M, N)), so that its size matches AdamW's (Liu et al. 2025,
    "Muon is scalable for LLM training") and one learning rate serves both. The momentum is kept in fp32, or in 8 bits
    (`eight_bit`); weights may be bf16: rounded stochastically.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        compute_dtype: torch.dtype = torch.float32,
        eight_bit: bool = False,
    ) -> None:
        self._compute_dtype = compute_dtype
        self.eight_bit = eight_bit
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients in `.grad`."""
        assert closure is None, "the loop computes gradients"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                count = max(1, STACK // shape.numel())
                for at in range(0, len(parameters), count):
                    self._step_stack(group, shape, parameters[at : at + count])

    def _step_stack(self, group: dict[str, Any], shape: torch.Size, parameters: list[Tensor]) -> None:
        ahead = torch.stack([self._look_ahead(group, parameter) for parameter in parameters])
        steps = orthogonalise(ahead.to(self._compute_dtype)).float()
        size = group["lr"] * 0.2 * max(shape) ** 0.5
        for parameter, step in zip(parameters, steps):
            values = parameter.detach().float()  # the weights themselves where they are fp32
            values.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-size)
            if parameter.dtype != torch.float32:
                write(parameter, values)

    def _look_ahead(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Take the gradient into the momentum, and look ahead by one more such step (Nesterov)."""
        assert parameter.grad is not None
        gradient, momentum = parameter.grad.float(), group["momentum"]
        state = self.state[parameter]
        if not self.eight_bit:
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            return gradient.lerp(buffer, momentum)
        moment = Moment(state, "momentum_buffer", parameter, signed=True)
        ahead = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        for at in _pieces(parameter):
            part = gradient.reshape(-1)[at]
            buffer = moment.read(at).lerp_(part, 1 - momentum)
            ahead.view(-1)[at] = part.lerp(buffer, momentum)
            moment.write(at, buffer)
        return ahead


def _pieces(parameter: Tensor) -> Iterator[slice]:
    return ranges(parameter.numel(), STACK)
