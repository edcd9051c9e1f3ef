"""Shards: some documents after another, tidied by a worker, with all that deciding about them needs, as files on disk.

In: a Batch of documents as they were read. Out: in the working folder, for shard 12: 00000012.text (the texts end to
end), .ids, .bands and .sketches (MinHash), .rejected (JSON lines), .npz (numbers of each document) and last .json,
which says that the shard is whole. The content depends on the batch and the settings alone; other shards are not known.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.config import CleanConfig
from onecard.data import dedup
from onecard.data.rows import encodable
from onecard.data.split import rank
from onecard.data.steps import Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_REJECTED_CHARACTERS = 2000
EXAMPLES = 3
_EXCERPT_CHARACTERS = 2000
_CONTEXT_CHARACTERS = 60


@dataclass(slots=True)
class Batch:
    """Documents of one source in the order of reading; an item with a reason is a row that could not be read.

    `next_start`: (source, file) at whose beginning the next batch begins, if it begins at the beginning of a file.
    """

    number: int
    source: int
    name: str
    language: str
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    characters: int = 0
    next_start: tuple[int, int] | None = None

    def add(self, name: str, text: str, file: str, line: int, reason: str = "") -> None:
        """Put one item at the end."""
        self.ids.append(name)
        self.texts.append(text)
        self.files.append(self.files[-1] if self.files and self.files[-1] == file else file)
        self.lines.append(line)
        self.reasons.append(reason)
        self.characters += len(text)


def shard_file(folder: Path, number: int, kind: str) -> Path:
    """Where a part of a shard lies."""
    return folder / f"{number:08d}.{kind}"


def rejected_row(
    reason: str, source: str, file: str, line: int, name: str, detail: str, text: str
) -> dict[str, str | int]:
    """One line of rejected-*.jsonl."""
    return {
        "reason": reason,
        "source": source,
        "file": encodable(file),
        "line": line,
        "id": encodable(name),
        "detail": encodable(detail),
        "text": encodable(text[:LONGEST_REJECTED_CHARACTERS]),
    }


@functools.lru_cache(maxsize=1)
def _prepared(settings: bytes) -> tuple[CleanConfig, Steps]:
    config: CleanConfig = pickle.loads(settings)
    return config, Steps(config)


@dataclass
class _Made:
    """What a worker gathers of a batch."""

    encoded: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    rejected_positions: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    changes: Counter[str] = field(default_factory=Counter)
    changed: list[bool] = field(default_factory=list)
    changed_examples: list[tuple[int, str, str, str]] = field(default_factory=list)

    def reject(self, position: int, row: dict[str, Any]) -> None:
        """Set one item aside."""
        self.rejected.append(json.dumps(row, ensure_ascii=False))
        self.rejected_positions.append(position)
        self.reasons[row["reason"]] += 1
        if len(self.examples[row["reason"]]) < EXAMPLES:
            self.examples[row["reason"]].append(row)


def tidy(folder: Path, settings: bytes, batch: Batch) -> dict[str, Any]:
    """Apply the steps to a batch and write its shard; returns the shard's summary (what its .json holds)."""
    config, steps = _prepared(settings)
    made = _Made()
    for position, (name, text, reason) in enumerate(zip(batch.ids, batch.texts, batch.reasons)):
        file, line = batch.files[position], batch.lines[position]
        if reason:
            made.reject(position, rejected_row(reason, batch.name, file, line, name, "", text))
            continue
        outcome = steps.apply(text, batch.language)
        made.changes.update(outcome.changes)
        if outcome.reason is not None:
            row = rejected_row(outcome.reason, batch.name, file, line, name, outcome.detail, text)
            made.reject(position, row)
            continue
        tidied = encodable(outcome.text)
        made.texts.append(tidied)
        made.encoded.append(tidied.encode())
        made.positions.append(position)
        made.languages.append(outcome.language)
        made.changed.append(tidied != text)
        if tidied != text and len(made.changed_examples) < EXAMPLES:
            made.changed_examples.append((len(made.texts) - 1, name, *_differing(text, tidied)))
    return _write(folder, config, batch, made)


def _differing(before: str, after: str) -> tuple[str, str]:
    """Both texts from shortly before the first place that differs."""
    shorter = min(len(before), len(after))
    same = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    start = max(same - _CONTEXT_CHARACTERS, 0)
    return tuple(encodable(text[start : start + _EXCERPT_CHARACTERS]) for text in (before, after))  # type: ignore[return-value]


def _write(folder: Path, config: CleanConfig, batch: Batch, made: _Made) -> dict[str, Any]:
    import numpy as np

    languages = sorted(set(made.languages))
    files = list(dict.fromkeys(batch.files))
    places = {file: place for place, file in enumerate(files)}
    ids = [encodable(batch.ids[position]).encode() for position in made.positions]
    arrays: dict[str, Any] = {
        "ends": np.cumsum([len(text) for text in made.encoded], dtype=np.int64),
        "characters": np.array([len(text) for text in made.texts], dtype=np.int64),
        "positions": np.array(made.positions, dtype=np.int32),
        "lines": np.array([batch.lines[position] for position in made.positions], dtype=np.int64),
        "files": np.array([places[batch.files[position]] for position in made.positions], dtype=np.int32),
        "languages": np.array([languages.index(name) for name in made.languages], dtype=np.uint16),
        "changed": np.array(made.changed, dtype=bool),
        "digests": dedup.digests(made.encoded),
        "ranks": np.array([rank(config.seed, name) for name in ids], dtype=np.uint64),
        "id_ends": np.cumsum([len(name) for name in ids], dtype=np.int64),
        "rejected_positions": np.array(made.rejected_positions, dtype=np.int32),
    }
    parts = {
        "text": b"".join(made.encoded),
        "ids": b"".join(ids),
        "rejected": "".join(line + "\n" for line in made.rejected).encode(),
    }
    if config.near_duplicates:
        found = dedup.signatures(made.texts, dedup.bands_for(config.near_duplicate_threshold))
        parts["bands"] = np.ascontiguousarray(found.bands.T).tobytes()
        parts["sketches"] = found.sketches.tobytes()
    for kind, data in parts.items():
        with _replacing(shard_file(folder, batch.number, kind)) as path:
            path.write_bytes(data)
    with _replacing(shard_file(folder, batch.number, "npz")) as path, path.open("wb") as file:
        np.savez(file, **arrays)
    summary = {
        "number": batch.number,
        "source": batch.source,
        "name": batch.name,
        "documents": len(made.texts),
        "languages": languages,
        "files": [encodable(file) for file in files],
        "rejected": dict(made.reasons),
        "examples": dict(made.examples),
        "changes": dict(made.changes),
        "changed_examples": made.changed_examples,
        "next_start": batch.next_start,
    }
    with _replacing(shard_file(folder, batch.number, "json")) as path:
        path.write_text(json.dumps(summary, ensure_ascii=False), encoding="utf-8")
    return summary


class _replacing:  # noqa: N801 (a context manager)
    """A path to write to, renamed to its own name at the end: a file is whole or not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._temporary.replace(self._path)


def summary_of(folder: Path, number: int) -> dict[str, Any] | None:
    """The summary of a shard, or None if it is not whole."""
    try:
        found: dict[str, Any] = json.loads(shard_file(folder, number, "json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def arrays_of(folder: Path, number: int, names: Sequence[str]) -> list[NDArray[Any]]:
    """Some of a shard's arrays (see `_write`)."""
    import numpy as np

    with np.load(shard_file(folder, number, "npz")) as opened:
        return [opened[name] for name in names]
