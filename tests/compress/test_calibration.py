"""Layer after layer sees what the whole model sees, where layers differ in windows and positions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
from onecard.compress.calibration import Lengths, input_lengths, layer_after_layer


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "gemma3", "phi3"])
def test_inputs_are_those_of_the_whole_model(name: str) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 3}
    if name.startswith("gemma"):
        changes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    model = families.make_family(name, torch.float64, **changes).eval()
    rows = [torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    found: dict[str, torch.Tensor] = {}

    def look(layers: dict[str, Any], kept: dict[str, Any]) -> None:
        found.update({layer: kept[layer].squares for layer in layers})

    layer_after_layer(model, rows, look, Lengths)
    meant = input_lengths(model, rows)
    assert found.keys() == meant.keys()
    for layer, lengths in meant.items():
        assert torch.allclose(found[layer].sqrt().float(), lengths, rtol=1e-6), layer
