"""Weights as integers of 4 or 8 bits with a scale for each row, or for each group of neighbours in a row.

A weight (outputs x inputs) goes in; codes and scales come out, and what they stand for: code * scale. Zero stays zero.
Codes are packed into 32-bit words in the layout "pack-quantized" of the library compressed-tensors, which vLLM and
transformers read. Training for such weights (`model.quantization_aware`) and quantization itself both round here.

Scales are numbers of bfloat16, rounded up: so a file in any 16-bit format holds them as they are, and no weight is
further from its code than half a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from onecard.errors import ConfigError

GROUPS = (128, 64, 32)
_SMALLEST = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True)
class Scheme:
    """How many bits a code has, and how many neighbours in a row share a scale (0: the whole row)."""

    bits: int
    group: int = 0

    @property
    def least(self) -> int:
        """The smallest code; the largest is -least - 1."""
        return -(1 << (self.bits - 1))


def scheme_for(kind: str, group_size: int | str, widths: Iterable[tuple[str, int]]) -> Scheme:
    """The scheme of `int8` or `int4` for layers given as (name, inputs).

    int8 has a scale a row. int4 has one a group: `group_size`, or with `auto` the largest that divides every width.
    ConfigError names a layer whose width is no multiple of the group.
    """
    if kind == "int8":
        return Scheme(8)
    layers = list(widths)
    if group_size == "auto":
        for group in GROUPS:
            if all(width % group == 0 for _, width in layers):
                return Scheme(4, group)
    wanted = GROUPS[-1] if group_size == "auto" else int(group_size)
    if wanted not in GROUPS:
        raise ConfigError(f"group_size = {wanted} is not what others read.", "Set group_size = 32, 64 or 128, or auto.")
    for name, width in layers:
        if width % wanted:
            fitting = [str(group) for group in GROUPS if width % group == 0]
            raise ConfigError(
                f"The layer {name} has {width} inputs, which groups of {wanted} do not divide.",
                f"Set group_size = {fitting[0]}." if fitting else "Use int8, which has a scale for each row.",
            )
    return Scheme(4, wanted)


def scales(weight: Tensor, scheme: Scheme) -> Tensor:
    """The step of each group (rows x groups), fp32: the largest weight is 7.5 steps (127.5 in 8 bits) from zero.

    ValueError for weights that are not finite.
    """
    largest = _grouped(weight.float(), scheme).abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise ValueError("weights that are not finite")
    step = (largest / (-scheme.least - 0.5)).clamp(min=_SMALLEST)
    rounded = step.to(torch.bfloat16)
    # The next number of the format is the next pattern of bits.
    above = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    rounded = torch.where(rounded.float() < step, above, rounded)
    # A group of zeros has no step of its own; any serves.
    return torch.where(largest == 0, torch.ones_like(step), rounded.float())


def codes(weight: Tensor, steps: Tensor, scheme: Scheme) -> Tensor:
    """The nearest code of each weight, int8 (rows x inputs)."""
    ratio = _grouped(weight.float(), scheme) / steps.unsqueeze(-1)
    return ratio.round().clamp(scheme.least, -scheme.least - 1).to(torch.int8).reshape(weight.shape)


def restored(codes_: Tensor, steps: Tensor, scheme: Scheme) -> Tensor:
    """The weights that codes stand for, fp32."""
    return (_grouped(codes_.float(), scheme) * steps.unsqueeze(-1)).reshape(codes_.shape)


def rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """What `weight` becomes: the nearest weights that codes can stand for, fp32."""
    steps = scales(weight, scheme)
    return restored(codes(weight, steps, scheme), steps, scheme)


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """rows x groups x members."""
    rows, width = weight.shape
    return weight.reshape(rows, -1, scheme.group or width)


def pack(codes_: Tensor, scheme: Scheme) -> Tensor:
    """Codes as 32-bit words (rows x words), the first code in the lowest bits, counted from the least code up."""
    unsigned = (codes_.to(torch.int16) - scheme.least).to(torch.uint8)
    together = 32 // scheme.bits
    if missing := -unsigned.shape[1] % together:
        unsigned = torch.nn.functional.pad(unsigned, (0, missing))
    if scheme.bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def unpack(words: Tensor, width: int, scheme: Scheme) -> Tensor:
    """The codes in words, int8 (rows x width)."""
    unsigned = words.contiguous().view(torch.uint8)
    if scheme.bits == 4:
        unsigned = torch.stack((unsigned & 15, unsigned >> 4), dim=-1).flatten(1)
    return (unsigned[:, :width].to(torch.int16) + scheme.least).to(torch.int8)
