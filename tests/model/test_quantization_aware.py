"""Training for weights of few bits: what it computes, and what it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onecard.errors import ConfigError
from onecard.model.integer_weights import rounded
from onecard.model.load import load_model
from onecard.model.quantization_aware import RoundedLinear, make_aware


@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int4", 64)])
def test_products_are_those_of_rounded_weights(tiny_model_directory: Path, kind: str, group: int) -> None:
    aware: Any = load_model(tiny_model_directory)
    by_hand: Any = load_model(tiny_model_directory)
    names = list(aware.state_dict())
    scheme = make_aware(aware, kind)
    assert scheme.group == group
    assert list(aware.state_dict()) == names
    layers = [name for name, module in aware.named_modules() if isinstance(module, RoundedLinear)]
    assert len(layers) == 14  # 7 in each of two layers, and not the head
    with torch.no_grad():
        for name in layers:
            weight = by_hand.get_submodule(name).weight
            weight.copy_(rounded(weight, scheme))
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(aware(input_ids=ids).logits, by_hand(input_ids=ids).logits)


def test_the_gradient_passes_the_rounding_unchanged() -> None:
    holder = nn.ModuleDict({"0": nn.Linear(32, 2, bias=False)})
    make_aware(holder, "int4")
    layer: Any = holder["0"]
    inputs = torch.randn(3, 32)
    (layer(inputs) * torch.tensor([1.0, 10.0])).sum().backward()
    expected = torch.stack([inputs.sum(0), 10 * inputs.sum(0)])
    assert torch.allclose(layer.weight.grad, expected, atol=1e-5)


def test_other_layers_are_refused() -> None:
    class Odd(nn.Linear):
        pass

    with pytest.raises(ConfigError, match="0 is a Odd"):
        make_aware(nn.ModuleDict({"0": Odd(32, 2)}), "int4")
