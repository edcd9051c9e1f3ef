"""Rows under the names that onecard knows: columns, keys of messages and roles, renamed as a source says.

In: the rows of a source and its `columns`, `message_keys` and `roles`. Out: rows that hold what is named there, and
nothing else. Knows nothing of what rows mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecard.data.rows import Row
from onecard.data.sources import file_format
from onecard.errors import DataError
from onecard.settings import Source, nearest

# Files whose rows all have the same columns: one row tells whether a column is there.
_TABLES = (".csv", ".tsv", ".parquet")
_COLUMNS_SHOWN = 30


# What holds no messages, whatever it looks like: a tool has a "type" of its own, an answer may be JSON.
_NO_MESSAGES = ("tools", "functions", "system", "instruction", "input", "output", "text", "question", "answer")


class Renaming:
    """The renaming of one source, row by row; it knows which of the columns it has met."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._keys = {theirs: ours for ours, theirs in source.message_keys.items()}
        self._roles = {
            theirs.lower(): ours
            for ours, names in source.roles.items()
            for theirs in ([names] if isinstance(names, str) else names)
        }
        self._unmet = set(source.columns.values())
        self._seen: dict[str, None] = {}
        self._file = ""

    def renamed(self, row: Row) -> Row:
        """The row as the source means it; DataError for a table that lacks a column."""
        columns, values = self._source.columns, row.values
        if self._unmet:
            self._seen.update(dict.fromkeys(map(str, values)))
            self._unmet -= values.keys()
        if columns:
            if row.file != self._file:
                self._file = row.file
                if file_format(Path(row.file)) in _TABLES:
                    self._refuse([name for name in columns.values() if name not in values], list(values), row.file)
            values = {ours: values[theirs] for ours, theirs in columns.items() if theirs in values}
        if self._keys or self._roles:
            values = {key: value if key in _NO_MESSAGES else self._messages(value) for key, value in values.items()}
        return Row(values, row.file, row.line)

    def finish(self) -> None:
        """DataError for a column that no row of the source had."""
        if self._seen:
            self._refuse(sorted(self._unmet), list(self._seen), self._file)

    def _refuse(self, missing: list[str], found: list[str], file: str) -> None:
        if not missing:
            return
        name = missing[0]
        ours = next(key for key, theirs in self._source.columns.items() if theirs == name)
        more = f", and {len(found) - _COLUMNS_SHOWN} more" if len(found) > _COLUMNS_SHOWN else ""
        raise DataError(
            f"there is no column {name}, which columns of the source {self._source.label} takes for {ours}; "
            f"its columns are: {', '.join(found[:_COLUMNS_SHOWN])}{more}.",
            nearest(name, found).strip() or "Correct columns of the source, or leave that name out.",
            file=file or None,
        )

    def _messages(self, value: Any) -> Any:
        """A message or a list of them (in a table also as JSON) with the usual keys and roles; other values as are."""
        if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
            try:
                value = json.loads(value)
            except ValueError:
                return value
        if isinstance(value, list):
            return [self._message(item) if isinstance(item, dict) else item for item in value]
        return self._message(value) if isinstance(value, dict) else value

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        made = {self._keys.get(key, key): value for key, value in message.items()}
        for key in ("role", "from"):
            if isinstance(made.get(key), str):
                made[key] = self._roles.get(made[key].strip().lower(), made[key])
        return made
