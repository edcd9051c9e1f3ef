"""Long texts in pieces, so that no step needs memory without bound: where they are cut, and how long they may be."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_TEXT_CHARACTERS = 1_000_000
"""A longer text becomes several documents."""

LONGEST_ROW_CHARACTERS = 1 << 27
"""A longer line of JSON, or row of a table, is not read: one row is held in memory whole, several times over."""

_SENTENCE_END = re.compile(r"[。！？!?…；]+[”’」』）)]*|[.;][\"')]*(?=\s)")
_SENTENCE_WINDOW_CHARACTERS = 10_000


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most a million characters, cut where the least is torn: between paragraphs, lines,
    sentences or words, in this order, else anywhere."""
    start = 0
    while len(text) - start > LONGEST_TEXT_CHARACTERS:
        cut = best_cut(text, start + LONGEST_TEXT_CHARACTERS // 2, start + LONGEST_TEXT_CHARACTERS)
        yield text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield text[start:]


def best_cut(text: str, first: int, last: int) -> int:
    """Where between the places `first` and `last` to cut: the piece before it ends with what separates it."""
    for separator in ("\n\n", "\n"):
        place = text.rfind(separator, first, last)
        if place >= 0:
            return place + len(separator)
    ends = [found.end() for found in _SENTENCE_END.finditer(text, max(first, last - _SENTENCE_WINDOW_CHARACTERS), last)]
    if ends:
        return ends[-1]
    place = text.rfind(" ", first, last)
    return place + 1 if place >= 0 else last
