"""What readers give: a Row for each record, a Rejection for each that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
