"""One reader for each file format: an open file becomes rows and rejections, each with its physical line.

In: a path of sources.py and, for text files, the rule that says what a document is. Out: a stream of Row and Rejection
in the order of the file. Lines are counted from 1; a Parquet file has rows instead of lines. What rows mean (which
field is the text, who speaks in a chat) is not known here; fields.py says whether an object is a row at all.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onecard import console
from onecard.data import encoding, sources
from onecard.data.encoding import DAMAGED, TextFormat, strip_line_end
from onecard.data.fields import is_row
from onecard.data.rows import Item, Lines, Rejection, Row
from onecard.data.tables import read_parquet, read_table

# With split = auto a text longer than this is cut at a line end, so that one huge file is not one huge document.
LONGEST_TEXT_CHARACTERS = 4_000_000
_LINES_LOOKED_AT = 2000


def read_file(path: Path, *, encoding_name: str = "auto", split: str = "auto") -> Iterator[Item]:
    """Read one file of a known format. Damage is a Rejection, never an exception."""
    kind = sources.file_format(path)
    if kind is None:
        yield Rejection("unsupported_file", str(path), 0, "")
        return
    if kind == ".parquet":
        yield from _guarded(path, read_parquet(path))
        return
    open_bytes = functools.partial(sources.open_bytes, path)
    try:
        text_format = encoding.inspect(open_bytes, encoding_name)
    except encoding.NotText as fault:
        yield Rejection(fault.reason, str(path), 0, "")
        return
    except _damage() as fault:
        yield Rejection("damaged_file", str(path), 0, str(fault))
        return
    lines = functools.partial(encoding.read_lines, open_bytes, text_format)
    yield from _guarded(path, _read_text_format(kind, str(path), lines, text_format, split))


def _read_text_format(kind: str, file: str, lines: Lines, text_format: TextFormat, split: str) -> Iterator[Item]:
    match kind:
        case ".txt" | ".md":
            return _read_text(file, lines, text_format, split)
        case ".jsonl":
            return _read_json_lines(file, lines)
        case ".json":
            return _read_json(file, lines)
        case ".csv" | ".tsv":
            return read_table(file, lines, kind)
        case _:
            return _read_yaml(file, lines)


def _damage() -> tuple[type[BaseException], ...]:
    """What reading a damaged compressed file raises. OSError is both BadGzipFile and a disk that cannot be read."""
    import lzma
    import zlib

    import zstandard

    return (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def _guarded(path: Path, items: Iterator[Item]) -> Iterator[Item]:
    """A file that breaks off in the middle gives what stood before, then a rejection."""
    try:
        yield from items
    except _damage() as fault:
        yield Rejection("damaged_file", str(path), 0, str(fault))


# --- text ---------------------------------------------------------------------------------------------------------


def _read_text(file: str, lines: Lines, text_format: TextFormat, split: str) -> Iterator[Item]:
    longest = sys.maxsize
    if split == "auto":
        split, longest = choose_split(lines()), LONGEST_TEXT_CHARACTERS
        if split == "line":
            console.note(f"{file}: each line is taken as a document (long lines); set split to say otherwise.")
    if split == "file" and text_format.damaged_places:
        console.warn(
            f"{file}: {text_format.damaged_places} places could not be decoded as {text_format.encoding}; "
            "each became U+FFFD."
        )
    block: list[str] = []
    characters = first = 0
    for number, line in enumerate(lines(), 1):
        text = strip_line_end(line)
        blank = not text.strip(" \t\u3000\0")
        ends = split == "line" or (split == "paragraph" and blank) or characters > longest
        if ends and block:
            yield _text_row(file, first, block, split)
            block, characters = [], 0
        if not block and blank:
            continue
        if not block:
            first = number
        block.append(text)
        characters += len(text) + 1
    if block:
        yield _text_row(file, first, block, split)


def _text_row(file: str, line: int, block: list[str], split: str) -> Item:
    text = "\n".join(block)
    if DAMAGED in text:
        text = text.replace(DAMAGED, "\ufffd")
        if split != "file":
            return Rejection("undecodable_bytes", file, line, text)
    return Row({"text": text}, file, line)


def choose_split(lines: Iterable[str]) -> str:
    """`line` for at least 20 lines of 120 Chinese characters (or 360 others) in the mean, else `file`.

    Web text with a document a line has such means; the paragraphs of novels stay well below.
    """
    lengths: list[float] = []
    for number, line in enumerate(lines):
        if number >= _LINES_LOOKED_AT:
            break
        head = line[:2000].strip()
        if head:
            wide = sum(character >= "\u2e80" for character in head)
            lengths.append(wide + (len(head) - wide) / 3)
    return "line" if len(lengths) >= 20 and sum(lengths) / len(lengths) >= 120 else "file"


# --- JSON ---------------------------------------------------------------------------------------------------------

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_JSON_SPACE = re.compile(r"[ \t\r\n\0\ufeff]*")


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


def _row_of(value: Any, file: str, line: int, text: str) -> Item:
    if isinstance(value, dict):
        return Row(_mend(value) if "\\u" in text else value, file, line)
    return Rejection("not_an_object", file, line, text)


def _read_json_lines(file: str, lines: Lines) -> Iterator[Item]:
    for number, raw in enumerate(lines(), 1):
        text = raw.strip(" \t\r\n\0\ufeff")
        if not text:
            continue
        if number == 1 and text == "[":
            yield from _read_json(file, lines)
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
        yield _row_of(value, file, number, text)


def _read_json(file: str, lines: Lines) -> Iterator[Item]:
    """A list of strings or objects; one row, or an object that holds such a list; or JSON lines under the wrong suffix.

    A list is taken element by element, so that a file that breaks off gives the rows before the break.
    """
    whole = "".join(lines())
    start = _skip_space(whole, 0)
    if whole.startswith("{", start):
        try:
            value, end = _decoder.raw_decode(whole, start)
        except (ValueError, RecursionError):
            yield from _broken_object(file, lines, whole)
            return
        if whole[end:].strip(" \t\r\n\0"):
            yield from _read_json_lines(file, lines)
            return
        lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
        lists = lists or [key for key, item in value.items() if isinstance(item, list) and len(item) > 1]
        if not lists or is_row(value):
            if DAMAGED in whole:
                yield Rejection("undecodable_bytes", file, 1, whole.replace(DAMAGED, "\ufffd"))
            else:
                yield _row_of(value, file, 1, whole)
            return
        longest = max(lists, key=lambda key: len(value[key]))
        start = _find_member(whole, start, longest)
    if not whole.startswith("[", start):
        yield Rejection("bad_json" if whole[start:].strip("\0 \r\n\t") else "empty_file", file, 1, whole[:2000])
        return
    yield from _read_json_list(file, whole, start)


def _broken_object(file: str, lines: Lines, whole: str) -> Iterator[Item]:
    first_line = whole.strip(" \t\r\n\0\ufeff").partition("\n")[0]
    if first_line.rstrip().endswith("}"):
        yield from _read_json_lines(file, lines)
    else:
        yield Rejection("bad_json", file, 1, whole[:2000])


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


def _read_json_list(file: str, whole: str, position: int) -> Iterator[Item]:
    position = _skip_space(whole, position + 1)
    line = whole.count("\n", 0, position) + 1
    while not whole.startswith("]", position):
        try:
            value, end = _decoder.raw_decode(whole, position)
        except (ValueError, RecursionError):
            yield Rejection("bad_json", file, line, whole[position : position + 2000])
            return
        text = whole[position:end]
        if DAMAGED in text:
            yield Rejection("undecodable_bytes", file, line, text.replace(DAMAGED, "\ufffd"))
        else:
            yield _row_of({"text": value} if isinstance(value, str) else value, file, line, text)
        following = _skip_space(whole, end)
        if whole.startswith(",", following):
            following = _skip_space(whole, following + 1)
        elif not whole.startswith("]", following):
            yield Rejection("bad_json", file, line + whole.count("\n", position, following), whole[following:][:2000])
            return
        line += whole.count("\n", position, following)
        position = following


# --- YAML ---------------------------------------------------------------------------------------------------------


def _read_yaml(file: str, lines: Lines) -> Iterator[Item]:
    """A list of rows or strings, or `conversations:` with lists of strings. All scalars stay strings (`no`)."""
    import yaml

    # BaseLoader makes no objects, numbers or booleans of what is written; the C one is ten times faster.
    loader_class = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    text = "".join(lines()).replace("\0", "")
    if DAMAGED in text:
        yield Rejection("undecodable_bytes", file, 0, text.replace(DAMAGED, "\ufffd")[:2000])
        return
    try:
        loader = loader_class(text)
        root = loader.get_single_node()
        if root is None:
            yield Rejection("empty_file", file, 0, "")
            return
        items = root
        if isinstance(root, yaml.MappingNode):
            members = {key.value: value for key, value in root.value}
            items = members.get("conversations") or max(
                (value for value in members.values() if isinstance(value, yaml.SequenceNode)),
                key=lambda node: len(node.value),
                default=root,
            )
        if not isinstance(items, yaml.SequenceNode):
            value = loader.construct_object(root, deep=True)
            yield _row_of(value, file, 1, str(value)[:2000])
            return
        for node in items.value:
            value = loader.construct_object(node, deep=True)
            line = node.start_mark.line + 1
            if isinstance(value, list):
                value = {"conversations": value}
            yield _row_of({"text": value} if isinstance(value, str) else value, file, line, str(value))
    except (yaml.YAMLError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        yield Rejection("bad_yaml", file, 0 if mark is None else mark.line + 1, str(fault))
