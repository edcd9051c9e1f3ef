"""A model continues texts: greedily, so that the same model always says the same.

In: a model, and prompts as tokens. Out: what it wrote after each, and why it ended (`stop`: by itself; `length`: it was
cut off). It does not sample; serving has an engine of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens, without the one that stopped them, and why they ended."""

    ids: list[int]
    finish_reason: FinishReason


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of tokens as a person should see it: no control tokens, spaces as they are."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    vocabulary_size: int,
    limit: int,
    batch_size: int,
    advance: Callable[[float], None] | None = None,
) -> list[Generated]:
    """Continue each prompt with the likeliest tokens, up to `limit` new ones or what the model's context still holds.

    Only ids below `vocabulary_size` are taken: a model may have more rows than its tokenizer has entries.
    Prompts of similar length go together, padded on the left; the result has the order of `prompts`. A prompt that
    fills the context gets an empty continuation of reason `length`.
    """
    import torch

    room = context_tokens(model.config)
    results: list[Generated] = [Generated([], "length")] * len(prompts)
    order = sorted((i for i, ids in enumerate(prompts) if ids), key=lambda i: len(prompts[i]), reverse=True)
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            limits = [max(0, min(limit, room - len(prompts[i]))) for i in chosen]
            steps = _greedy_steps(model, [prompts[i] for i in chosen], vocabulary_size)
            for i, found in zip(chosen, _collect(steps, frozenset(stop_ids), limits)):
                results[i] = found
            if advance is not None:
                advance(len(chosen))
    return results


def context_tokens(model_config: Any) -> int:
    """The longest sequence that a model was made for, in tokens; 1024 if its configuration does not say."""
    return int(getattr(model_config.get_text_config(), "max_position_embeddings", None) or 1024)


def _collect(steps: Iterator[list[int]], stop_ids: Set[int], limits: Sequence[int]) -> list[Generated]:
    """Gather each row's tokens until it stops by itself or reaches its limit."""
    written: list[list[int]] = [[] for _ in limits]
    reasons: list[FinishReason | None] = [None if limit else "length" for limit in limits]
    while None in reasons:
        for row, token in enumerate(next(steps)):
            if reasons[row] is not None:
                continue
            if token in stop_ids:
                reasons[row] = "stop"
                continue
            written[row].append(token)
            if len(written[row]) == limits[row]:
                reasons[row] = "length"
    return [Generated(ids, reason or "length") for ids, reason in zip(written, reasons)]


def _greedy_steps(model: Any, prompts: Sequence[Sequence[int]], vocabulary_size: int) -> Iterator[list[int]]:
    """Yield the likeliest next token of each row, again and again."""
    import torch

    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    ids_BT = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prompts)], device=model.device)
    mask_BT = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=model.device)
    # transformers renames the argument and the output in the course of version 5.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    last_position = context_tokens(model.config) - 1
    cache = None
    while True:
        # Rows that have ended run along until all have; their positions must still be ones that the model has.
        positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(0, last_position)[:, -ids_BT.shape[1] :]
        output = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        )
        next_B: torch.Tensor = output.logits[:, -1, :vocabulary_size].argmax(dim=-1)
        yield next_B.tolist()
        cache, ids_BT = getattr(output, cache_name), next_B[:, None]
        mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
