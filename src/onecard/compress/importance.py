"""Which layers, heads and channels of a model matter least on sample text.

Layers: by the loss without them, the one that costs least first and the others measured again without it (greedy); or
by how little they change what passes them (block influence: 1 - the mean cosine of input and output; Men et al. 2024).
Heads and channels: by how much of a layer's output they carry, which is the length of their inputs over all tokens
times the length of the weights that those meet. Where inputs do not go together, that is the error of leaving them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from onecard import console
from onecard.compress.calibration import repeated_layers
from onecard.compress.structure import Shape, skipping

# Tokens by which layers are told apart: each is measured once for each that goes.
LOSS_TOKENS = 4096


def mean_loss(model: Any, rows: Sequence[Tensor]) -> float:
    """Cross-entropy of a token in the mean, nats; rows are 1 x tokens."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in rows:
            ids = row.to(model.device)
            logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            total += float(cross_entropy(logits_TV, ids[0, 1:], reduction="sum").double())
            count += ids.shape[1] - 1
    return total / count


def drop_by_loss(model: Any, rows: Sequence[Tensor], drop: int) -> tuple[float, list[tuple[int, float]]]:
    """The loss of the whole model, and the layers to leave out, in order, each with the loss once it is gone."""
    _, layers = repeated_layers(model)
    some = list(rows[: max(1, LOSS_TOKENS // rows[0].shape[1])])
    gone: list[tuple[int, float]] = []
    tries = sum(len(layers) - taken for taken in range(drop))
    console.note(f"  {tries} losses over {sum(row.numel() for row in some):,} tokens tell which {drop} layers go")
    with console.progress("layers left out", tries) as bar:
        whole = mean_loss(model, some)
        for _ in range(drop):
            out = {number for number, _ in gone}
            found = []
            for number in sorted(set(range(len(layers))) - out):
                with skipping(layers, out | {number}):
                    found.append((mean_loss(model, some), number))
                bar.advance(1)
            loss, number = min(found)
            gone.append((number, loss))
    return whole, gone


def layer_changes(model: Any, rows: Sequence[Tensor]) -> list[float]:
    """Of each layer, 1 - the cosine of what enters and what leaves it, in the mean over tokens."""
    _, layers = repeated_layers(model)
    sums, tokens = [0.0] * len(layers), 0
    hooks = []

    for index, layer in enumerate(layers):

        def add(_: Any, arguments: tuple[Any, ...], output: Any, index: int = index) -> None:
            left = output[0] if isinstance(output, tuple) else output
            sums[index] += float((1 - cosine_similarity(arguments[0].double(), left.double(), dim=-1)).sum())

        hooks.append(layer.register_forward_hook(add))
    try:
        with torch.inference_mode(), console.progress("calibrating", len(rows)) as bar:
            for row in rows:
                model(input_ids=row.to(model.device), use_cache=False)
                tokens += row.numel()
                bar.advance(1)
    finally:
        for hook in hooks:
            hook.remove()
    return [total / tokens for total in sums]


def column_scores(weight: Tensor, lengths: Tensor) -> Tensor:
    """Of each input of a layer (outputs x inputs), its length times the length of the weights that it meets."""
    met: Tensor = torch.linalg.vector_norm(weight.detach().double(), dim=0)
    return met * lengths.double()


def best_channels(scores: Tensor, count: int) -> list[int]:
    """The `count` best, in order; of equal ones the first."""
    return sorted(torch.argsort(scores, descending=True, stable=True)[:count].tolist())


def best_heads(scores: Tensor, shape: Shape, heads: int, key_value_heads: int) -> tuple[list[int], list[int]]:
    """Query heads and key/value heads that stay, by the scores of the inputs of the output projection.

    A head's score is the root of the sum of its squares. Of each key/value head the best `heads / key_value_heads`
    query heads are looked at, and the key/value heads whose score with those is highest stay.
    """
    of_heads = scores.double().square().reshape(shape.key_value_heads, shape.group, shape.head_dim).sum(-1)
    each = heads // key_value_heads
    best = torch.argsort(of_heads, dim=1, descending=True, stable=True)[:, :each].sort(dim=1).values
    groups = best_channels(of_heads.gather(1, best).sum(1), key_value_heads)
    return [group * shape.group + int(place) for group in groups for place in best[group]], groups
