"""Linear maps of frozen weights in 4 bits (NF4, Dettmers et al. 2023), as far as their memory goes: for forecasts.

In: a model on tensors without content. Out: the same one, whose frozen maps hold what NF4 holds (codes of 4 bits, a
scale for each block) and take what a product takes: the whole matrix in 16 bits for as long as it is multiplied, in
forward and again in backward. It computes nothing that means anything.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

# Weights that share a scale, and scales that share one of theirs.
BLOCK, SCALES = 64, 256


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, shape: tuple[int, int], keeps_inputs: bool) -> Tensor:
        ctx.shape = shape
        # Not of use in backward, for the matrix gets no gradient; some versions of bitsandbytes keep it all the same.
        ctx.save_for_backward(codes, *([inputs] if keeps_inputs else []))
        return torch.nn.functional.linear(inputs, inputs.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None, None


def _forward(module: nn.Linear, shape: tuple[int, int], keeps_inputs: bool, inputs: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs.dtype
    made: Tensor = _Product.apply(inputs.to(dtype), module.weight, shape, keeps_inputs)  # type: ignore[no-untyped-call]
    # As bitsandbytes does: the result has the format of the input, which under autocast is fp32 behind a norm.
    return (made if module.bias is None else made + module.bias.to(dtype)).to(inputs.dtype)


def quantize(model: nn.Module, names: list[str], *, double: bool, keeps_inputs: bool) -> None:
    """Hold the frozen maps of these names in 4 bits, in place."""
    for name in names:
        module = model.get_submodule(name)
        module = getattr(module, "base_layer", module)
        assert isinstance(module, nn.Linear)
        shape, count = (module.out_features, module.in_features), module.weight.numel()
        module.weight = nn.Parameter(module.weight.new_empty(-(-count // 2), dtype=torch.uint8), requires_grad=False)
        blocks = -(-count // BLOCK)
        module.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8 if double else torch.float32))
        if double:
            module.register_buffer("scales_of_scales", torch.empty(-(-blocks // SCALES), dtype=torch.float32))
        module.forward = functools.partial(_forward, module, shape, keeps_inputs)  # type: ignore[method-assign]
