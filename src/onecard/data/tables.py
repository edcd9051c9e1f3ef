"""Tables: CSV and TSV by the csv module with strings only, Parquet by pyarrow. Each row stands at its physical line."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from onecard.data.encoding import DAMAGED, OpenBytes, strip_line_end
from onecard.data.json_rows import whole_lines
from onecard.data.rows import Item, Lines, Rejection, Row

_LINES_LOOKED_AT = 2000
# What stands between two quotes over several lines; more is a quote that was never closed.
_LONGEST_QUOTED_CHARACTERS = 16_000_000


class _TooLong(Exception):
    """A line that is not read."""


class _Unclosed(Exception):
    """A record over so many lines that a quote must have been left open."""


class _Recorder:
    """Hands lines to the csv module one by one, remembering those of the current record."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = whole_lines(lines)
        self.record: list[str] = []
        self.characters = 0
        self.number = 0

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        self.number = number
        if line is None:
            raise _TooLong
        line = line.replace("\0", "")
        self.record.append(line)
        self.characters += len(line)
        if self.characters > _LONGEST_QUOTED_CHARACTERS and len(self.record) > 1:
            raise _Unclosed
        return line

    def begin(self) -> None:
        """The next line begins a record."""
        self.record.clear()
        self.characters = 0

    def push_back(self) -> None:
        """Take back all lines of the record but its first."""
        rest = self.record[1:]
        first = self.number - len(rest) + 1
        self._lines = itertools.chain(list(enumerate(rest, first)), self._lines)
        self.number = first - 1
        self.begin()


def read_table(file: str, lines: Lines, kind: str) -> Iterator[Item]:
    """Cells stay the strings that they are: null, NA and None are words here, and an empty cell is an empty string."""
    # The module's limit of 128 KiB a cell is global; long documents are ordinary here.
    csv.field_size_limit(sys.maxsize)
    recorder = _Recorder(lines())
    header: list[str] | None = None
    reader = csv.reader(recorder, **_dialect(lines, kind))
    while True:
        first = recorder.number + 1
        recorder.begin()
        unclosed = False
        try:
            cells = next(reader)
        except StopIteration:
            return
        except _TooLong:
            yield Rejection("row_too_long", file, recorder.number, "")
            reader = csv.reader(recorder, **_dialect(lines, kind))
            continue
        except _Unclosed:
            cells, unclosed = [], True
        except csv.Error:
            yield Rejection("bad_csv", file, first, "".join(recorder.record))
            continue
        raw = "".join(recorder.record)
        if unclosed or (len(recorder.record) > 1 and raw.count('"') % 2):
            # Only the end of the file ends such a record: a quote was opened and never closed. Its first line is bad;
            # those that it swallowed are read again.
            yield Rejection("unclosed_quote", file, first, recorder.record[0])
            recorder.push_back()
            reader = csv.reader(recorder, **_dialect(lines, kind))
        elif not cells:
            continue
        elif DAMAGED in raw:
            yield Rejection("undecodable_bytes", file, first, raw.replace(DAMAGED, "\ufffd"))
        elif header is None:
            header = _column_names(cells)
        elif len(cells) != len(header):
            yield Rejection("wrong_number_of_columns", file, first, raw)
        else:
            yield Row(dict(zip(header, cells)), file, first)


def _column_names(cells: list[str]) -> list[str]:
    """The header: empty names are numbered, repeated ones get a number too, so that no column hides another."""
    names: list[str] = []
    for position, cell in enumerate(cells, 1):
        name = cell.strip() or f"column_{position}"
        names.append(name if name not in names else f"{name}_{position}")
    return names


def _dialect(lines: Lines, kind: str) -> dict[str, Any]:
    """Separator: tab in .tsv; in .csv whichever of comma, semicolon and tab the first line has most of.

    Tab-separated files are written with and without CSV quoting. They are read without if every line then has as many
    cells as the first and no cell looks as a CSV writer would have quoted it.
    """
    head: list[str] = []
    for line in lines():
        head.append(strip_line_end(line))
        if len(head) >= _LINES_LOOKED_AT:
            break
    if not head:
        return {}
    if kind == ".csv":
        outside_quotes = re.sub(r'"[^"]*"', "", head[0])
        return {"delimiter": max(",;\t", key=outside_quotes.count)}
    cells = [line.split("\t") for line in head if line]
    even = all(len(row) == len(cells[0]) for row in cells)
    quoted = any(re.fullmatch(r'"(?:[^"]|"")*""(?:[^"]|"")*"', cell) for row in cells for cell in row)
    return {"delimiter": "\t", "quoting": csv.QUOTE_NONE if even and not quoted else csv.QUOTE_MINIMAL}


def read_parquet(file: str, open_bytes: OpenBytes) -> Iterator[Item]:
    """Rows of a Parquet file, batch by batch; `line` is the number of the row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # Opened by Python: the library cannot encode every path under a C locale, nor go back in a compressed stream.
        with open_bytes() as stream:
            direct = isinstance(stream, io.BufferedReader)
            opened = pq.ParquetFile(stream if direct else pa.BufferReader(stream.read()))
            for batch in opened.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, file, number)
    except pa.ArrowException as fault:
        yield Rejection("damaged_file", file, 0, str(fault))
