"""Several models of one base as one: base + the weighted sum of what each of them has learned.

In: a tensor of the base and the same tensor of each model, their weights. Out: the merged tensor. `linear` adds the
differences; `ties` (Yadav et al. 2023) keeps of each difference its largest entries, lets the weighted sum elect a sign
for each entry, and takes the weighted mean of those that agree with it, times the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(base: Tensor, models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """base + sum of w_i (model_i - base), fp64."""
    made = base.double().clone()
    for model, weight in zip(models, weights, strict=True):
        made += weight * (model.double() - base.double())
    return made


def ties(base: Tensor, models: Sequence[Tensor], weights: Sequence[float], density: float) -> Tensor:
    """Trim, elect a sign, take the mean of those that agree; fp64. All weights are positive."""
    kept = [weight * _largest(model.double() - base.double(), density) for model, weight in zip(models, weights)]
    sign = torch.stack(kept).sum(0).sign()
    total, counted = torch.zeros_like(kept[0]), torch.zeros_like(kept[0])
    for difference, weight in zip(kept, weights, strict=True):
        agrees = (difference.sign() == sign) & (difference != 0)
        total += torch.where(agrees, difference, 0.0)
        counted += weight * agrees
    return base.double() + sum(weights) * total / counted.clamp(min=torch.finfo(torch.float64).tiny)


def _largest(difference: Tensor, density: float) -> Tensor:
    """The given share of the entries, those of greatest size; the others are zero. Of equal ones the first stay."""
    flat = difference.flatten()
    count = max(1, round(density * flat.numel())) if flat.numel() else 0
    order = torch.argsort(flat.abs(), descending=True, stable=True)[:count]
    made = torch.zeros_like(flat)
    made[order] = flat[order]
    return made.reshape(difference.shape)
