"""How a text is tidied, which language it is in, and how much of it repeats itself. Pure functions of one text.

Tidying keeps what carries meaning: full-width punctuation, the ideographic space inside a line, joined emoji, the
indentation of code. It removes what only ever is an accident of storage.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onecard.data import characters

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from onecard.data.characters import Codes, Counts

# --- tidying ------------------------------------------------------------------------------------------------------

_LINE_ENDS = re.compile("\r\n|[\r\u2028\x0b\x0c\x85]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
# Zero-width space, word joiner, byte order mark, soft hyphen, and marks of writing direction.
_INVISIBLE = re.compile("[\u200b\u2060\ufeff\u00ad\u200e\u200f\u202a-\u202e\u2066-\u2069\ufff9-\ufffb]")
# Joiners mean something after an emoji, and in the scripts from Arabic to Mongolian; elsewhere they are junk.
_JOINED_BEFORE = "\ufe0f\u20e3\u2190-\u2bff\u0600-\u109f\u1780-\u18af\U0001f000-\U0001faff"
_STRAY_JOINERS = re.compile(f"(?<![{_JOINED_BEFORE}])[\u200c\u200d]+|[\u200c\u200d]+(?=\\s|$)")
_SPACES = " \t\u00a0\u3000\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
# Indentation before Chinese is typography (the paragraph's two spaces); before code or a list it has a meaning.
_CHINESE_INDENT = re.compile("[ \t\u3000]+(?=[\u3001-\u303f\u3400-\u9fff\uff01-\uff5e“‘《—…\U00020000-\U0003ffff])")
_MANY_BLANK_LINES = re.compile("\n{4,}")
# UTF-8 read as Latin-1 or Windows-1252: a lead byte shown as a letter, then a continuation byte shown as a symbol.
_MOJIBAKE = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u2122]"
)


def normalise(text: str, junk: int | None = None) -> str:
    """The text tidied: line ends, mojibake where certain, NFC, controls and invisible junk, spaces at line ends,
    blank lines (at most two in sequence), indentation of Chinese paragraphs, both ends. `junk`: characters.junk_in it.
    """
    junk = characters.junk_in(characters.codes_of(text)) if junk is None else junk
    if junk & characters.LINE_END:
        text = _LINE_ENDS.sub("\n", text).replace("\u2029", "\n\n")
    if junk & characters.DAMAGED and _MOJIBAKE.search(text):
        text = "\n".join(_repair(line) for line in text.split("\n"))
    text = unicodedata.normalize("NFC", text)
    if junk & (characters.CONTROL | characters.DAMAGED):
        text = _CONTROLS.sub("", text)
    if junk & (characters.INVISIBLE | characters.DAMAGED):
        text = _INVISIBLE.sub("", text)
    if junk & characters.JOINER:
        text = _STRAY_JOINERS.sub("", text)
    if junk & (characters.HARD_SPACE | characters.DAMAGED):
        text = text.replace("\u00a0", " ")
    text = "\n".join(_trimmed(line) for line in text.split("\n"))
    if "\n\n\n\n" in text:
        text = _MANY_BLANK_LINES.sub("\n\n\n", text)
    return text.strip(" \t\n\u3000")


def _trimmed(line: str) -> str:
    line = line.rstrip(_SPACES)
    indent = _CHINESE_INDENT.match(line) if line[:1] in (" ", "\t", "\u3000") else None
    return line[indent.end() :] if indent else line


def _repair(line: str) -> str:
    """Undo mojibake in a line where nothing doubtful remains: the repair is shorter and brings no new damage."""
    if not _MOJIBAKE.search(line):
        return line
    import ftfy

    repaired = ftfy.fix_encoding(line)
    certain = len(repaired) < len(line) and "\ufffd" not in repaired and not ftfy.badness.is_bad(repaired)
    return repaired if certain else line


# What ，。的 of UTF-8 become when they are read as GBK, what U+FFFD becomes then, and U+FFFD itself.
_GARBLED = ("锛", "銆", "鐨", "锟", "\ufffd", "ï¿½")
_FEWEST_GARBLED, _GARBLED_SHARE = 5, 0.02


def is_garbled(text: str) -> bool:
    """Whether a text shows, again and again, that it was read in a wrong encoding before; this cannot be undone."""
    if text.isascii():
        return False
    found = sum(map(text.count, _GARBLED))
    return found >= _FEWEST_GARBLED and found > _GARBLED_SHARE * len(text)


# --- language -----------------------------------------------------------------------------------------------------

_WORD_SAMPLE_CHARACTERS = 500
_WORD_SAMPLES = 4
_HAN = re.compile("[\u4e00-\u9fff]+")
_ENGLISH_WORDS = frozenset(
    [
        "the",
        "of",
        "and",
        "to",
        "a",
        "in",
        "that",
        "is",
        "was",
        "he",
        "for",
        "it",
        "with",
        "as",
        "his",
        "on",
        "be",
        "at",
        "by",
        "i",
        "this",
        "had",
        "not",
        "are",
        "but",
        "from",
        "or",
        "have",
        "an",
        "they",
        "which",
        "you",
        "were",
        "her",
        "she",
        "all",
        "their",
        "so",
        "will",
        "my",
        "me",
        "shall",
        "unto",
        "if",
        "when",
        "one",
        "what",
        "we",
        "no",
        "your",
        "who",
    ]
)
# Words as common in other languages of the same letters, less those that are English too.
_FOREIGN_WORDS = frozenset(
    [
        "de",
        "la",
        "le",
        "les",
        "et",
        "il",
        "des",
        "du",
        "un",
        "une",
        "est",
        "que",
        "qui",
        "dans",
        "pour",
        "pas",
        "sur",
        "au",
        "ce",
        "je",
        "der",
        "die",
        "und",
        "das",
        "den",
        "ist",
        "nicht",
        "mit",
        "von",
        "ein",
        "eine",
        "zu",
        "auf",
        "sich",
        "auch",
        "dem",
        "el",
        "los",
        "las",
        "en",
        "del",
        "por",
        "con",
        "para",
        "como",
        "su",
        "al",
        "lo",
        "es",
        "di",
        "che",
        "non",
        "per",
        "della",
        "sono",
        "del",
        "het",
        "een",
        "van",
        "ook",
        "niet",
        "dat",
        "met",
        "voor",
        "och",
        "att",
        "det",
        "som",
        "av",
        "til",
        "og",
        "ikke",
        "jag",
        "om",
        "os",
        "uma",
        "com",
        "na",
        "do",
        "da",
        "em",
        "mais",
        "ja",
        "ei",
        "se",
        "on",
        "ett",
        "har",
        "er",
        "yang",
        "dan",
        "ini",
        "itu",
        "dengan",
        "untuk",
        "tidak",
    ]
) - {"on", "do", "as", "her", "die", "per"}


def language_of(text: str) -> str:
    """`zh`, `zh-Hant`, `en` or `other`: by the shares of scripts, then by characters and words that tell them apart."""
    codes = characters.codes_of(text)
    return language_by(text, characters.count(codes))


def language_by(text: str, counts: Counts) -> str:
    """`language_of` a text whose characters are counted already."""
    letters, han = counts.letters, counts.han
    if letters == 0 or counts.kana > 0.1 * (han + counts.kana):
        return "other"
    # A Chinese character says about as much as four Latin letters.
    if 4 * han > letters - han:
        return "zh-Hant" if _is_traditional(_sample(text)) else "zh"
    if counts.latin < 0.97 * (letters - han):
        return "other"
    words = _sample(text).lower().split()
    if han and _ENGLISH_WORDS.isdisjoint(words):
        return "zh"  # Latin names and abbreviations in a Chinese sentence
    return "en" if _is_english(words) else "other"


def _is_traditional(text: str) -> bool:
    """Whether more of the characters are known to the traditional character set than to the simplified one."""
    try:
        text.encode("gb2312")
    except UnicodeEncodeError:
        han = "".join(_HAN.findall(text))
        return len(han.encode("big5", "ignore")) > len(han.encode("gb2312", "ignore"))
    return False


def _is_english(words: list[str]) -> bool:
    """Whether the words that fill English sentences are there, and more of them than of other languages' words."""
    common = sum(map(_ENGLISH_WORDS.__contains__, words))
    if not _FOREIGN_WORDS.isdisjoint(words) and sum(map(_FOREIGN_WORDS.__contains__, words)) > common:
        return False
    # Finnish without accents, or program text, has hardly any of either; a short text may have none by chance.
    return len(words) < 30 or common >= 0.08 * len(words)


def _sample(text: str) -> str:
    """A text, or pieces from all over a long one."""
    most = _WORD_SAMPLE_CHARACTERS * _WORD_SAMPLES
    if len(text) <= most:
        return text
    step = (len(text) - _WORD_SAMPLE_CHARACTERS) // (_WORD_SAMPLES - 1)
    return " ".join(text[i * step : i * step + _WORD_SAMPLE_CHARACTERS] for i in range(_WORD_SAMPLES))


def is_unspaced(text: str) -> bool:
    """True for text of which most is written without spaces between words (Chinese, Japanese, Thai ...)."""
    if text.isascii():
        return False
    counts = characters.count(characters.codes_of(_sample(text)))
    return 4 * (counts.han + counts.kana + counts.unspaced) > counts.letters


def are_unspaced(texts: Sequence[str]) -> list[bool]:
    """`is_unspaced` of many texts at once."""
    import numpy as np

    # ASCII has no such characters: nothing to count.
    samples = ["" if text.isascii() else _sample(text) for text in texts]
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    found = characters.count_each(characters.codes_of("".join(samples)), lengths)
    return [4 * (counts.han + counts.kana + counts.unspaced) > counts.letters for counts in found]


# --- measuring ----------------------------------------------------------------------------------------------------

SPAN_CHARACTERS = 10
# Natural text repeats more short spans the longer it is; the share is taken over pieces of this size.
_PIECE_CHARACTERS = 20_000
_SPANS_AT_ONCE = 16_384  # what is made on the way to so many stays in the cache of a core
_SHORT_CHARACTERS = 200  # up to here a set is quicker than arrays
_BASE = 0x9E3779B97F4A7C15  # odd and without pattern: equal sums of ten characters are equal characters


def repetition(text: str, spans: npt.NDArray[np.uint64] | None = None) -> float:
    """Share (0 to 1) of the text that repeats its own earlier lines, or its own earlier 10-character spans,
    whichever is larger. `spans`: span_hashes of the text."""
    import numpy as np

    by_lines = _repeated_lines(text) if "\n" in text else 0.0
    if len(text) <= _SHORT_CHARACTERS:
        count = max(len(text) - SPAN_CHARACTERS + 1, 0)
        by_spans = 1 - len({text[i : i + SPAN_CHARACTERS] for i in range(count)}) / count if count else 0.0
        return max(by_lines, by_spans)
    spans = span_hashes(characters.codes_of(text)) if spans is None else spans
    distinct = counted = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        # Those that begin in the piece and end in the next one are in neither.
        hashes = spans[start : min(start + _PIECE_CHARACTERS, len(text)) - SPAN_CHARACTERS + 1].copy()
        if len(hashes):
            hashes.sort()
            counted += len(hashes)
            distinct += 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
    return max(by_lines, 1 - distinct / counted)


def _repeated_lines(text: str) -> float:
    seen: set[str] = set()
    repeated = total = 0
    for line in map(str.strip, text.split("\n")):
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / max(total, 1)


def is_surely_varied(text: str, limit: float) -> bool:
    """True only if `repetition` cannot exceed the limit; a quick answer for most short texts.

    Each distinct character but those of the last span begins a span that no other one begins.
    """
    if len(text) > _SHORT_CHARACTERS or "\n" in text:
        return False
    return len(set(text)) - SPAN_CHARACTERS + 1 >= (1 - limit) * (len(text) - SPAN_CHARACTERS + 1)


def span_hashes(codes: Codes) -> npt.NDArray[np.uint64]:
    """A number for each span of 10 characters, put together from those of 2, 4 and 8."""
    import numpy as np

    count = max(len(codes) - SPAN_CHARACTERS + 1, 0)
    power = [np.uint64(pow(_BASE, exponent, 1 << 64)) for exponent in (1, 2, 4)]
    made = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _SPANS_AT_ONCE):
        stop = min(start + _SPANS_AT_ONCE, count)
        one = codes[start : stop + SPAN_CHARACTERS - 1].astype(np.uint64)
        two = one[:-1] * power[0] + one[1:]
        four = two[:-2] * power[1] + two[2:]
        eight = four[:-4] * power[2] + four[4:]
        np.add(eight[:-2] * power[1], two[8:], out=made[start:stop])
    return made


def symbol_ratio(text: str) -> float:
    """Share (0 to 1) of characters, spaces left out, that are neither letter, digit, mark nor ordinary punctuation."""
    counts = characters.count(characters.codes_of(text))
    return counts.symbol / max(counts.visible, 1)
