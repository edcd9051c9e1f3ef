"""Tables: CSV and TSV by the csv module with strings only, Parquet by pyarrow. Each row stands at its physical line."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecard.data import sources
from onecard.data.encoding import DAMAGED, strip_line_end
from onecard.data.rows import Item, Lines, Rejection, Row

_LINES_LOOKED_AT = 2000


class _Recorder:
    """Hands lines to the csv module one by one, remembering those of the current record."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.record: list[str] = []
        self.number = 0

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> str:
        line = next(self._lines).replace("\0", "")
        self.number += 1
        self.record.append(line)
        return line

    def push_back(self) -> None:
        """Take back all lines of the record but its first."""
        rest, self.record = self.record[1:], []
        self.number -= len(rest)
        before = self._lines
        self._lines = iter([*rest, *before])


def read_table(file: str, lines: Lines, kind: str) -> Iterator[Item]:
    """Cells stay the strings that they are: null, NA and None are words here, and an empty cell is an empty string."""
    # The module's limit of 128 KiB a cell is global; long documents are ordinary here.
    csv.field_size_limit(sys.maxsize)
    recorder = _Recorder(lines())
    header: list[str] | None = None
    reader = csv.reader(recorder, **_dialect(lines, kind))
    while True:
        first = recorder.number + 1
        recorder.record.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield Rejection("bad_csv", file, first, "".join(recorder.record))
            continue
        raw = "".join(recorder.record)
        if len(recorder.record) > 1 and raw.count('"') % 2:
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


def read_parquet(path: Path) -> Iterator[Item]:
    """Rows of a Parquet file, batch by batch; `line` is the number of the row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # Opened by Python: the library cannot encode every path under a C locale, nor go back in a compressed stream.
        compressed = path.suffix.lower() != ".parquet"
        with sources.open_bytes(path) as stream:
            file = pq.ParquetFile(pa.BufferReader(stream.read()) if compressed else stream)
            for batch in file.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, str(path), number)
    except pa.ArrowException as fault:
        yield Rejection("damaged_file", str(path), 0, str(fault))
