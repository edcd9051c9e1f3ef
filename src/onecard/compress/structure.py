"""A model with fewer layers, heads and channels: the tensors that stay, and the config.json that describes them.

In: the tensors of a model directory by name, its settings, and what stays of each layer. Out: tensors and settings of a
smaller model of the same kind, which any reader of that kind loads. Nothing is computed: rows and columns are cut out
of the weights, so that the smaller model says what the original would say with the rest of them at zero.

A configuration knows one number of heads and channels for all layers, so as many stay in each; which ones may differ.
Query heads stay with the key/value head that they share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecard.compress.directories import written_settings
from onecard.errors import ConfigError
from onecard.model.load import first_line, load_architecture

# Kinds whose layers are named and described as this module cuts them, each with a test.
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3")
# Settings that hold an entry for each layer.
_BY_LAYER = ("layer_types", "no_rope_layers")
# Rules by which such lists are made where none is written; of layers that were left out they would say the wrong thing.
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Shape:
    """How many there are of what a model is cut in; `layers` in all, the others in each layer."""

    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    channels: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.key_value_heads


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays: layers by their number in the original, and of each of those, heads and channels in order.

    None leaves all of them. `heads` are query heads, each with its key/value head in `key_value_heads`.
    """

    layers: list[int]
    heads: dict[int, list[int]] | None = None
    key_value_heads: dict[int, list[int]] | None = None
    channels: dict[int, list[int]] | None = None


def shape_of(directory: Path) -> Shape:
    """The shape of the model in a directory. ConfigError for a kind that is not known here."""
    architecture: Any = load_architecture(directory)
    if architecture.model_type not in KINDS:
        raise ConfigError(
            f"How a {architecture.model_type} model describes its layers is not known here.",
            f"Layers, heads and channels can be left out of: {', '.join(KINDS)}; sparsity is for all.",
        )
    heads = int(architecture.num_attention_heads)
    return Shape(
        layers=int(architecture.num_hidden_layers),
        heads=heads,
        key_value_heads=int(getattr(architecture, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(architecture, "head_dim", None) or architecture.hidden_size // heads),
        channels=int(architecture.intermediate_size),
    )


def smaller_settings(directory: Path, old: Shape, new: Shape, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """config.json of the smaller model; `layers` are those that stay (None: the first ones, to ask whether it can be).

    ConfigError, with the reason, where the configuration of this kind cannot say it.
    """
    from transformers import AutoConfig

    chosen = list(range(new.layers)) if layers is None else list(layers)
    architecture: Any = load_architecture(directory)
    made = {key: value for key, value in written_settings(directory).items() if key not in _PATTERNS}
    made["num_hidden_layers"] = new.layers
    for name in _BY_LAYER:
        found = getattr(architecture, name, None)
        if name in made or found is not None:
            made[name] = [found[index] for index in chosen] if found else found
    if "max_window_layers" in made:
        # From this layer on windows are used, where any are.
        made["max_window_layers"] = sum(index < architecture.max_window_layers for index in chosen)
    if (new.heads, new.key_value_heads) != (old.heads, old.key_value_heads):
        made |= {
            "num_attention_heads": new.heads,
            "num_key_value_heads": new.key_value_heads,
            "head_dim": old.head_dim,
        }
    made["intermediate_size"] = new.channels
    try:
        # The library refuses what its own rules forbid with exceptions of several libraries.
        AutoConfig.for_model(**made)
    except Exception as fault:
        reason = str(fault).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        raise ConfigError(
            f"The configuration of a {architecture.model_type} model cannot say this: {reason or first_line(fault)}",
            "Choose other numbers of heads, channels or layers.",
        ) from fault
    return made


def after(old: Shape, kept: Kept) -> Shape:
    """The shape of what stays."""
    first = kept.layers[0]
    new = replace(old, layers=len(kept.layers))
    if kept.heads is not None and kept.key_value_heads is not None:
        new = replace(new, heads=len(kept.heads[first]), key_value_heads=len(kept.key_value_heads[first]))
    return new if kept.channels is None else replace(new, channels=len(kept.channels[first]))


def smaller_tensors(tensors: Mapping[str, Tensor], shape: Shape, kept: Kept) -> dict[str, Tensor]:
    """The tensors of the smaller model, layers numbered anew."""
    places = {old: new for new, old in enumerate(kept.layers)}
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            made[name] = tensor
        elif int(match[1]) in places:
            number = int(match[1])
            rows, columns = _cut(match[2].rpartition(".")[2], shape, kept, number)
            cut = tensor if rows is None else tensor[rows]
            if columns is not None and match[3] == "weight":
                cut = cut[:, columns]
            made[f"model.layers.{places[number]}.{match[2]}.{match[3]}"] = cut
    return made


def _cut(module: str, shape: Shape, kept: Kept, number: int) -> tuple[Tensor | None, Tensor | None]:
    """Which rows and columns of a module's weight stay; None: all."""
    if kept.heads is not None and kept.key_value_heads is not None:
        queries = _spans(kept.heads[number], shape.head_dim)
        keys = _spans(kept.key_value_heads[number], shape.head_dim)
        if module == "q_proj":
            return queries, None
        if module in ("k_proj", "v_proj"):
            return keys, None
        if module == "qkv_proj":
            first, width = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
            return torch.cat([queries, first + keys, first + width + keys]), None
        if module == "o_proj":
            return None, queries
    if kept.channels is not None:
        channels = torch.tensor(kept.channels[number])
        if module in ("gate_proj", "up_proj"):
            return channels, None
        if module == "gate_up_proj":
            return torch.cat([channels, shape.channels + channels]), None
        if module == "down_proj":
            return None, channels
    return None, None


def _spans(heads: Sequence[int], head_dim: int) -> Tensor:
    """The numbers of all rows of these heads."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def silence(model: Any, shape: Shape, kept: Kept) -> None:
    """Set what the left-out heads and channels say to zero, in place: with `skipping` the layers that go, the original
    then computes what the smaller model does.
    """
    for number in kept.layers:
        layer = model.model.layers[number]
        if kept.heads is not None:
            _zero_others(layer.self_attn.o_proj, _spans(kept.heads[number], shape.head_dim))
        if kept.channels is not None:
            _zero_others(layer.mlp.down_proj, torch.tensor(kept.channels[number]))


def _zero_others(layer: nn.Linear, columns: Tensor) -> None:
    gone = torch.ones(layer.in_features, dtype=torch.bool)
    gone[columns] = False
    with torch.no_grad():
        layer.weight[:, gone] = 0


@contextmanager
def skipping(layers: nn.ModuleList, numbers: set[int]) -> Iterator[None]:
    """While it is open, these layers pass on what enters them."""

    def passed(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden

    for number in numbers:
        layers[number].forward = passed
    try:
        yield
    finally:
        for number in numbers:
            del layers[number].forward
