"""Optimizer states in 8 bits: blocks of 256 numbers with one fp32 scale, and AdamW on such states.

A state x in a block with largest magnitude s is kept as the nearest code c of x = s (c / c_max)^power: many codes for
small numbers, as for large ones, over many decades. The second moment is never rounded down to 0, for the step divides
by its root. The idea is that of Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization"); their table of
codes is looked up number by number, this power is arithmetic, which every processor does many at a time. Along the
training of a small model the steps of matrices were off by 3 % of those with fp32 states, with their table by 5 %.
Own code because torchao's compiles one step for every shape of weight (seconds each before the first update) and
bitsandbytes' takes 2.5 times as long on a CPU.
A step goes through the weights in chunks: what it needs for itself does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard.train.rounding import write

BLOCK = 256
# Smaller tensors (norms, biases) keep their states in fp32: they weigh nothing.
SMALLEST = 4096
# Numbers that a step takes at a time: little enough for a processor's cache, enough to keep a card busy.
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}


def encode(values_BN: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (int8; uint8 for numbers that are never negative) and the fp32 scale of each block, of B x N numbers."""
    scales_B = values_BN.abs().amax(1) if signed else values_BN.amax(1)
    share = values_BN / scales_B.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    sign = share.sign()  # many times as fast as comparisons, which make truth values first
    if signed:
        return share.abs_().sqrt_().mul_(127).round_().mul_(sign).to(torch.int8), scales_B
    return torch.maximum(share.sqrt_().sqrt_().mul_(255).round_(), sign).to(torch.uint8), scales_B


def decode(codes_BN: Tensor, scales_B: Tensor) -> Tensor:
    """The fp32 numbers of B x N codes."""
    if codes_BN.dtype == torch.int8:
        share = codes_BN.float().mul_(1 / 127)
        share *= share.abs()
    else:
        share = codes_BN.float().mul_(1 / 255)
        share.square_().square_()
    return share.mul_(scales_B.unsqueeze(1))


class Moment:
    """One state of one tensor, as the plain tensors `name` (codes) and `name_scale` of a state dictionary."""

    def __init__(self, state: dict[str, Any], name: str, like: Tensor, *, signed: bool) -> None:
        self._small = like.numel() < SMALLEST
        self._signed = signed
        if name not in state:
            kind = torch.float32 if self._small else torch.int8 if signed else torch.uint8
            state[name] = torch.zeros(like.shape, dtype=kind, device=like.device)
            if not self._small:
                state[name + "_scale"] = torch.zeros(-(-like.numel() // BLOCK), device=like.device)
        self._values: Tensor = state[name].view(-1)
        self._scales: Tensor | None = None if self._small else state[name + "_scale"]

    def read(self, at: slice) -> Tensor:
        """A range of the flat state in fp32: the state itself where it is small, else a copy."""
        if self._scales is None:
            return self._values[at]
        codes = self._values[at]
        return decode(codes.view(-1, _width(codes)), self._scales[_blocks(at)]).view(-1)

    def write(self, at: slice, values: Tensor) -> None:
        """Set the range to what `read` returned, changed."""
        if self._scales is None:
            return
        codes, scales = encode(values.view(-1, _width(values)), signed=self._signed)
        self._values[at] = codes.view(-1)
        self._scales[_blocks(at)] = scales


def _width(values: Tensor) -> int:
    return min(BLOCK, values.numel())


def _blocks(at: slice) -> slice:
    return slice(at.start // BLOCK, -(-at.stop // BLOCK))


def ranges(count: int, chunk: int) -> Iterator[slice]:
    """0..count in ranges of whole blocks of at most `chunk` numbers; the last block, if it is not whole, by itself."""
    whole = count - count % BLOCK
    for start in range(0, whole, chunk):
        yield slice(start, min(start + chunk, whole))
    if whole < count:
        yield slice(whole, count)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits; everything is computed in fp32. Weights may be bf16: rounded stochastically."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients in `.grad`."""
        assert closure is None, "the loop computes gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    def _step_one(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        # On the host: its value is needed there.
        state["step"] = state["step"].cpu() + 1 if "step" in state else torch.tensor(1.0)
        count = float(state["step"])
        first, second = group["betas"]
        size = group["lr"] / (1 - first**count)
        correction = (1 - second**count) ** 0.5
        keep = 1 - group["lr"] * group["weight_decay"]
        mean = Moment(state, "exp_avg", parameter, signed=True)
        square = Moment(state, "exp_avg_sq", parameter, signed=False)
        assert parameter.grad is not None
        weights, gradients = parameter.detach().view(-1), parameter.grad.reshape(-1)
        for at in ranges(parameter.numel(), CHUNK.get(parameter.device.type, CHUNK["cuda"])):
            gradient = gradients[at].float()
            m, v = mean.read(at), square.read(at)
            m.lerp_(gradient, 1 - first)
            v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            values = weights[at].float()  # the weights themselves where they are fp32
            values.mul_(keep).addcdiv_(m, v.sqrt().div_(correction).add_(group["eps"]), value=-size)
            if weights.dtype != torch.float32:
                write(weights[at], values)
            mean.write(at, m)
            square.write(at, v)
