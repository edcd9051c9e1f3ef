"""Rows become documents: which field holds the text, which rows belong together, and what each document is called.

In: a Source. Out: a stream of RawDocument with text as it was found, and Rejections for rows without text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import console
from onecard.data import cutting
from onecard.data.fields import TEXT_FIELDS, as_text
from onecard.data.records import Rejection, Row, read_items, refuse
from onecard.data.sources import name_in_source, source_files
from onecard.errors import DataError
from onecard.settings import Source

_ROWS_BEFORE_GIVING_UP = 100


@dataclass(frozen=True, slots=True)
class RawDocument:
    """One document before cleaning; `line` is that of its first row."""

    id: str
    text: str
    file: str
    line: int


class _Names:
    """Gives each document of a source a name that no other has: file, line, and a count where a line holds several."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._file = self._prefix = ""
        self._used: dict[str, int] = {}

    def __call__(self, file: str, part: str) -> str:
        if file != self._file:
            self._file, self._prefix = file, name_in_source(self._source, Path(file))
            self._used.clear()
        if not self._source.group_by and part not in self._used:
            self._used.clear()  # lines come one after another; the keys of group_by may come back
        count = self._used[part] = self._used.get(part, 0) + 1
        name = f"{self._prefix}:{part}"
        return name if count == 1 else f"{name}.{count}"


class _FieldFinder:
    """Finds the text in rows; warns of each file that has none, and raises if no file has."""

    def __init__(self, field: str, *, alone: bool, found_before: bool) -> None:
        self._field = field
        self._alone = alone
        self._file = ""
        self._rows = 0
        self._found = False
        self._found_before = found_before
        self._columns: dict[str, None] = {}
        self._first_fault: DataError | None = None

    def text(self, row: Row) -> str | None:
        """The row's text, or None if it has none."""
        if row.file != self._file:
            self._end_file()
            self._file, self._rows, self._found, self._columns = row.file, 0, False, {}
        self._rows += 1
        found = text_of(row.values, self._field)
        if found is not None:
            self._found = self._found_before = True
        elif not self._found and self._rows <= _ROWS_BEFORE_GIVING_UP:
            self._columns.update(dict.fromkeys(map(str, row.values)))
            if self._alone and self._rows == _ROWS_BEFORE_GIVING_UP:
                self.finish()
        return found

    def finish(self) -> None:
        """DataError if there were rows, and text in none of them."""
        self._end_file()
        if self._first_fault is not None and not self._found_before:
            raise self._first_fault

    def _end_file(self) -> None:
        if not self._rows or self._found:
            return
        wanted = "a field with the text" if self._field == "auto" else f"the field {self._field}"
        columns = ", ".join(list(self._columns)[:20]) or "none"
        fault = DataError(
            f"{wanted} was not found; the fields are: {columns}.",
            "Name the one that holds the text: field = ... of the source in a recipe.",
            file=self._file,
        )
        if not self._alone:
            console.warn(f"{fault.what} Its {self._rows:,} rows are set aside as missing_text.")
        self._first_fault = self._first_fault or fault


def text_of(values: dict[str, Any], field: str) -> str | None:
    if field != "auto":
        return as_text(values.get(field))
    by_name = {str(key).strip().lower(): value for key, value in values.items()}
    return next((text for name in TEXT_FIELDS if (text := as_text(by_name.get(name))) is not None), None)


def read_raw_documents(source: Source, *, strict: bool, reject: Callable[[Rejection], None]) -> Iterator[RawDocument]:
    """The documents of `read_raw_items`; rejections go to `reject` or, with `strict`, end the work as DataError."""
    for item in read_raw_items(source):
        if isinstance(item, RawDocument):
            yield item
        else:
            refuse(item, strict=strict, reject=reject)


def read_raw_items(source: Source, *, first_file: int = 0) -> Iterator[RawDocument | Rejection]:
    """Stream the documents of a source, and what could not become one; from one of its files on.

    With group_by, rows in sequence with equal keys are joined by line ends. A text of more than a million characters
    becomes several documents. Rejections: those of reading, missing_text and missing_group_key. A file without text
    costs a warning; DataError names its fields if no file of the source has text, and those of a file in which a key of
    group_by never occurs.
    """
    names = _Names(source)
    finder = _FieldFinder(source.field, alone=len(source_files(source)) == 1, found_before=first_file > 0)
    group: list[tuple[Row, str]] = []
    group_key: tuple[str, list[str]] | None = None
    size = 0
    for row in read_items(source, first_file=first_file):
        if not isinstance(row, Row):
            yield row
            continue
        text = finder.text(row)
        if text is None:
            yield Rejection("missing_text", row.file, row.line, str(row.values)[: cutting.LONGEST_TEXT_CHARACTERS])
            continue
        if not source.group_by:
            for piece in cutting.pieces(text):
                yield RawDocument(names(row.file, str(row.line)), piece, row.file, row.line)
            continue
        missing = [key for key in source.group_by if row.values.get(key) is None]
        if missing and group_key is None:
            raise DataError(
                f"group_by names {missing[0]}, which the row does not have; its fields are: {', '.join(row.values)}.",
                "Correct group_by of the source.",
                file=row.file,
                line=row.line,
            )
        if missing:
            yield Rejection("missing_group_key", row.file, row.line, text)
            continue
        key = (row.file, [str(row.values[name]) for name in source.group_by])
        if group and (key != group_key or size > cutting.LONGEST_TEXT_CHARACTERS):
            yield from _joined(group, group_key, names)
            group, size = [], 0
        group_key = key
        group.append((row, text))
        size += len(text)
    yield from _joined(group, group_key, names)
    finder.finish()


def _joined(
    group: list[tuple[Row, str]], key: tuple[str, list[str]] | None, names: Callable[[str, str], str]
) -> Iterator[RawDocument]:
    if group and key is not None:
        first = group[0][0]
        for piece in cutting.pieces("\n".join(text for _, text in group)):
            yield RawDocument(names(first.file, "/".join(key[1])), piece, first.file, first.line)
