"""What the model writes while it learns: greedy continuations of fixed prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from onecard.model.attention import own_attention
from onecard.model.load import rows_without_token


def continuation_sampler(
    model: Any,
    tokenizer: Any,
    prompts: list[tuple[str, list[int]]],
    *,
    stop_ids: list[int],
    max_new_tokens: int = 48,
) -> Callable[[], list[tuple[str, str]]]:
    """A function that continues each (shown text, ids) prompt greedily to a stop id.

    A mild repetition penalty shows what the model has learned instead of the loop that greedy decoding of a young model
    falls into.
    """

    spare = rows_without_token(tokenizer, model.get_input_embeddings().weight.shape[0])
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize

    def sample() -> list[tuple[str, str]]:
        made = []
        with own_attention(model):
            for shown, ids in prompts:
                room = min(max_new_tokens, positions - len(ids))
                if room < 1:
                    continue
                prompt = torch.tensor([ids], device=model.device)
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=room,
                    do_sample=False,
                    repetition_penalty=1.2,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=stop_ids,
                    **({"suppress_tokens": spare} if spare else {}),
                )
                made.append((shown, tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)))
        return made

    return sample
