"""One reader for each file format: an open file becomes rows and rejections, each with its physical line.

In: a path of sources.py and, for text files, the rule that says what a document is. Out: a stream of Row and Rejection
in the order of the file. Lines are counted from 1; a Parquet file has rows instead of lines, a book chapters. What
rows mean (which field is the text, who speaks in a chat) is not known here; fields.py says what is a row at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from onecard import console
from onecard.data import encoding, sources
from onecard.data.archives import members
from onecard.data.cutting import LONGEST_ROW_CHARACTERS, LONGEST_TEXT_CHARACTERS
from onecard.data.encoding import DAMAGED, OpenBytes, TextFormat, strip_line_end
from onecard.data.fields import is_row
from onecard.data.json_rows import read_json, read_json_lines, row_of
from onecard.data.markup import html_text, read_book, stated_encoding
from onecard.data.rows import Item, Lines, Rejection, Row
from onecard.data.tables import read_parquet, read_table

_LINES_LOOKED_AT = 2000
_BOOKS = (".epub", ".docx", ".pdf")
_WEB_PAGES = (".html", ".htm", ".xhtml")


def read_file(path: Path, *, encoding_name: str = "auto", split: str = "auto") -> Iterator[Item]:
    """Read one file of a known format. Damage is a Rejection, never an exception."""
    kind = sources.file_format(path)
    if kind == ".zip":
        yield from _guarded(str(path), _read_archive(path, encoding_name, split))
        return
    opener = functools.partial(sources.open_bytes, path)
    yield from _read_opened(str(path), kind, opener, encoding_name, split)


def _read_archive(path: Path, encoding_name: str, split: str) -> Iterator[Item]:
    for member in members(path):
        file = f"{path}/{member.name}"
        if member.fault:
            yield Rejection(member.fault, file, 0, "")
            continue
        kind = sources.file_format(Path(member.name))
        yield from _read_opened(file, None if kind == ".zip" else kind, member.open, encoding_name, split)


def _read_opened(file: str, kind: str | None, open_bytes: OpenBytes, encoding_name: str, split: str) -> Iterator[Item]:
    if kind is None:
        yield Rejection("unsupported_file", file, 0, "")
        return
    if kind == ".parquet":
        yield from _guarded(file, read_parquet(file, open_bytes))
        return
    if kind in _BOOKS:
        yield from _guarded(file, _in_parts(read_book(file, kind, open_bytes), split))
        return
    try:
        if kind in _WEB_PAGES and encoding_name == "auto":
            text_format = _page_format(open_bytes)
        else:
            text_format = encoding.inspect(open_bytes, encoding_name)
    except encoding.NotText as fault:
        yield Rejection(fault.reason, file, 0, "")
        return
    except _damage() as fault:
        yield Rejection("damaged_file", file, 0, str(fault))
        return
    lines = functools.partial(encoding.read_lines, open_bytes, text_format, LONGEST_ROW_CHARACTERS)
    yield from _guarded(file, _read_text_format(kind, file, open_bytes, lines, text_format, split))


def _read_text_format(
    kind: str, file: str, open_bytes: OpenBytes, lines: Lines, text_format: TextFormat, split: str
) -> Iterator[Item]:
    match kind:
        case ".txt" | ".md":
            pieces = functools.partial(encoding.read_lines, open_bytes, text_format, LONGEST_TEXT_CHARACTERS)
            return _read_text(file, pieces, text_format, split)
        case ".jsonl":
            return read_json_lines(file, lines)
        case ".json":
            return read_json(file, lines)
        case ".csv" | ".tsv":
            return read_table(file, lines, kind)
        case ".yml" | ".yaml":
            return _read_yaml(file, lines)
        case _:
            return _in_parts(iter([Row({"text": html_text(lines())}, file, 1)]), split)


def _page_format(open_bytes: OpenBytes) -> TextFormat:
    """UTF-8 is known by itself; of anything else a page tells more than its bytes, if they bear it out."""
    stated = stated_encoding(open_bytes)
    try:
        found = encoding.inspect(open_bytes)
    except encoding.NotText:
        if stated == "auto":
            raise
        return encoding.inspect(open_bytes, stated)
    if stated == "auto" or found.encoding.startswith("utf"):
        return found
    said = encoding.inspect(open_bytes, stated)
    return found if said.damaged_places else said


def _damage() -> tuple[type[BaseException], ...]:
    """What reading a damaged compressed file raises. OSError is both BadGzipFile and a disk that cannot be read."""
    import lzma
    import zipfile
    import zlib

    import zstandard

    return (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError, zipfile.BadZipFile)


def _guarded(file: str, items: Iterator[Item]) -> Iterator[Item]:
    """A file that breaks off in the middle gives what stood before, then a rejection."""
    try:
        yield from items
    except _damage() as fault:
        yield Rejection("damaged_file", file, 0, str(fault))


# --- text ---------------------------------------------------------------------------------------------------------


def _read_text(file: str, pieces: Lines, text_format: TextFormat, split: str) -> Iterator[Item]:
    """`pieces`: lines, the longest of them in several pieces. A text that grows too long is cut between two of them."""
    if split == "auto":
        split = choose_split(pieces())
        if split == "line":
            console.note(f"{file}: each line is taken as a document (long lines); set split to say otherwise.")
    if split == "file" and text_format.damaged_places:
        console.warn(
            f"{file}: {text_format.damaged_places} places could not be decoded as {text_format.encoding}; "
            "each became U+FFFD."
        )
    yield from _cut(file, pieces(), encoding.line_end(text_format), split)


def _cut(file: str, pieces: Iterable[str], end: str, split: str) -> Iterator[Item]:
    block: list[str] = []
    characters = first = 0
    number, complete = 1, True
    for piece in pieces:
        text = strip_line_end(piece)
        blank = complete and not text.strip(" \t\u3000\0")
        ends = split == "line" or (split == "paragraph" and blank) or characters > LONGEST_TEXT_CHARACTERS
        if block and (ends or not complete):
            yield _text_row(file, first, block, split)
            block, characters = [], 0
        if block or not blank:
            first = first if block else number
            block.append(text)
            characters += len(text) + 1
        complete = piece.endswith(end)
        number += complete
    if block:
        yield _text_row(file, first, block, split)


def _in_parts(rows: Iterator[Item], split: str) -> Iterator[Item]:
    """The rows of a book or page as they are, or their lines or paragraphs, each at the place of the whole."""
    for row in rows:
        if split not in ("line", "paragraph") or not isinstance(row, Row):
            yield row
            continue
        lines = (f"{line}\n" for line in row.values["text"].split("\n"))
        for item in _cut(row.file, lines, "\n", split):
            assert isinstance(item, Row)
            yield Row(item.values, row.file, row.line)


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
        if isinstance(root, yaml.MappingNode) and not is_row(loader.construct_object(root, deep=True)):
            held = {key.value: value for key, value in root.value}
            items = held.get("conversations") or max(
                (value for value in held.values() if isinstance(value, yaml.SequenceNode)),
                key=lambda node: len(node.value),
                default=root,
            )
        if not isinstance(items, yaml.SequenceNode):
            value = loader.construct_object(root, deep=True)
            yield row_of(value, file, 1, str(value)[:2000])
            return
        for node in items.value:
            value = loader.construct_object(node, deep=True)
            line = node.start_mark.line + 1
            if isinstance(value, list):
                value = {"conversations": value}
            yield row_of({"text": value} if isinstance(value, str) else value, file, line, str(value))
    except (yaml.YAMLError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        yield Rejection("bad_yaml", file, 0 if mark is None else mark.line + 1, str(fault))
