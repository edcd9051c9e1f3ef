"""Codes chosen with regard to what a layer's inputs are: each rounding error is made up for by the weights after it.

In: a weight (outputs x inputs), its steps, and the sum over calibration tokens of x xT (inputs x inputs). Out: codes
whose products with such inputs are nearer to those of the weight than the nearest codes' are (GPTQ; Frantar et al.
2022). Columns go in the order of the inputs' power, greatest first, while groups stay where they stand, so that any
reader of the plain layout reads the result.

Why it stands here: llmcompressor holds transformers back at 5.17, and gptqmodel brings another torch built for CUDA;
the method itself is the loop below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.model.integer_weights import Scheme

# Added to the diagonal, as a share of its mean, so that inputs that hardly ever occur do not blow up.
DAMPING = 0.01
_BLOCK = 64


def compensated_codes(weight: Tensor, steps: Tensor, scheme: Scheme, second_moments: Tensor) -> Tensor:
    """Codes, int8 (outputs x inputs), for `steps` (outputs x groups); `second_moments` is any multiple of sum x xT."""
    width = weight.shape[1]
    moments = second_moments.double().clone()
    power = moments.diagonal().clone()
    # An input that was always zero says nothing of its weights: they are rounded to nearest.
    silent = power <= 0
    moments[silent, silent] = 1.0
    moments.diagonal().add_(DAMPING * float(power.mean().clamp(min=torch.finfo(torch.float64).tiny)))
    order = torch.argsort(power, descending=True, stable=True)
    column_steps = steps.repeat_interleave(scheme.group or width, dim=1)[:, order].float()
    remaining = weight.float()[:, order].clone()
    factor = _upper_factor(moments[order][:, order]).to(remaining.dtype)
    made = torch.empty_like(remaining, dtype=torch.int8)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = torch.empty_like(remaining[:, start:end])
        for column in range(start, end):
            step = column_steps[:, column]
            code = (remaining[:, column] / step).round().clamp(scheme.least, -scheme.least - 1)
            made[:, column] = code.to(torch.int8)
            error = (remaining[:, column] - code * step) / factor[column, column]
            remaining[:, column + 1 : end] -= error[:, None] * factor[column, column + 1 : end]
            errors[:, column - start] = error
        remaining[:, end:] -= errors @ factor[start:end, end:]
    back = torch.empty_like(order)
    back[order] = torch.arange(width)
    return made[:, back]


def _upper_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse: its rows say how later columns make up for an earlier one."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def output_error(weight: Tensor, other: Tensor, second_moments: Tensor) -> float:
    """Sum over outputs and calibration tokens of the squared difference of products with two weights."""
    difference = (weight - other).double()
    return float(((difference @ second_moments.double()) * difference).sum())
