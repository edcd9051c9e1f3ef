"""Whether two tokenizers mean the same by the same ids, and if not, where they first part.

In: two tokenizers. Out: a sentence for a person, or None. Chat templates are not compared: they decide what is written,
not what a number stands for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What decides how text is split, in the order in which it is done.
_STEPS = ("normalizer", "pre_tokenizer", "model")


def first_difference(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> str | None:
    """The first entry by id that differs, or the first step of splitting text that does; None for the same."""
    mine, theirs = ({index: text for text, index in each.get_vocab().items()} for each in (one, other))
    if mine != theirs:
        at = min(index for index in mine.keys() | theirs.keys() if mine.get(index) != theirs.get(index))
        return f"id {at} is {_shown(mine.get(at))} in one and {_shown(theirs.get(at))} in the other"
    parts, others = (_steps(each) for each in (one, other))
    for step in _STEPS:
        if parts.get(step) != others.get(step):
            return f"they have the same entries, and split text differently ({step})"
    return None


def _steps(tokenizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found


def _shown(entry: str | None) -> str:
    return "nothing" if entry is None else repr(entry)
