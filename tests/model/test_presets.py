from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from onecard.errors import ConfigError
from onecard.model.presets import PRESETS, Preset, llama_config, preset


@pytest.mark.parametrize("shape", [*PRESETS.values(), Preset("odd", layers=2, width=64, heads=4, key_value_heads=2)])
def test_parameters_are_those_of_the_model(shape: Preset) -> None:
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape, vocabulary=6000, max_positions=1024, token_ids=ids))
    assert shape.parameters(6000) == sum(p.numel() for p in model.parameters())
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, 2)


def test_sizes_grow() -> None:
    counts = [shape.parameters(6000) for shape in PRESETS.values()]
    assert counts == sorted(counts)
    assert all(
        shape.width % shape.heads == 0 and shape.heads % shape.key_value_heads == 0 for shape in PRESETS.values()
    )


def test_flops_by_hand() -> None:
    """One layer, width 64, all heads: attention 4 x 64 x 64 = 16,384; feed-forward 192 wide: 3 x 64 x 192 = 36,864."""
    shape = Preset("one", layers=1, width=64, heads=1, key_value_heads=1)
    assert shape.feed_forward == 192
    assert shape.layer_parameters() == 53_248
    # 6 x (53,248 + 100 x 64) + 12 x 1 x 64 x 10
    assert shape.training_flops_per_token(100, 10) == 365_568


def test_an_unknown_size_names_the_nearest() -> None:
    assert preset("26M").width == 512
    with pytest.raises(ConfigError) as fault:
        preset("126M")
    assert "125M" in fault.value.remedy or "26M" in fault.value.remedy
    with pytest.raises(ConfigError) as fault:
        preset("enormous")
    assert "2M, 4M" in fault.value.remedy
