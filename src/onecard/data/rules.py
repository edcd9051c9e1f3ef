"""What text is tidied into, which language it is in, and why a document is refused. Pure functions of one text.

Tidying keeps what carries meaning: full-width punctuation, the ideographic space inside a line, joined emoji, the
indentation of code. It removes what only ever is an accident of storage.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

# Letters of the scripts that are written without spaces; kana and hangul apart, to tell Chinese from its neighbours.
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile("[\u3041-\u30ff\uff66-\uff9f]")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_LETTERS = re.compile(r"[^\W\d_]")
_ASCII_LETTERS = re.compile("[A-Za-z]")
_ENGLISH_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "the of and to a in that is was he for it with as his on be at by i this had not are but from or have an they "
        "which you were her she all their so will my me shall unto if when one what we no your who",
    )
)
_LANGUAGE_SAMPLE_CHARACTERS = 4_000

# --- tidying ------------------------------------------------------------------------------------------------------

_LINE_ENDS = re.compile("\r\n|[\r\u2028\x0b\x0c\x85]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
# Zero-width space, word joiner, byte order mark, soft hyphen, and marks of writing direction.
_INVISIBLE = re.compile("[\u200b\u2060\ufeff\u00ad\u200e\u200f\u202a-\u202e\u2066-\u2069\ufff9-\ufffb]")
# Joiners mean something after an emoji, and in the scripts from Arabic to Mongolian; elsewhere they are junk.
_JOINED_BEFORE = "\ufe0f\u20e3\u2190-\u2bff\u0600-\u109f\u1780-\u18af\U0001f000-\U0001faff"
_STRAY_JOINERS = re.compile(f"(?<![{_JOINED_BEFORE}])[\u200c\u200d]+|[\u200c\u200d]+(?=\\s|$)")
_TRAILING_SPACE = re.compile("[ \t\u00a0\u3000\u2000-\u200a]+(?=\n|$)")
# Indentation before Chinese is typography (the paragraph's two spaces); before code or a list it has a meaning.
_CHINESE_INDENT = re.compile(
    "^[ \t\u3000]+(?=[\u3001-\u303f\u3400-\u9fff\uff01-\uff5e“‘《—…\U00020000-\U0003ffff])", re.M
)
_MANY_BLANK_LINES = re.compile("\n{4,}")
# UTF-8 read as Latin-1 or Windows-1252: a lead byte shown as a letter, then a continuation byte shown as a symbol.
_MOJIBAKE = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u2122]"
)


def normalise(text: str) -> str:
    """The text tidied: line ends, mojibake where certain, NFC, controls and invisible junk, spaces at line ends,
    blank lines (at most two in sequence), indentation of Chinese paragraphs, both ends."""
    text = _LINE_ENDS.sub("\n", text).replace("\u2029", "\n\n")
    if _MOJIBAKE.search(text):
        text = "\n".join(_repair(line) for line in text.split("\n"))
    text = unicodedata.normalize("NFC", text)
    text = _CONTROLS.sub("", text)
    text = _STRAY_JOINERS.sub("", _INVISIBLE.sub("", text))
    text = text.replace("\u00a0", " ")
    text = _TRAILING_SPACE.sub("", text)
    text = _CHINESE_INDENT.sub("", text)
    return _MANY_BLANK_LINES.sub("\n\n\n", text).strip(" \t\n\u3000")


def _repair(line: str) -> str:
    """Undo mojibake in a line where nothing doubtful remains: the repair is shorter and brings no new damage."""
    if not _MOJIBAKE.search(line):
        return line
    import ftfy

    repaired = ftfy.fix_encoding(line)
    certain = len(repaired) < len(line) and "\ufffd" not in repaired and not ftfy.badness.is_bad(repaired)
    return repaired if certain else line


# --- language -----------------------------------------------------------------------------------------------------


def language_of(text: str) -> str:
    """`zh`, `en` or `other`, by the shares of scripts in the first 4,000 characters (and, for Latin, common words)."""
    sample = text[:_LANGUAGE_SAMPLE_CHARACTERS]
    han, kana = len(_HAN.findall(sample)), len(_KANA.findall(sample))
    letters, ascii_letters = len(_LETTERS.findall(sample)), len(_ASCII_LETTERS.findall(sample))
    if letters == 0:
        return "other"
    if kana > 0.1 * (han + kana):
        return "other"
    # A Chinese character says about as much as four Latin letters.
    if 4 * han > (letters - han) and han > 0:
        return "zh"
    if ascii_letters < 0.97 * (letters - han):
        return "other"
    words = re.findall(r"[a-z]+", sample.lower())
    common = sum(word in _ENGLISH_WORDS for word in words)
    # French or Finnish without accents, or program text, has hardly any of the words that fill English sentences.
    return "en" if len(words) < 30 or common >= 0.08 * len(words) else "other"


def is_unspaced(text: str) -> bool:
    """True for text of which most is written without spaces between words (Chinese, Japanese, Thai ...)."""
    sample = text[:_LANGUAGE_SAMPLE_CHARACTERS]
    return 4 * len(_UNSPACED.findall(sample)) > len(_LETTERS.findall(sample))


# --- refusing -----------------------------------------------------------------------------------------------------

_SPAN_CHARACTERS = 10
# Natural text repeats more short spans the longer it is; the share is taken over pieces of this size.
_PIECE_CHARACTERS = 20_000
_ORDINARY = re.compile(r"[\w\s.,;:!?'\"()\-–—…·‘’“”，。！？；：、（）《》〈〉【】「」『』〔〕％%￥]+")


def repetition(text: str) -> float:
    """Share (0 to 1) of the text that repeats its own earlier lines, or its own earlier 10-character spans,
    whichever is larger."""
    lines = [line.strip() for line in text.split("\n")]
    seen: set[str] = set()
    repeated = total = 0
    for line in lines:
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    by_lines = repeated / max(total, 1)
    distinct = spans = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        count = len(piece) - _SPAN_CHARACTERS + 1
        if count > 0:
            spans += count
            distinct += len({piece[i : i + _SPAN_CHARACTERS] for i in range(count)})
    return max(by_lines, 1 - distinct / spans if spans else 0.0)


def symbol_ratio(text: str) -> float:
    """Share (0 to 1) of characters, spaces left out, that are neither letter, digit, mark nor ordinary punctuation."""
    characters = len(text) - sum(map(str.isspace, text)) if text else 0
    rest = _ORDINARY.sub("", text)
    symbols = sum(unicodedata.category(character) not in ("Mn", "Mc", "Cf") for character in rest)
    return symbols / max(characters, 1)


def refusal(
    text: str, *, minimum_characters: int, maximum_repetition: float, maximum_symbol_ratio: float
) -> tuple[str, str] | None:
    """Why a tidied text is not kept, as (reason, detail), or None. Reasons: empty, too_short, too_many_symbols,
    too_repetitive."""
    if not text:
        return "empty", ""
    if len(text) < minimum_characters:
        return "too_short", f"{len(text)} characters"
    measures: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
        ("too_many_symbols", symbol_ratio, maximum_symbol_ratio, "symbols"),
        ("too_repetitive", repetition, maximum_repetition, "repeated"),
    )
    for reason, measure, limit, word in measures:
        share = measure(text)
        if share > limit:
            return reason, f"{share:.0%} {word}"
    return None
