"""Rows of JSON: a file of lines, a list, or an object that holds one; lists element by element, in bounded memory.

In: a function that gives the lines of a file. Out: rows and rejections with their physical line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from onecard.data.cutting import LONGEST_ROW_CHARACTERS
from onecard.data.encoding import DAMAGED
from onecard.data.fields import is_row
from onecard.data.rows import Item, Lines, Rejection, Row

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_JSON_SPACE = re.compile(r"[ \t\r\n\0\ufeff]*")
_WINDOW_CHARACTERS = 1 << 20
# Names of constants and escapes that may be cut in two where a window ends.
_LONGEST_WORD = 16


# Python's parser would make a float of NaN and Infinity, which no JSON has; a writer that had no value wrote them.
_decoder = json.JSONDecoder(parse_constant=lambda _: None)


def _mend(value: Any) -> Any:
    """Replace escaped surrogates that have no partner by U+FFFD (the parser has joined the pairs)."""
    if isinstance(value, str):
        return _LONE_SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value


def row_of(value: Any, file: str, line: int, text: str) -> Item:
    """The row that a parsed value is; `text` is how it was written."""
    if isinstance(value, dict):
        return Row(_mend(value) if "\\u" in text else value, file, line)
    return Rejection("not_an_object", file, line, text)


def read_json_lines(file: str, lines: Lines) -> Iterator[Item]:
    """One object a line; blank lines and padding are nothing."""
    for number, raw in whole_lines(lines()):
        if raw is None:
            yield Rejection("row_too_long", file, number, "")
            continue
        text = raw.strip(" \t\r\n\0\ufeff")
        if not text:
            continue
        if number == 1 and text == "[":
            yield from read_json(file, lines)
            return
        if DAMAGED in text:
            yield Rejection("undecodable_bytes", file, number, text.replace(DAMAGED, "\ufffd"))
            continue
        try:
            value, end = _decoder.raw_decode(text)
            if text[end:].strip(" \t\0"):
                raise ValueError("two values in one line")
        except (ValueError, RecursionError):
            yield Rejection("bad_json", file, number, text)
            continue
        yield row_of(value, file, number, text)


def whole_lines(pieces: Iterable[str]) -> Iterator[tuple[int, str | None]]:
    """Numbered lines of what gives the longest of them in pieces; None in the place of such a line."""
    number, in_pieces = 1, False
    for piece in pieces:
        complete = piece.endswith(("\n", "\r"))
        if not complete and len(piece) > LONGEST_ROW_CHARACTERS // 2:
            in_pieces = True
            continue
        yield number, None if in_pieces else piece
        in_pieces = False
        number += 1
    if in_pieces:
        yield number, None


class _Window:
    """A part of a text that is read on as it is needed, the place reached in it, and the physical line of that."""

    def __init__(self, pieces: Iterator[str], line: int = 1) -> None:
        self._pieces = pieces
        self.text = ""
        self.at = 0
        self.line = line

    def _more(self) -> bool:
        """Drop what is behind, and read at least as much again as is held; False at the end of the text."""
        parts = [self.text[self.at :]]
        wanted = max(_WINDOW_CHARACTERS, len(parts[0]))
        read = 0
        while read < wanted and (piece := next(self._pieces, "")):
            parts.append(piece)
            read += len(piece)
        self.text, self.at = "".join(parts), 0
        return read > 0

    def next_character(self) -> str:
        """The next one that is no space; an empty string at the end."""
        while True:
            self.advance(_skip_space(self.text, self.at))
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def advance(self, place: int) -> None:
        """Go on to a later place."""
        self.line += self.text.count("\n", self.at, place)
        self.at = place

    def value(self) -> tuple[Any, str]:
        """The JSON value here and how it was written; ValueError if there is none, or one that is too long."""
        while True:
            try:
                value, end = _decoder.raw_decode(self.text, self.at)
                if end < len(self.text) or not self._more():
                    raw = self.text[self.at : end]
                    self.advance(end)
                    return value, raw
            except json.JSONDecodeError as fault:
                # A fault far from the end of what was read is one of the file.
                unfinished = fault.msg.startswith("Unterminated") or fault.pos >= len(self.text) - _LONGEST_WORD
                if not unfinished or len(self.text) - self.at > LONGEST_ROW_CHARACTERS or not self._more():
                    raise


def read_json(file: str, lines: Lines) -> Iterator[Item]:
    """A list of strings or objects; one row, or an object that holds such a list; or JSON lines under the wrong suffix.

    A list is taken element by element, so that a file that breaks off gives the rows before the break.
    """
    window = _Window(lines())
    first = window.next_character()
    if first == "[":
        yield from _read_list(file, window)
    elif first == "{":
        yield from _read_object(file, lines)
    else:
        yield Rejection("bad_json" if first else "empty_file", file, 1, window.text[window.at :][:2000])


def _read_list(file: str, window: _Window) -> Iterator[Item]:
    window.advance(window.at + 1)
    while window.next_character() != "]":
        line = window.line
        try:
            value, text = window.value()
        except (ValueError, RecursionError):
            yield Rejection("bad_json", file, line, window.text[window.at : window.at + 2000])
            return
        if DAMAGED in text:
            yield Rejection("undecodable_bytes", file, line, text.replace(DAMAGED, "\ufffd"))
        else:
            yield row_of({"text": value} if isinstance(value, str) else value, file, line, text)
        following = window.next_character()
        if following == ",":
            window.advance(window.at + 1)
        elif following != "]":
            yield Rejection("bad_json", file, window.line, window.text[window.at :][:2000])
            return


def _read_object(file: str, lines: Lines) -> Iterator[Item]:
    """One object over several lines, or (where more follows the first) JSON lines."""
    if _has_several_values(lines):
        yield from read_json_lines(file, lines)
        return
    parts: list[str] = []
    size = 0
    for piece in lines():
        parts.append(piece)
        size += len(piece)
        if size > LONGEST_ROW_CHARACTERS:
            yield Rejection("row_too_long", file, 1, parts[0][:2000])
            return
    whole = "".join(parts)
    start = _skip_space(whole, 0)
    try:
        value, end = _decoder.raw_decode(whole, start)
    except (ValueError, RecursionError):
        first_line = whole.strip(" \t\r\n\0\ufeff").partition("\n")[0]
        if first_line.rstrip().endswith("}"):
            yield from read_json_lines(file, lines)
        else:
            yield Rejection("bad_json", file, 1, whole[:2000])
        return
    if whole[end:].strip(" \t\r\n\0"):
        yield from read_json_lines(file, lines)
        return
    yield from _read_whole_object(file, whole, start, value)


def _has_several_values(lines: Lines) -> bool:
    """Whether the first line that is not blank is a value of its own and another line follows."""
    found = False
    for _, line in whole_lines(lines()):
        text = (line or "").strip(" \t\r\n\0\ufeff")
        if not text:
            continue
        if found:
            return True
        try:
            _, end = _decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return False
        found = end == len(text)
        if not found:
            return False
    return False


def _read_whole_object(file: str, whole: str, start: int, value: dict[str, Any]) -> Iterator[Item]:
    lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    lists = lists or [key for key, item in value.items() if isinstance(item, list) and len(item) > 1]
    if lists and not is_row(value):
        longest = max(lists, key=lambda key: len(value[key]))
        place = _find_member(whole, start, longest)
        window = _Window(iter([whole[place:]]), line=whole.count("\n", 0, place) + 1)
        window.next_character()
        yield from _read_list(file, window)
    elif DAMAGED in whole:
        yield Rejection("undecodable_bytes", file, 1, whole.replace(DAMAGED, "\ufffd"))
    else:
        yield row_of(value, file, 1, whole)


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    return match.end() if match else position


def _find_member(text: str, position: int, key: str) -> int:
    """Where the value of `key` begins in the (well-formed) object at `position`."""
    position += 1
    while True:
        name, position = _decoder.raw_decode(text, _skip_space(text, position))
        position = _skip_space(text, _skip_space(text, position) + 1)
        if name == key:
            return position
        _, position = _decoder.raw_decode(text, position)
        position = _skip_space(text, position) + 1
