"""Keys and values of all requests that are being answered, in one block of memory a layer.

A slot is a row of that block. Rows 0 to n-1 are those in use (the engine keeps them dense), so that what the model
reads is a view and nothing is copied in a step. A step is announced with `begin`, then the model calls `update` for
each layer as with any transformers cache. The block grows by doubling up to the longest context. It does not know
tokens or requests.

Shape legend: S slots, N rows of a step, Q new tokens a row, K key positions, H key heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from onecard.errors import ConfigError

_FIRST_CAPACITY = 256


@dataclass
class Step:
    """What the model is about to compute: rows `first` to `first + N - 1`, at these positions."""

    first: int
    positions: torch.Tensor
    longest: int


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer: [S, H, K, D]."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the block, now that sizes of heads are known."""
        slots, capacity = self._owner.slots, self._owner.capacity()
        self.keys = key_states.new_zeros((slots, key_states.shape[1], capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((slots, value_states.shape[1], capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [N, H, Q, D] at each row's own positions; return all of those rows up to the longest."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self._owner.step
        self.grow()
        rows, new_tokens = key_states.shape[0], key_states.shape[2]
        block = slice(step.first, step.first + rows)
        for stored, fresh in ((self.keys, key_states), (self.values, value_states)):
            if new_tokens == 1:
                numbers = torch.arange(step.first, step.first + rows, device=stored.device)
                stored[numbers, :, step.positions[:, 0]] = fresh[:, :, 0]
            else:
                start = step.longest - new_tokens
                stored[block, :, start : step.longest] = fresh
        return self.keys[block, :, : step.longest], self.values[block, :, : step.longest]

    def grow(self) -> None:
        """Have room for the longest row of the step."""
        if self.keys.shape[2] < self._owner.step.longest:
            self.keys, self.values = (_grown(block, self._owner.capacity()) for block in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` returns."""
        return self._owner.step.longest, 0

    def get_seq_length(self) -> int:
        """Tokens before this step, in the longest row."""
        return int(self._owner.step.longest - self._owner.step.positions.shape[1])

    def get_max_length(self) -> int:
        """The longest context."""
        return self._owner.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


def _grown(block: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = block.new_zeros((*block.shape[:2], capacity, block.shape[3]))
    larger[:, :, : block.shape[2]] = block
    return larger


class SlotCache(Cache):
    """A transformers cache whose rows belong to requests that come and go."""

    def __init__(self, slots: int, max_length: int) -> None:
        self.slots, self.max_length = slots, max_length
        self.step = Step(0, torch.zeros((1, 0), dtype=torch.long), 0)
        make_layer: Any = lambda: _SlotLayer(self)  # noqa: E731 - transformers calls it as it would a class
        super().__init__(layer_class_to_replicate=make_layer)

    def begin(self, first: int, positions_NQ: torch.Tensor, longest: int) -> None:
        """Announce a step: one new token in each of N rows, or (N = 1) a run of tokens up to position `longest`."""
        assert longest <= self.max_length
        self.step = Step(first, positions_NQ, longest)

    def capacity(self) -> int:
        """Positions that a row which grows now should have: doubled until this step fits, up to the longest context."""
        found = _FIRST_CAPACITY
        while found < self.step.longest:
            found *= 2
        return min(found, self.max_length)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of row `source` to row `target`, which is free."""
        for block in self._blocks():
            block[target, :, :length] = block[source, :, :length]
        self.clear(source)

    def clear(self, row: int) -> None:
        """Forget a row. Zeros matter: a NaN left behind a mask would still spoil the next request (0 times NaN)."""
        for block in self._blocks():
            block[row].zero_()

    def read(self, row: int, first: int, last: int) -> torch.Tensor | None:
        """Copies positions first..last - 1 of all layers: [2 x layers, H, last - first, D]; None if shapes differ."""
        blocks = [block[row, :, first:last] for block in self._blocks()]
        same = len({block.shape for block in blocks}) == 1
        return torch.stack(blocks) if same else None

    def write(self, row: int, first: int, stored: torch.Tensor) -> None:
        """Put what `read` gave into a row, from position `first` on."""
        last = first + stored.shape[2]
        self.step = Step(row, self.step.positions, max(self.step.longest, last))
        for layer in self.layers:
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                layer.grow()
        for block, part in zip(self._blocks(), stored):
            block[row, :, first:last] = part

    def _blocks(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                yield layer.keys
                yield layer.values

    def forget(self) -> None:
        """Drop all memory."""
        self.layers.clear()


class AttentionMasks:
    """Which stored positions each new token may see, in the form that the model's attention wants."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        window = getattr(config, "sliding_window", None)
        if not kinds:
            kinds = {"full_attention" if window is None else "sliding_attention"}
        foreign = kinds - {"full_attention", "sliding_attention"}
        if foreign:
            raise ConfigError(
                f"This model has layers of the kind {', '.join(sorted(foreign))}, which onecard cannot serve yet.",
                "Serve it with vLLM or transformers.",
            )
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        # Scaled-dot-product attention takes booleans; the plain form adds the mask to the scores.
        self._additive = config._attn_implementation != "sdpa"

    def make(self, positions_NQ: torch.Tensor, longest: int, dtype: torch.dtype) -> Any:
        """[N, 1, Q, K] masks for tokens at `positions_NQ` over `longest` keys; a dict where layers differ in kind."""
        keys_K = torch.arange(longest, device=positions_NQ.device)
        made = {}
        for kind, window in self._windows.items():
            allowed = keys_K <= positions_NQ[..., None]
            if window is not None:
                allowed &= keys_K > positions_NQ[..., None] - window
            mask = allowed[:, None]
            if self._additive:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
            made[kind] = mask
        return made if len(made) > 1 else next(iter(made.values()))
