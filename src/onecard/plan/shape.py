"""What a model multiplies: every linear map with its sizes, read off the model itself, which is built without memory.

In: a transformers configuration. Out: a `Shape`. Any architecture that transformers builds works, for nothing is
derived from formulas. It does not know what an update does with the maps.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Map:
    """A linear map of tokens: `inputs` to `outputs` values, `count` alike ones. `name` is the end of its module's name.

    Of experts each token meets `share`: a map of all of them together, with that share of the tokens each.
    """

    name: str
    inputs: int
    outputs: int
    count: int
    share: float = 1.0

    @property
    def weights(self) -> int:
        """Parameters of all alike ones."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `maps` are those of the repeated layers, `head` the map to the vocabulary (None: it has none).

    `windows`: for each layer the tokens it attends to at most (None: all). `matrix_parameters` are those of the layers'
    maps; `tables` the embeddings, without a tied head.
    """

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_width: int
    maps: tuple[Map, ...]
    head: Map | None
    tied: bool
    parameters: int
    causal: bool
    windows: tuple[int | None, ...]
    tensors: int

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers' linear maps."""
        return sum(one.weights for one in self.maps)

    @property
    def query_width(self) -> int:
        """Values a token of all queries."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Values a token of all keys and values together."""
        return 2 * self.key_value_heads * self.head_width

    @property
    def feed_forward_values(self) -> float:
        """Values a token and layer between the maps of the feed-forward: its maps' active weights over the width."""
        attention = 2 * self.width * self.query_width + self.width * self.key_value_width
        active = sum(one.weights * one.share for one in self.maps) / self.layers
        return max(0.0, active - attention) / self.width


_shapes: collections.OrderedDict[str, Shape] = collections.OrderedDict()
_MOST_KEPT = 256


def shape_of(config: Any) -> Shape:
    """The sizes of the model of a transformers configuration."""
    key = f"{type(config).__name__} {vars(config)}"  # all that can differ; its JSON takes ten times as long
    if key not in _shapes:
        _shapes[key] = _measured(config)
        while len(_shapes) > _MOST_KEPT:
            _shapes.popitem(last=False)
    return _shapes[key]


def _measured(config: Any) -> Shape:
    text = config.get_text_config()
    model = _empty(config)
    heads = int(text.num_attention_heads)
    layers = max((list(m) for m in model.modules() if type(m).__name__ == "ModuleList"), key=len)
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    return Shape(
        layers=len(layers),
        width=int(text.hidden_size),
        heads=heads,
        key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_width=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        maps=_maps(layers, text),
        head=None if head is None else Map("head", int(head.weight.shape[1]), int(head.weight.shape[0]), 1),
        tied=head is not None and head.weight is embeddings.weight,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        causal=not _bidirectional(config),
        windows=_windows(text, len(layers)),
        tensors=sum(1 for _ in model.parameters()),
    )


def _empty(config: Any) -> Any:
    """The model without memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

    from onecard.model.load import silence_transformers

    silence_transformers()
    kind: Any = AutoModelForMaskedLM if _bidirectional(config) else AutoModelForCausalLM
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        kind = AutoModelForSequenceClassification
    with torch.device("meta"):
        return kind.from_config(config)


def _bidirectional(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def _maps(layers: list[Any], text: Any) -> tuple[Map, ...]:
    import torch
    from transformers.pytorch_utils import Conv1D

    chosen = getattr(text, "num_experts_per_tok", None) or 1
    counted: collections.Counter[tuple[str, int, int, float]] = collections.Counter()
    for layer in layers:
        for name, module in layer.named_modules():
            end = name.rpartition(".")[2]
            if isinstance(module, torch.nn.Linear):
                counted[end, module.in_features, module.out_features, 1.0] += 1
            elif isinstance(module, Conv1D):
                counted[end, int(module.nx), int(module.nf), 1.0] += 1
            else:
                for part, stacked in module.named_parameters(recurse=False):
                    if stacked.ndim == 3:  # experts, in one tensor
                        experts, outputs, inputs = stacked.shape
                        counted[part, inputs, outputs, chosen / experts] += experts
    return tuple(Map(name, inputs, outputs, count, share) for (name, inputs, outputs, share), count in counted.items())


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return (window if getattr(text, "use_sliding_window", True) else None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
