"""What goes into a model's linear layers on sample text: whole models at a time, or layer after layer.

In: a model and rows of tokens. Out: of each linear layer the second moments of its inputs (sum x xT) or their lengths.
Layer after layer, the inputs of a layer are those that the layers before it give as they are by then, so that a
compression sees what its earlier steps did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecard import console
from onecard.data.corpus import read_documents
from onecard.errors import ArtifactError
from onecard.model.lora import linear_layers

# Text is read up to this many characters for each token that is wanted.
_CHARACTERS_A_TOKEN = 64


def sample_rows(corpus: Path, tokenizer: Any, rows: int, row_tokens: int) -> list[Tensor]:
    """`rows` rows (1 x row_tokens) from documents of the corpus that are trained on, an even sample of them.

    Documents stand one after the other, each whole with its ends. ArtifactError if the corpus has not enough text.
    """
    from onecard.tokenizer.template import encode_documents

    ids: list[int] = []
    wanted = rows * row_tokens
    # In the order of a hash, so that no source and no language is left out because it stands last.
    chosen: list[tuple[bytes, str]] = []
    for document in read_documents(corpus, "train"):
        mark = hashlib.blake2b(document.id.encode(), digest_size=8).digest()
        chosen.append((mark, document.text[: row_tokens * _CHARACTERS_A_TOKEN]))
        if len(chosen) > 4 * rows + 1000:
            chosen = sorted(chosen)[: 2 * rows + 500]
    for _, text in sorted(chosen):
        ids += encode_documents(tokenizer, [text])[0][: 4 * row_tokens]
        if len(ids) >= wanted:
            break
    if len(ids) < row_tokens:
        raise ArtifactError(
            f"The corpus {corpus} holds too little text to calibrate with ({len(ids)} tokens).",
            "Give a larger corpus, or fewer calibration_tokens.",
        )
    full = len(ids) // row_tokens
    return [torch.tensor([ids[i * row_tokens : (i + 1) * row_tokens]]) for i in range(min(rows, full))]


class Moments:
    """Sum x xT over the tokens that pass a layer; fp32 sums of each row, added in fp64."""

    def __init__(self, width: int) -> None:
        self.sum = torch.zeros(width, width, dtype=torch.float64)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: ... x width."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        self.sum += (flat.T @ flat).double().cpu()
        self.tokens += flat.shape[0]


class Lengths:
    """Sum of squares of each input of a layer over the tokens that pass it, fp64."""

    def __init__(self, width: int) -> None:
        self.squares = torch.zeros(width, dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        """inputs: ... x width."""
        self.squares += inputs.reshape(-1, inputs.shape[-1]).double().square().sum(0).cpu()

    @property
    def lengths(self) -> Tensor:
        """The Euclidean length of each input over all tokens, fp32."""
        return self.squares.sqrt().float()


@contextmanager
def watching(layers: Mapping[str, nn.Module], keep: Callable[[int], Any]) -> Iterator[dict[str, Any]]:
    """While it is open, what enters each of `layers` is added to its own `keep(width)`."""
    found: dict[str, Any] = {}
    hooks = []
    for name, layer in layers.items():
        found[name] = keep(int(layer.in_features))  # type: ignore[arg-type]

        def add(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
            found[name].add(arguments[0].detach())

        hooks.append(layer.register_forward_pre_hook(add))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def input_lengths(model: Any, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """The length of every input of every linear layer inside the repeated layers."""
    layers = {name: model.get_submodule(name) for name in linear_layers(model)}
    with watching(layers, Lengths) as found, torch.inference_mode(), console.progress("calibrating", len(rows)) as bar:
        for row in rows:
            model(input_ids=row.to(model.device), use_cache=False)
            bar.advance(1)
    return {name: kept.lengths for name, kept in found.items()}


def repeated_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Name and list of the layers that a model repeats."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise ArtifactError("The model has no list of layers.", "Give a plain causal language model.")
    return max(lists, key=lambda pair: len(pair[1]))


def layer_after_layer(
    model: Any,
    rows: Sequence[Tensor],
    change: Callable[[dict[str, nn.Linear], dict[str, Any]], None],
    keep: Callable[[int], Any] = Moments,
) -> None:
    """Give `change` each layer's linear layers by full name with what `keep` keeps of their inputs; then go on with it.

    What a layer passes on is computed after it was changed.
    """
    prefix, layers = repeated_layers(model)
    states, settings = _entering(model, layers, rows)
    with torch.no_grad(), console.progress("layers", len(layers)) as bar:
        for index, layer in enumerate(layers):
            linear = {
                f"{prefix}.{index}.{name}": part for name, part in layer.named_modules() if isinstance(part, nn.Linear)
            }
            with watching(linear, keep) as kept:
                for state, setting in zip(states, settings):
                    layer(state, **setting[index])
            change(linear, kept)
            states = [_hidden(layer(state, **setting[index])) for state, setting in zip(states, settings)]
            bar.advance(1)


def _hidden(output: Any) -> Tensor:
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state


def _entering(
    model: Any, layers: nn.ModuleList, rows: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """Of each row, the hidden states that enter the first layer, and of every layer the other arguments.

    Those differ between layers of one model: masks with and without a window, positions of two kinds.
    """
    states: list[Tensor] = []
    settings: list[list[dict[str, Any]]] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not settings[-1]:
            states.append(arguments[0].detach())
        settings[-1].append(named)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            for row in rows:
                settings.append([])
                model(input_ids=row.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states, settings
