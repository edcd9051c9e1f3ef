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


def test_a_size_that_is_none_says_what_is() -> None:
    for name in ("enormous", "100", "5B", "0.5M", "-26M", "26M x"):
        with pytest.raises(ConfigError) as fault:
            preset(name)
        assert "1M to 4B" in fault.value.remedy and "2M, 4M" in fault.value.remedy


def test_any_size_gives_a_model_of_about_that_size_in_good_proportion() -> None:
    sizes = [1e6 * 1.17**k for k in range(53)]  # 1M to 3.5B
    for size in sizes:
        shape = preset(f"{size / 1e6:.3f}M")
        assert shape.parameters(shape.vocabulary) == pytest.approx(size, rel=0.07 if size > 5e6 else 0.2)
        assert 25 <= shape.width / shape.layers <= 100
        assert shape.width == 64 * shape.heads and shape.heads % shape.key_value_heads == 0
        assert shape.vocabulary * shape.width < 0.34 * size or size < 4e6
        assert shape.tied == (size < 2e9)
    for name in ("vocabulary", "context_tokens", "update_tokens"):
        values = [getattr(preset(f"{size / 1e6:.3f}M"), name) for size in sizes]
        assert values == sorted(values)


def test_shapes_by_hand() -> None:
    """26M: with 8 heads over 2 of keys and values a layer has 512 x 512 x 2.5 + 3 x 512 x 1408 = 2,818,048."""
    small = preset("26M")
    assert (small.layers, small.width, small.heads, small.key_value_heads, small.feed_forward) == (8, 512, 8, 2, 1408)
    assert small.layer_parameters() == 8 * 2_818_048
    assert (small.vocabulary, small.context_tokens, small.update_tokens) == (6400, 512, 16384)
    assert small.learning_rate == pytest.approx(2e-3)
    billion = preset("1b")
    assert (billion.layers, billion.width, billion.key_value_heads, billion.tied) == (27, 1792, 7, True)
