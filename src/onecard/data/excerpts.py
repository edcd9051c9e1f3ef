"""Short pieces of texts for a person: the places that changed, and characters that cannot be seen made visible.

In: two texts, or one. Out: pieces, each marked as changed or not. Knows nothing of pages and terminals.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Sequence

Piece = tuple[str, bool]
"""A part of a text, and whether it differs from its counterpart."""

EXCERPT_CHARACTERS = 200
_LEAD_CHARACTERS = 30
_TERMINAL_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MARKS = {"\n": "⏎", "\t": "⇥", "\u3000": "▢", "\r": "␍"}


def differences(before: str, after: str, characters: int = EXCERPT_CHARACTERS) -> tuple[list[Piece], list[Piece]]:
    """Both texts from shortly before the first place that differs, `characters` long, what differs marked."""
    start = max(_common_start(before, after) - _LEAD_CHARACTERS, 0)
    first, second = before[start : start + characters], after[start : start + characters]
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    left: list[Piece] = []
    right: list[Piece] = []
    operations = matcher.get_opcodes()
    cut = len(before) - start > characters or len(after) - start > characters
    for number, (kind, a, b, c, d) in enumerate(operations):
        # Where the windows end, one holds what the other one's end has pushed out: that is no difference.
        pushed_out = cut and number == len(operations) - 1
        marked = kind != "equal" and not pushed_out
        if b > a:
            left.append((first[a:b], marked))
        if d > c:
            right.append((second[c:d], marked))
    if start:
        left.insert(0, ("… ", False))
        right.insert(0, ("… ", False))
    if len(before) > start + characters:
        left.append((" …", False))
    if len(after) > start + characters:
        right.append((" …", False))
    return left, right


def _common_start(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def visible(text: str, *, spaces: bool = False) -> str:
    """Line ends as ⏎, tabs as ⇥, ideographic spaces as ▢, other invisible ones by number; spaces as · by choice."""
    made = []
    for character in text:
        if character == " ":
            made.append("·" if spaces else " ")
        elif character in _MARKS:
            made.append(_MARKS[character])
        elif unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp"):
            made.append(f"[U+{ord(character):04X}]")
        else:
            made.append(character)
    return "".join(made)


def harmless(text: str) -> str:
    """The text as it is, but for controls that a terminal would obey, which are shown by their number."""
    return _TERMINAL_CONTROLS.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def visible_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces with invisible characters made visible; a space only where it differs."""
    return [(visible(text, spaces=marked), marked) for text, marked in pieces]


def bracketed(pieces: Sequence[Piece], marks: tuple[str, str] = ("⟦", "⟧")) -> str:
    """Pieces as one line of text, what differs in brackets."""
    return "".join(f"{marks[0]}{text}{marks[1]}" if marked else text for text, marked in visible_pieces(pieces))


def shortened(text: str, characters: int = EXCERPT_CHARACTERS) -> str:
    """The start of a text, with an ellipsis where it goes on."""
    return text[:characters] + (" …" if len(text) > characters else "")
