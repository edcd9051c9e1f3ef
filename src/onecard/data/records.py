"""Rows from any source: formats.py file by file, with bad rows handed aside or, in strict mode, stopping the work.

In: a Source. Out: a stream of Row, and each Rejection to the caller's function. Knows nothing of what rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onecard.data.columns import Renaming
from onecard.data.formats import read_file
from onecard.data.rows import Item, Rejection, Row
from onecard.data.sources import source_files, unreadable_files
from onecard.errors import DataError
from onecard.settings import Source

__all__ = ["Rejection", "Row", "read_items", "read_rows", "refuse", "source_files"]

_MEANINGS = {
    "unsupported_file": "no reader for this kind of file",
    "unreadable_file": "a link that leads nowhere, or a file without permission to read",
    "binary_file": "not text",
    "unknown_encoding": "the encoding was not recognised",
    "undecodable_bytes": "bytes that do not belong to the file's encoding",
    "damaged_file": "the file is damaged or breaks off",
    "bad_json": "not valid JSON",
    "not_an_object": "the row is not a JSON object",
    "bad_csv": "not valid CSV",
    "unclosed_quote": "a quote is opened and never closed",
    "wrong_number_of_columns": "more or fewer cells than the first line has",
    "bad_yaml": "not valid YAML",
    "empty_file": "the file is empty",
    "row_too_long": "one line of more than 128 million characters",
    "encrypted_file": "the file is encrypted",
    "no_text_in_file": "the pages hold no text (pictures of pages?)",
}


def read_items(source: Source, *, first_file: int = 0) -> Iterator[Item]:
    """Stream the rows and rejections of a source in the order of its files and lines, from one of its files on.

    Rows have the names that the source gives their columns. DataError if there is nothing at the source's path, or for
    a column that is not there.
    """
    renaming = Renaming(source) if source.columns or source.message_keys or source.roles else None
    if not first_file:
        for file in unreadable_files(source):
            yield Rejection("unreadable_file", str(file), 0, "")
    for file in source_files(source)[first_file:]:
        for item in read_file(file, encoding_name=source.encoding, split=source.split):
            yield renaming.renamed(item) if renaming is not None and isinstance(item, Row) else item
    if renaming is not None and not first_file:
        renaming.finish()


def read_rows(source: Source, *, strict: bool, reject: Callable[[Rejection], None]) -> Iterator[Row]:
    """The rows of `read_items`.

    What cannot be read goes to `reject`; with `strict` the first such row raises DataError with file and line.
    """
    for item in read_items(source):
        if isinstance(item, Row):
            yield item
        else:
            refuse(item, strict=strict, reject=reject)


def refuse(rejection: Rejection, *, strict: bool, reject: Callable[[Rejection], None]) -> None:
    """Hand a rejection aside, or raise it as DataError in strict mode."""
    if strict:
        meaning = _MEANINGS.get(rejection.reason, rejection.reason.replace("_", " "))
        raise DataError(
            f"{meaning} ({rejection.reason}).",
            "Mend that row, or run without --strict to keep bad rows aside.",
            file=rejection.file,
            line=rejection.line or None,
        )
    reject(rejection)
