"""Single weights that become zero: those that matter least among the weights of their own row (Wanda; Sun et al. 2024).

In: a weight (outputs x inputs) and the length of each input over sample tokens. Out: which weights stay. The score of a
weight is its size times the length of its input; a share of each row goes, or two of every four neighbours (2:4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onecard.compress.calibration import Lengths, layer_after_layer
from onecard.errors import ConfigError

Sparsity = float | Literal["2:4"]


def kept_weights(weight: Tensor, lengths: Tensor, sparsity: Sparsity) -> Tensor:
    """Which weights stay, a boolean of the shape of `weight`; of equal scores the first go."""
    scores = weight.detach().abs().float() * lengths.float()
    if sparsity == "2:4":
        fours = scores.reshape(-1, 4)
        gone, among = fours.argsort(dim=1, stable=True)[:, :2], fours
    else:
        gone, among = scores.argsort(dim=1, stable=True)[:, : int(scores.shape[1] * sparsity)], scores
    return torch.ones_like(among, dtype=torch.bool).scatter_(1, gone, value=False).reshape(weight.shape)


def check_widths(model: Any, names: Iterable[str], sparsity: Sparsity) -> None:
    """ConfigError for layers whose rows cannot be cut so."""
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"The layer {name} has transposed weights.", "Sparsity is not for this kind of model.")
        if sparsity == "2:4" and layer.in_features % 4:
            raise ConfigError(
                f"The layer {name} has {layer.in_features} inputs, which groups of 4 do not divide.",
                "Set sparsity to a share, such as 0.5.",
            )


def sparsify(model: Any, rows: Sequence[Tensor], sparsity: Sparsity) -> dict[str, Tensor]:
    """Set weights of every linear layer inside the repeated layers to zero, in place; which stayed, by layer name.

    Layer after layer: what enters one is what those before it give, their weights at zero.
    """
    masks: dict[str, Tensor] = {}

    def change(layers: dict[str, nn.Linear], lengths: dict[str, Lengths]) -> None:
        for name, layer in layers.items():
            masks[name] = kept_weights(layer.weight, lengths[name].lengths, sparsity)
            layer.weight.mul_(masks[name])

    layer_after_layer(model, rows, change, Lengths)
    return masks
