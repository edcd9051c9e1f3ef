"""Keys and values of texts that were read before: what two prompts have in common at their beginning is computed once.

In: token ids, and what a model stored for them. Out: the stored part of the longest beginning that is known. It is kept
in pages of a few tokens, each known by everything up to its end (a hash of the ids), so that a system prompt is shared
by all conversations and each conversation by its next turn. The pages used longest ago go first when the budget is
used up. It does not know models or requests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch

PAGE_TOKENS = 16


class PrefixStore:
    """Pages within a budget of bytes. A page is a tensor with the tokens along its dimension 2."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self.used_bytes = budget_bytes, 0
        self._pages: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def find(self, ids: Sequence[int]) -> torch.Tensor | None:
        """What is stored of the longest known beginning of `ids`, of whole pages; None if nothing is."""
        names = list(takewhile(self._pages.__contains__, self._names(ids)))
        self._used(names)
        return torch.cat([self._pages[name] for name in names], dim=2) if names else None

    def keep(self, ids: Sequence[int], read: Callable[[int, int], torch.Tensor | None]) -> None:
        """Keep the whole pages of `ids` that are not known yet; `read` gives what is stored between two places."""
        if not self._budget_bytes:
            return
        names = self._names(ids)
        known = next((place for place, name in enumerate(names) if name not in self._pages), len(names))
        first = known * PAGE_TOKENS
        stored = read(first, len(names) * PAGE_TOKENS) if known < len(names) else None
        if stored is None:
            return
        for place, name in enumerate(names[known:]):
            if name in self._pages:  # one before it went first, this one has stayed
                continue
            page = stored[:, :, place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS].clone()
            self.used_bytes += page.nbytes
            self._pages[name] = page
        self._used(names)
        while self.used_bytes > self._budget_bytes:
            _, page = self._pages.popitem(last=False)
            self.used_bytes -= page.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self.used_bytes = 0

    def _used(self, names: Sequence[bytes]) -> None:
        """A page is of use only together with those before it: they count as used later than it, and go after it."""
        for name in reversed(names):
            self._pages.move_to_end(name)

    @staticmethod
    def _names(ids: Sequence[int]) -> list[bytes]:
        """A name for each whole page of `ids`, which depends on all ids up to its end."""
        hashed, names = hashlib.sha256(), []
        for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
            hashed.update(array("q", ids[end - PAGE_TOKENS : end]).tobytes())
            names.append(hashed.digest())
        return names
