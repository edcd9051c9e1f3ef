"""What kinds of characters a text is made of, counted in one pass of numpy: scripts, digits, punctuation, symbols.

In: a text. Out: counts by kind, and which kinds of junk it holds. Knows nothing of languages and rules.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Codes = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]

SPACE, HAN, KANA, UNSPACED, LATIN, LETTER, DIGIT, MARK, PUNCTUATION, SYMBOL = range(10)
_KINDS = 10
# Kinds of characters that `rules.normalise` has something to do with, as bits.
LINE_END, CONTROL, INVISIBLE, JOINER, HARD_SPACE, DAMAGED = (1 << bit for bit in range(6))

_ORDINARY = frozenset("_.,;:!?'\"()-–—…·・‘’“”，。！？；：、（）《》〈〉【】「」『』〔〕％%￥")
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_KANA = ((0x3041, 0x30FF), (0xFF66, 0xFF9F))
# Thai, Lao, Burmese, Khmer: written without spaces too.
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))
_LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"
_JUNK = (
    (CONTROL, 0x00, 0x08), (CONTROL, 0x0E, 0x1F), (CONTROL, 0x7F, 0x9F),
    # Zero-width space, word joiner, byte order mark, soft hyphen, marks of writing direction and of annotation.
    (INVISIBLE, 0x200B, 0x200B), (INVISIBLE, 0x2060, 0x2060), (INVISIBLE, 0xFEFF, 0xFEFF), (INVISIBLE, 0xAD, 0xAD),
    (INVISIBLE, 0x200E, 0x200F), (INVISIBLE, 0x202A, 0x202E), (INVISIBLE, 0x2066, 0x2069), (INVISIBLE, 0xFFF9, 0xFFFB),
    (JOINER, 0x200C, 0x200D), (HARD_SPACE, 0xA0, 0xA0),
    # What the first byte of a UTF-8 sequence looks like where it was read as Latin-1 or Windows-1252.
    (DAMAGED, 0xC2, 0xF4),
)  # fmt: skip
_LAST_CODE = 0x10FFFF
# Above these planes there are only characters of the private use area and variation selectors.
_TABULATED = 0x20000


class Counts(NamedTuple):
    """How many characters of each kind a text has."""

    space: int
    han: int
    kana: int
    unspaced: int
    latin: int
    letter: int
    digit: int
    mark: int
    punctuation: int
    symbol: int

    @property
    def letters(self) -> int:
        """Letters of any script."""
        return self.han + self.kana + self.unspaced + self.latin + self.letter

    @property
    def visible(self) -> int:
        """All but spaces."""
        return self.letters + self.digit + self.mark + self.punctuation + self.symbol


def codes_of(text: str) -> Codes:
    """The code points of a text, surrogates too; one byte each where all are ASCII."""
    import numpy as np

    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def count(codes: Codes) -> Counts:
    """Count the characters of each kind."""
    import numpy as np

    kinds, _ = _tables()
    return Counts._make(np.bincount(kinds[codes], minlength=_KINDS).tolist())


def junk_in(codes: Codes) -> int:
    """Which of LINE_END, CONTROL, ... occur, as the sum of their bits."""
    import numpy as np

    _, junk = _tables()
    return int(np.bitwise_or.reduce(junk[codes])) if len(codes) else 0


def are_spaces(codes: Codes) -> npt.NDArray[np.bool_]:
    """Which characters are spaces, line ends and the like."""
    kinds, _ = _tables()
    found: npt.NDArray[np.bool_] = kinds[codes] == SPACE
    return found


def count_each(codes: Codes, lengths: npt.NDArray[np.int64]) -> list[Counts]:
    """`count` of many texts that lie end to end."""
    import numpy as np

    kinds, _ = _tables()
    owners = np.repeat(np.arange(0, len(lengths) * _KINDS, _KINDS), lengths)
    owners += kinds[codes]
    found = np.bincount(owners, minlength=len(lengths) * _KINDS).reshape(len(lengths), _KINDS)
    return [Counts._make(row) for row in found.tolist()]


def junk_in_each(codes: Codes, lengths: npt.NDArray[np.int64]) -> list[int]:
    """`junk_in` of many texts that lie end to end."""
    import numpy as np

    _, junk = _tables()
    found = np.zeros(len(lengths), dtype=np.uint8)
    filled = lengths > 0
    if filled.any():
        found[filled] = np.bitwise_or.reduceat(junk[codes], (np.cumsum(lengths) - lengths)[filled])
    bits: list[int] = found.tolist()
    return bits


@functools.cache
def _tables() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Kind and junk of every code point; made once a process, in about 30 ms."""
    import numpy as np

    kinds = np.full(_LAST_CODE + 1, SYMBOL, dtype=np.uint8)
    kinds[:_TABULATED] = [_kind(chr(code)) for code in range(_TABULATED)]
    kinds[0xE0100:0xE01F0] = MARK
    for first, last in _HAN:
        kinds[first : last + 1] = HAN
    for first, last in _UNSPACED:
        kinds[first : last + 1] = UNSPACED
    for first, last in _KANA:
        part = kinds[first : last + 1]
        part[part == LETTER] = KANA
    junk = np.zeros(_LAST_CODE + 1, dtype=np.uint8)
    for character in _LINE_ENDS:
        junk[ord(character)] |= LINE_END
    for bit, first, last in _JUNK:
        junk[first : last + 1] |= bit
    return kinds, junk


def _kind(character: str) -> int:
    if character.isspace():
        return SPACE
    if character in _ORDINARY:
        return PUNCTUATION
    if character.isalpha():
        return LATIN if character < "\x80" else LETTER
    if character.isnumeric() or character.isdigit():
        return DIGIT
    return MARK if unicodedata.category(character) in ("Mn", "Mc", "Cf") else SYMBOL
