"""Training for weights of few bits: every product is made with the weight as quantization would leave it.

A model goes in and is changed in place: each linear layer inside the repeated layers multiplies with its rounded
weight, and the gradient passes the rounding as if it were not there (straight-through; Bengio et al. 2013). What is
learned, stepped and saved are the weights before rounding, under the names that they had; `onecard quantize` with the
same format and group, rounding to nearest, makes of them the model that was trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from onecard.errors import ConfigError
from onecard.model.integer_weights import Scheme, rounded, scheme_for
from onecard.model.lora import linear_layers


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies with its rounded weight."""

    scheme: Scheme

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gave it
        """... x inputs -> ... x outputs."""
        weight: Tensor = _StraightThrough.apply(self.weight, self.scheme)  # type: ignore[no-untyped-call]
        return linear(input, weight, self.bias)


class _StraightThrough(torch.autograd.Function):
    """Rounds exactly (weight + (rounded - weight) would differ in its last bits); the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scheme: Scheme) -> Tensor:
        return rounded(weight, scheme).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


def make_aware(model: nn.Module, kind: str) -> Scheme:
    """Let `model` be trained for `int8` or `int4`; the scheme is the one that `onecard quantize` takes by itself.

    ConfigError for a layer whose width no group divides, and for layers that are not plain linear ones.
    """
    layers = [(name, model.get_submodule(name)) for name in linear_layers(model)]
    for name, layer in layers:
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"quantization_aware: {name} is a {type(layer).__name__}, not a plain linear layer.",
                "Set quantization_aware = none.",
            )
    scheme = scheme_for(kind, "auto", ((name, int(layer.in_features)) for name, layer in layers))  # type: ignore[arg-type]
    for _, layer in layers:
        layer.__class__ = RoundedLinear
        layer.scheme = scheme  # type: ignore[assignment]
    return scheme
