"""Decoding through a model's own modules: any causal language model of transformers, on any device.

In: some tokens of some requests; out: logits. A step is either one token of each of the slots 0 to n - 1, or a run of
tokens of one slot: attention reads a view of the cache and nothing is copied. It does not know requests or sampling.

Shape legend: M tokens of a step, W wanted logits, V vocabulary, N rows, Q tokens of a row, D size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from onecard.serve.cache import AttentionMasks, SlotCache


class EagerModel:
    """A model with its keys and values; the same calls as `native.NativeModel`."""

    mixes = False
    """Whether prompts and answers may go into one step."""

    def __init__(self, model: Any, slots: int, max_length: int) -> None:
        self._model = model
        self._masks = AttentionMasks(model)
        self._cache = SlotCache(slots, max_length)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in accepted else "cache"
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def step(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], wanted: Sequence[int]
    ) -> torch.Tensor:
        """Compute M tokens; logits after the `wanted` ones, each the last of its slot: [W, V]."""
        first, longest, device = slots[0], max(positions) + 1, self._model.device
        shape = (1, -1) if slots[0] == slots[-1] else (-1, 1)
        assert shape == (1, -1) or list(slots) == list(range(len(slots)))
        tokens_NQ = torch.tensor(tokens, device=device).view(shape)
        positions_NQ = torch.tensor(positions, device=device).view(shape)
        self._cache.begin(first, positions_NQ, longest)
        answer = self._model(
            input_ids=tokens_NQ,
            position_ids=positions_NQ,
            attention_mask=self._masks.make(positions_NQ, longest, self._model.dtype),
            use_cache=True,
            **{self._cache_argument: self._cache},
            **self._keep_last,
        )
        logits_NV: torch.Tensor = answer.logits[:, -1]
        return logits_NV if wanted else logits_NV[:0]

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of a slot to another, which is free."""
        self._cache.move(source, target, length)

    def clear(self, slot: int) -> None:
        """Forget a slot."""
        self._cache.clear(slot)

    def forget(self) -> None:
        """Drop all memory."""
        self._cache.forget()

    def read(self, slot: int, first: int, last: int) -> torch.Tensor | None:
        """A copy of the keys and values of positions first..last - 1; None where layers differ in shape."""
        return self._cache.read(slot, first, last)

    def write(self, slot: int, first: int, stored: torch.Tensor) -> None:
        """Put what `read` gave to a slot, from position `first` on."""
        self._cache.write(slot, first, stored)
