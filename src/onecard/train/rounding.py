"""Stochastic rounding: writes fp32 values into bf16 weights so that steps too small for bf16 still count on average.

bf16 has 8 significant bits: 1 + 0.0006 is 1 again, and a weight of 1 would never move. Rounded up with the probability
of the fraction that is cut off, it moves by the right amount on average. The noise comes from the default generator of
the device, which checkpoints keep: a resumed run rounds as the uninterrupted one would.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_bf16(values: Tensor) -> Tensor:
    """fp32 values of any shape as bf16, each rounded up or down with the probability that keeps its mean."""
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device).random_(0, 1 << 16)
    # The upper 16 bits of an fp32 number are its bf16 form, the lower 16 what is cut off.
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)


def write(weight: Tensor, values: Tensor) -> None:
    """Set a weight to fp32 values: as they are, or rounded stochastically where the weight is bf16."""
    weight.copy_(to_bf16(values) if weight.dtype == torch.bfloat16 else values)
