"""Which documents and chats are held out: decided by a hash of seed and id (of a chat: its first question), so that it
depends on neither order nor machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onecard import artifact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ENOUGH_DOCUMENTS = 10
_LETTERS = re.compile(r"[^\W_]+")


def held_out_count(documents: int, share: float) -> int:
    """How many of a source's documents are held out: the rounded share, and at least one of ten or more."""
    if share <= 0:
        return 0
    return max(round(documents * share), 1 if documents >= _ENOUGH_DOCUMENTS else 0)


def rank(seed: int, name: bytes) -> int:
    """The place of a document among those of its source, as 64 bits of (seed, id)."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{seed}\0".encode() + name)


def held_out(ranks: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which of the documents of one source are held out: those with the smallest ranks."""
    import numpy as np

    chosen = np.zeros(len(ranks), dtype=bool)
    chosen[np.argsort(ranks, kind="stable")[: held_out_count(len(ranks), share)]] = True
    return chosen


def question_is_held_out(seed: int, share: float, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat is held out: by the letters and digits of its first question, whatever their case.

    So the same question never stands on both sides, however often it is asked and however it is punctuated.
    """
    return int(artifact.hash_json([seed, question_key(messages)])[:8], 16) / 16**8 < share


def question_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """What makes two first questions the same: letters and digits, case folded (or the text, where it has none)."""
    question = next((str(message.get("content") or "") for message in messages if message["role"] == "user"), "")
    return "".join(_LETTERS.findall(question.casefold())) or question
