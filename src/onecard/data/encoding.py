"""From bytes to text: which encoding a file is in, and its lines in bounded memory.

In: a function that opens the file's bytes (it is opened more than once) and optionally the encoding's name.
Out: a `TextFormat`, and the lines. Detection looks at a sample of the start, checks the guess on the whole file, and
where the guess breaks looks again at that place. Order: byte order marks, strict UTF-8, UTF-16/32 without a mark,
then GB18030 against Big5 by how many of the decoded characters are everyday Chinese ones, then charset-normalizer.

A line ends with \\n or \\r\\n and with nothing else: U+2028, U+0085, \\v, \\f are characters like others, and so is a
lone \\r unless the file has no other line ends. Knows nothing of file formats.
"""

from __future__ import annotations

import codecs
import functools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from onecard.data import cutting
from onecard.errors import ConfigError

SAMPLE_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 18
# A file stays readable with this share of damaged places; the rows that hold them are named. Above it, the encoding
# is taken to be wrong.
_TOLERATED_DAMAGE = 0.02

DAMAGED = "\udcff"
"""Stands in decoded text where bytes could not be decoded; a lone surrogate, so that no real text holds it."""

OpenBytes = Callable[[], BinaryIO]

# Written GBK and GB2312 files often hold characters that only GB18030 has, and GB18030 reads all of both.
_WIDER = {"gbk": "gb18030", "gb2312": "gb18030", "hz": "hz", "cp936": "gb18030", "utf-8": "utf-8-sig"}

# Longest first: the mark of UTF-32-LE begins with that of UTF-16-LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (b"\x84\x31\x95\x33", "gb18030"),
)
_BINARY_MAGIC = (
    b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"\x7fELF", b"SQLite format 3\0", b"Rar!",
    b"7z\xbc\xaf", b"\x1f\x8b", b"\xd0\xcf\x11\xe0", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PAR1", b"BZh", b"RIFF",
    b"OggS",
)  # fmt: skip
_TEXT_CONTROLS = frozenset("\t\n\r\v\f\x1b\0")
_CONTROLS = [chr(code) for code in range(32) if chr(code) not in _TEXT_CONTROLS]

# Where ISO 8859-2 has š, ž, ś and ź, and Windows-1250 rarer things; its own letters lie among the controls.
_LATIN_2_LETTERS = re.compile(b"[\xb6\xb9\xbc\xbe]")
_UPPER_CONTROLS = re.compile(b"[\x80-\x9f]")

# The everyday characters of written Chinese; simplified first, then traditional forms that differ. About seven in ten
# characters of real text are among them, and about one in forty of text that was decoded wrongly.
_EVERYDAY = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方"
    "多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明"
    "性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西月话合回特代内信表化老给世位次"
    "度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活更别打女变四神总何电数安少报才结反受目太量再感建务"
    "做接必场件计管期市直德资命山金指许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南"
    "品住告类求据程北边死张该交规万取望觉术领共确传师观清今切院让识候带导争运兵曰将军于吾言乃若矣亦遂请吃吗呢吧啊谁喜欢谢"
    "這個們來為國說時會對過發後裡種經麼學當沒動還進樣開從實軍無與長機關點業將兩間問並應戰頭體見產話內門論義條東聲員電數報結"
    "務場計馬書聽達強難權記類據規張萬覺術領傳師觀讓識導爭運給處總變認題嗎誰歡謝於氣幾兒樂買賣車錢網頁線層級號項"
)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How to read a file: a codec, whether a lone \\r ends its lines, and how many places could not be decoded."""

    encoding: str
    carriage_returns: bool = False
    damaged_places: int = 0


class NotText(ValueError):  # noqa: N818 - an answer about a file, not a fault of the program
    """The bytes are no text that can be read; `reason` is binary_file or unknown_encoding."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def inspect(open_bytes: OpenBytes, encoding: str = "auto") -> TextFormat:
    """Find out how to read a file (two passes over it, bounded memory).

    Raises NotText for a file that is no text in any known encoding, ConfigError for an unknown name in `encoding`.
    """
    with open_bytes() as stream:
        sample = _read_fully(stream, SAMPLE_BYTES)
        whole = len(sample) < SAMPLE_BYTES
    if encoding != "auto":
        return _check(open_bytes, _named(encoding), sample)[0]
    guess = _guess(sample, whole)
    found, characters, damage_offset = _check(open_bytes, guess, sample)
    if found.damaged_places and damage_offset > len(sample) // 2:
        # The start looked right (perhaps it was all ASCII): judge by the place where it went wrong.
        with open_bytes() as stream:
            _skip(stream, damage_offset)
            again = _guess(_read_fully(stream, SAMPLE_BYTES).partition(b"\n")[2] or sample, whole=False)
        if again != guess:
            other, other_characters, _ = _check(open_bytes, again, sample)
            if other.damaged_places < found.damaged_places:
                found, characters = other, other_characters
    if found.damaged_places > _TOLERATED_DAMAGE * max(characters, 1):
        raise NotText("unknown_encoding")
    return found


def read_lines(open_bytes: OpenBytes, text_format: TextFormat, longest: int = sys.maxsize) -> Iterator[str]:
    """The physical lines with their line ends as they stand in the file; `DAMAGED` marks undecodable places.

    A line of more than `longest` characters comes in pieces, of which the last alone has the line end.
    """
    end = line_end(text_format)
    pieces: list[str] = []
    held = 0
    first = True
    for text in _decode(open_bytes, text_format.encoding):
        if first:
            text = text.removeprefix("\ufeff")
            first = False
        start = 0
        while (position := text.find(end, start)) >= 0:
            if pieces:
                pieces.append(text[start : position + 1])
                yield "".join(pieces)
                pieces.clear()
                held = 0
            else:
                yield text[start : position + 1]
            start = position + 1
        if start < len(text):
            pieces.append(text[start:])
            held += len(text) - start
        if held > longest:
            whole = "".join(pieces)
            while len(whole) > longest:
                cut = cutting.best_cut(whole, longest // 2, longest)
                yield whole[:cut]
                whole = whole[cut:]
            pieces, held = [whole], len(whole)
    if pieces:
        yield "".join(pieces)


def line_end(text_format: TextFormat) -> str:
    """The character that ends the lines of a file."""
    return "\r" if text_format.carriage_returns else "\n"


def strip_line_end(line: str) -> str:
    """A line of `read_lines` without its end."""
    if line.endswith("\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(("\n", "\r")) else line


# --- detection ----------------------------------------------------------------------------------------------------


def _named(encoding: str) -> str:
    try:
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(name)
    except LookupError:
        raise ConfigError(f"There is no encoding {encoding!r}.", "Use a name such as utf-8, gb18030 or big5.") from None
    return _WIDER.get(name, name)


def _guess(sample: bytes, whole: bool) -> str:
    """The likeliest codec of the sample; NotText if there is none."""
    for mark, name in _MARKS:
        if sample.startswith(mark):
            return name
    if sample.startswith(_BINARY_MAGIC):
        raise NotText("binary_file")
    if b"\0" in sample:
        wide = _guess_wide(sample)
        if wide:
            return wide
    if b"\x1b$" in sample:  # seven-bit encodings that switch character sets by escape sequences
        return "iso2022_kr" if b"\x1b$)C" in sample else "iso2022_jp_2"
    text = _decode_sample(sample, "utf-8", whole)
    damage = text.count(DAMAGED)
    # A damaged UTF-8 file still has far more well-formed sequences than broken ones; no other encoding's text does.
    if damage == 0 or sum(character > "\x7f" for character in text) > 20 * damage:
        if _control_share(text) > 0.05:
            raise NotText("binary_file")
        return "utf-8-sig"
    found = _guess_wide(sample) or _guess_chinese(sample, whole)
    if found:
        return found
    try:
        return _guess_statistically(sample, whole)
    except NotText:
        if damage <= _TOLERATED_DAMAGE * len(text) and _control_share(text) <= 0.05:
            return "utf-8-sig"  # ASCII with a few broken bytes
        raise


def _guess_wide(sample: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark: the byte order under which the text is made of everyday characters."""
    best, best_score = None, 0.4
    for name, width in (("utf-32-le", 4), ("utf-32-be", 4), ("utf-16-le", 2), ("utf-16-be", 2)):
        try:
            text = sample[: len(sample) // width * width].decode(name)
        except UnicodeDecodeError as fault:
            # The sample may end within a surrogate pair; anything earlier is not this encoding.
            if fault.start < len(sample) - 4:
                continue
            text = sample[: fault.start].decode(name)
        score = _everyday_share(text[:50_000])
        if score > best_score:
            best, best_score = name, score
    return best


def _guess_chinese(sample: bytes, whole: bool) -> str | None:
    best, best_score = None, 0.35
    for name in ("gb18030", "big5hkscs"):
        text = _decode_sample(sample, name, whole)
        beyond_ascii = [character for character in text[:100_000] if character > "\x7f"]
        if not beyond_ascii or text.count(DAMAGED) > _TOLERATED_DAMAGE * len(beyond_ascii):
            continue
        score = _everyday_share("".join(beyond_ascii))
        if score > best_score:
            best, best_score = name, score
    return best


def _guess_statistically(sample: bytes, whole: bool) -> str:
    from charset_normalizer import from_bytes

    # Whole lines only: a character cut in two at the end of the sample would rule out the right encoding.
    cut = sample if whole else sample[: sample.rfind(b"\n") + 1] or sample
    match = from_bytes(cut).best()
    if match is not None:
        name = _corrected(codecs.lookup(match.encoding).name, sample, whole)
        text = _decode_sample(sample, name, whole)
        if DAMAGED not in text and _control_share(text) <= 0.01:
            return name
    text = _decode_sample(sample, "gb18030", whole)
    if DAMAGED not in text and _control_share(text) == 0 and _share_of_letters(text) > 0.5:
        return "gb18030"  # too short to judge, and the encoding that Chinese users most often have
    raise NotText("binary_file" if _control_share(sample.decode("latin-1")) > 0.05 else "unknown_encoding")


def _corrected(name: str, sample: bytes, whole: bool) -> str:
    """The codec that people mean by it: the wider one of a family, or its twin where only that one fits."""
    if name.startswith("shift_jis") and DAMAGED not in _decode_sample(sample, "cp932", whole):
        return "cp932"
    if name == "cp1250" and _LATIN_2_LETTERS.search(sample) and not _UPPER_CONTROLS.search(sample):
        return "iso8859-2"
    return _WIDER.get(name, name)


def _everyday_share(text: str) -> float:
    """Share of characters that are ASCII text, everyday Chinese or Chinese punctuation; wrong ones count against it."""
    score = 0
    for character in text:
        code = ord(character)
        if code < 128:
            score += 1 if code >= 32 or character in "\t\n\r" else -1
        elif character in _EVERYDAY or 0x3000 <= code <= 0x3011 or 0xFF00 < code < 0xFF5F or 0x2010 <= code <= 0x2026:
            score += 1
        elif 0xE000 <= code < 0xF900 or character == DAMAGED or unicodedata.category(character) in ("Cn", "Cc"):
            score -= 1
    return score / max(len(text), 1)


def _control_share(text: str) -> float:
    return sum(map(text.count, _CONTROLS)) / max(len(text), 1)


def _share_of_letters(text: str) -> float:
    beyond_ascii = [character for character in text if character > "\x7f"]
    return sum(character.isalpha() for character in beyond_ascii) / max(len(beyond_ascii), 1)


# --- decoding -----------------------------------------------------------------------------------------------------


@functools.cache
def _error_handler() -> str:
    """Register (once) the handler that puts one DAMAGED for each undecodable place."""
    codecs.register_error("onecard.damaged", lambda fault: (DAMAGED, fault.end))  # type: ignore[attr-defined]
    return "onecard.damaged"


def _decode_sample(sample: bytes, name: str, whole: bool) -> str:
    return codecs.getincrementaldecoder(name)(_error_handler()).decode(sample, final=whole)


def _decode(open_bytes: OpenBytes, name: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(name)(_error_handler())
    with open_bytes() as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)


def _check(open_bytes: OpenBytes, name: str, sample: bytes) -> tuple[TextFormat, int, int]:
    """Decode the whole file: its format, its length in characters, and the byte offset of the first damaged block."""
    damaged = characters = first_damage = 0
    feeds = returns = False
    for number, text in enumerate(_decode(open_bytes, name)):
        here = text.count(DAMAGED)
        if here and not damaged:
            first_damage = number * _BLOCK_BYTES
        damaged += here
        characters += len(text)
        feeds = feeds or "\n" in text
        returns = returns or "\r" in text
    return TextFormat(name, returns and not feeds, damaged), characters, first_damage


def _read_fully(stream: BinaryIO, size: int) -> bytes:
    """Up to `size` bytes; decompressing streams may return less than asked at a time."""
    parts: list[bytes] = []
    missing = size
    while missing and (block := stream.read(missing)):
        parts.append(block)
        missing -= len(block)
    return b"".join(parts)


def _skip(stream: BinaryIO, count: int) -> None:
    while count > 0 and (block := stream.read(min(count, _BLOCK_BYTES))):
        count -= len(block)
