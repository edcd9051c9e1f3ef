"""Whether generated text goes round in circles: the share of repeated n-grams, and the longest loop.

Text is seen as units: each Chinese (or Japanese) character, each word of other scripts, each punctuation mark. So one
rule serves both languages and texts that mix them. The module knows nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

NGRAM_UNITS = 4
# A loop with a longer block than this is a repeated passage, which the n-grams show.
LONGEST_BLOCK_UNITS = 64

# Scripts written without spaces: Han with its extensions, kana. There a character is a unit.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTERS = rf"(?:(?![{_UNSPACED}])\w)+"
_UNIT = re.compile(rf"[{_UNSPACED}]|{_LETTERS}(?:['’]{_LETTERS})*|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Repetition:
    """The share of the n-grams of a text that stood in it before, and how many units its longest loop covers."""

    repeated_share: float
    longest_loop: int


def units(text: str, *, punctuation: bool = True) -> list[str]:
    """The units of a text in order, letters in lower case; spaces are no units."""
    found = _UNIT.findall(text.lower())
    return found if punctuation else [unit for unit in found if unit[0].isalnum()]


def beginning(text: str, count: int) -> str:
    """The text up to the end of its unit number `count`, or all of it."""
    end = 0
    for match in islice(_UNIT.finditer(text), count):
        end = match.end()
    return text[:end]


def repeated_share(sequence: Sequence[str], length: int = NGRAM_UNITS) -> float:
    """The share, 0 to 1, of the n-grams of `sequence` that stood in it before; 0 for a text without n-grams."""
    total = len(sequence) - length + 1
    if total <= 0:
        return 0.0
    return 1 - len({tuple(sequence[start : start + length]) for start in range(total)}) / total


def longest_loop(sequence: Sequence[str]) -> int:
    """The most units that one block, repeated back to back at least once, covers: "a b a b a" is 5, "a b c" is 0."""
    longest = 0
    for period in range(1, min(LONGEST_BLOCK_UNITS, len(sequence) // 2) + 1):
        run = 0
        for before, now in zip(sequence, sequence[period:]):
            run = run + 1 if before == now else 0
            if run >= period:
                longest = max(longest, run + period)
    return longest


def measure(text: str) -> Repetition:
    """Both numbers for one text."""
    sequence = units(text)
    return Repetition(repeated_share(sequence), longest_loop(sequence))


def summarize(texts: Iterable[str]) -> Repetition:
    """The mean share and the longest loop over several texts; a text too short for an n-gram counts as 0."""
    found = [measure(text) for text in texts]
    if not found:
        return Repetition(0.0, 0)
    return Repetition(sum(item.repeated_share for item in found) / len(found), max(item.longest_loop for item in found))
