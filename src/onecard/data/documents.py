"""Rows become documents: which field holds the text, which rows belong together, and what each document is called.

In: a Source. Out: a stream of RawDocument with text as it was found, and Rejections for rows without text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import console
from onecard.data.fields import TEXT_FIELDS, as_text
from onecard.data.records import Rejection, Row, read_rows, refuse
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
        self._files: dict[str, str] = {}
        self._used: dict[str, int] = {}

    def __call__(self, file: str, part: str) -> str:
        if file not in self._files:
            self._files[file] = name_in_source(self._source, Path(file))
        name = f"{self._files[file]}:{part}"
        count = self._used[name] = self._used.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"


class _FieldFinder:
    """Finds the text in rows; warns of each file that has none, and raises if no file has."""

    def __init__(self, field: str, *, alone: bool) -> None:
        self._field = field
        self._alone = alone
        self._file = ""
        self._rows = 0
        self._found = self._found_before = False
        self._columns: dict[str, None] = {}
        self._first_fault: DataError | None = None

    def text(self, row: Row) -> str | None:
        """The row's text, or None if it has none."""
        if row.file != self._file:
            self._end_file()
            self._file, self._rows, self._found, self._columns = row.file, 0, False, {}
        self._rows += 1
        found = _text_of(row.values, self._field)
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


def _text_of(values: dict[str, Any], field: str) -> str | None:
    if field != "auto":
        return as_text(values.get(field))
    by_name = {str(key).strip().lower(): value for key, value in values.items()}
    return next((text for name in TEXT_FIELDS if (text := as_text(by_name.get(name))) is not None), None)


def read_raw_documents(source: Source, *, strict: bool, reject: Callable[[Rejection], None]) -> Iterator[RawDocument]:
    """Stream the documents of a source; with group_by, rows in sequence with equal keys are joined by line ends.

    Rejections: those of reading, missing_text and missing_group_key. A file without text costs a warning; DataError
    names its fields if no file of the source has text, and those of a file in which a key of group_by never occurs.
    """
    names = _Names(source)
    finder = _FieldFinder(source.field, alone=len(source_files(source)) == 1)
    group: list[tuple[Row, str]] = []
    group_key: tuple[str, list[str]] | None = None
    for row in read_rows(source, strict=strict, reject=reject):
        text = finder.text(row)
        if text is None:
            refuse(Rejection("missing_text", row.file, row.line, str(row.values)), strict=strict, reject=reject)
            continue
        if not source.group_by:
            yield RawDocument(names(row.file, str(row.line)), text, row.file, row.line)
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
            refuse(Rejection("missing_group_key", row.file, row.line, text), strict=strict, reject=reject)
            continue
        key = (row.file, [str(row.values[name]) for name in source.group_by])
        if key != group_key and group:
            yield _joined(group, names(group[0][0].file, "/".join(group_key[1] if group_key else [])))
            group = []
        group_key = key
        group.append((row, text))
    if group and group_key:
        yield _joined(group, names(group[0][0].file, "/".join(group_key[1])))
    finder.finish()


def _joined(group: list[tuple[Row, str]], name: str) -> RawDocument:
    first = group[0][0]
    return RawDocument(name, "\n".join(text for _, text in group), first.file, first.line)
