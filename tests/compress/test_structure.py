"""Smaller models beside the original: fp64, layers taken out by hand, heads and channels masked by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import families
from onecard.compress.directories import stored_tensors, write_model
from onecard.compress.structure import (
    KINDS,
    Kept,
    after,
    shape_of,
    silence,
    skipping,
    smaller_settings,
    smaller_tensors,
)
from onecard.errors import ConfigError

IDS = torch.arange(3, 33)[None]
LAYERS = 3
# Four query heads of 8 share two key/value heads; 48 channels.
CHANNELS = {0: list(range(0, 48, 3)), 1: list(range(16)), 2: [*range(8), *range(40, 48)]}
ONE_OF_EACH = Kept(
    [0, 2],
    heads={0: [1, 2], 2: [0, 3]},
    key_value_heads={0: [0, 1], 2: [0, 1]},
    channels=CHANNELS,
)
ONE_GROUP = Kept([0, 1, 2], heads={0: [2, 3], 1: [0, 1], 2: [2, 3]}, key_value_heads={0: [1], 1: [0], 2: [1]})
CHOICES = {"layers": Kept([0, 2]), "heads of each group": ONE_OF_EACH, "whole groups": ONE_GROUP}


def family(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three layers of a family in fp64 with the second of another kind than the others, where it knows kinds."""
    rope = {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}
    monkeypatch.setitem(families.FAMILIES, "smollm3", ("SmolLM3", rope))
    monkeypatch.setitem(families.FAMILIES, "gemma", ("Gemma", {"head_dim": 8}))
    changes: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if name in ("gemma2", "gemma3"):
        changes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    families.make_family(name, torch.float64, **changes).save_pretrained(directory)
    # What is written down of the scale of embeddings is rounded when it is read.
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@contextmanager
def masked(model: Any, kept: Kept) -> Iterator[None]:
    """Nothing comes out of other heads and channels: the inputs of the projections after them are zero."""
    hooks = []

    def mask(module: torch.nn.Module, places: list[int]) -> None:
        keep = torch.zeros(module.in_features, dtype=torch.float64)
        keep[places] = 1
        hooks.append(module.register_forward_pre_hook(lambda _, arguments: (arguments[0] * keep,)))

    for number in kept.layers:
        layer = model.model.layers[number]
        if kept.heads is not None:
            mask(layer.self_attn.o_proj, [8 * head + i for head in kept.heads[number] for i in range(8)])
        if kept.channels is not None:
            mask(layer.mlp.down_proj, kept.channels[number])
    yield
    for hook in hooks:
        hook.remove()


def by_hand(model: Any, kept: Kept) -> torch.Tensor:
    """The logits of the original with other heads and channels masked and other layers taken out of its list."""
    with masked(model, kept):
        layers, config = model.model.layers, model.config
        before = {name: getattr(config, name, None) for name in ("num_hidden_layers", "layer_types")}
        model.model.layers = torch.nn.ModuleList([layers[number] for number in kept.layers])
        config.num_hidden_layers = len(kept.layers)
        if before["layer_types"] is not None:
            config.layer_types = [before["layer_types"][number] for number in kept.layers]
        found = logits(model)
        model.model.layers = layers
        config.num_hidden_layers = before["num_hidden_layers"]
        if before["layer_types"] is not None:
            config.layer_types = before["layer_types"]
    return found


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", [kind.removesuffix("_text") for kind in KINDS])
def test_the_smaller_model_says_what_the_masked_one_says(
    name: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = family(name, tmp_path / "model", monkeypatch), CHOICES[choice]
    old = shape_of(tmp_path / "model")
    assert (old.layers, old.heads, old.key_value_heads, old.head_dim, old.channels) == (3, 4, 2, 8, 48)
    new = after(old, kept)
    settings = smaller_settings(tmp_path / "model", old, new, kept.layers)
    (tmp_path / "made").mkdir()
    write_model(tmp_path / "made", smaller_tensors(stored_tensors(tmp_path / "model"), old, kept), settings)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float64).eval()
    meant = by_hand(model, kept)
    assert (logits(made) - meant).abs().max() < 1e-10
    assert (meant - logits(model)).abs().max() > 1e-2
    # So does the original as the verb silences it.
    silence(model, old, kept)
    with skipping(model.model.layers, set(range(LAYERS)) - set(kept.layers)):
        assert (logits(model) - meant).abs().max() < 1e-10
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert written["num_hidden_layers"] == len(kept.layers)
    assert len(written.get("layer_types") or kept.layers) == len(kept.layers)
    assert written["intermediate_size"] == (16 if kept.channels else 48)
    if kept.heads is not None:
        assert (written["num_attention_heads"], written["head_dim"]) == (2, 8)
        assert written["num_key_value_heads"] == (1 if choice == "whole groups" else 2)


def test_what_a_configuration_cannot_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    family("llama", tmp_path / "llama", monkeypatch)
    old = shape_of(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"hidden size \(32\) is not a multiple of the number of attention heads \(3"):
        smaller_settings(tmp_path / "llama", old, replace(old, heads=3, key_value_heads=1))
    families.make_family("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="gpt2 model describes its layers is not known"):
        shape_of(tmp_path / "gpt2")


def test_windows_begin_where_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family("qwen2", tmp_path / "model", monkeypatch)  # the first layer sees everything, the others a window
    old = shape_of(tmp_path / "model")
    for layers, windows in (([1, 2], 0), ([0, 2], 1)):
        made = smaller_settings(tmp_path / "model", old, after(old, Kept(layers)), layers)
        assert made["max_window_layers"] == windows
        assert made["layer_types"][0] == ("full_attention" if windows else "sliding_attention")
        assert made["layer_types"][1] == "sliding_attention"
