"""What readers give: a Row for each record, a Rejection for each that could not be read; and the file of rejections."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Lines = Callable[[], Iterator[str]]
"""Opens a file and gives its physical lines, as often as it is called."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its values by key, and where it stands (`line` counted from 1)."""

    values: dict[str, Any]
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """What could not be used: a short reason such as bad_json, where it stands (line 0: the whole file), its text."""

    reason: str
    file: str
    line: int
    text: str


Item = Row | Rejection

_SURROGATES = re.compile("[\ud800-\udfff]")


class RejectionWriter:
    """Writes a file of JSON lines, one for each rejection, that every JSON reader takes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def __enter__(self) -> RejectionWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line; returns the values as written, with U+FFFD for each surrogate in a string."""
        written = {key: encodable(value) if isinstance(value, str) else value for key, value in values.items()}
        self._file.write(json.dumps(written, ensure_ascii=False) + "\n")
        return written


def encodable(text: str) -> str:
    """The text without surrogates, which stand in it for bytes of a file name or for damage, and which no file takes.

    Bytes of a name that the locale cannot express become what they mean in UTF-8, all others U+FFFD.
    """
    try:
        text.encode()
        return text  # hardly any text needs more
    except UnicodeEncodeError:
        pass
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
