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
from onecard.data import contamination, dedup
from onecard.data.rows import encodable
from onecard.data.screening import screen
from onecard.data.split import rank
from onecard.data.steps import Outcome, Steps

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
class Shard:
    """What a worker makes of a batch: documents (parallel lists), rejected rows as JSON, and what the report shows."""

    number: int
    source: int
    name: str
    next_start: tuple[int, int] | None
    ids: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    changes: Counter[str] = field(default_factory=Counter)
    changed_examples: list[tuple[int, str, str, str]] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)

    def keep(self, name: str, text: str, file: str, line: int, position: int, language: str, changed: bool) -> None:
        """Put one document at the end."""
        self.ids.append(name)
        self.texts.append(text.encode())
        self.characters.append(len(text))
        self.files.append(file)
        self.lines.append(line)
        self.positions.append(position)
        self.languages.append(language)
        self.changed.append(changed)

    def show_changes(self, steps: Steps, outcome: Outcome, name: str, text: str, language: str) -> None:
        """Keep an example of what each step did to the next document, of those that have few."""
        few = {step for what in outcome.changes if self.shown[step := what.partition(":")[0]] < EXAMPLES}
        if not few:
            return
        for change in steps.trace(text, language):
            if change.step in few and change.count:
                self.shown[change.step] += 1
                caption = f"{change.step}: {encodable(name)}"
                self.changed_examples.append((len(self.ids), caption, *_differing(change.before, change.after)))

    def reject(self, position: int, row: dict[str, Any]) -> None:
        """Set one item aside."""
        self.rejected.append((position, json.dumps(row, ensure_ascii=False)))
        self.reasons[row["reason"]] += 1
        if len(self.examples[row["reason"]]) < EXAMPLES:
            self.examples[row["reason"]].append(row)


def tidy(folder: Path, settings: bytes, batch: Batch) -> dict[str, Any]:
    """Apply the steps to a batch and write its shard; returns the shard's summary (what its .json holds)."""
    config, steps = _prepared(settings)
    made = Shard(batch.number, batch.source, batch.name, batch.next_start)
    screened = screen(batch.texts)
    for position, (name, text, reason) in enumerate(zip(batch.ids, batch.texts, batch.reasons)):
        file, line = batch.files[position], batch.lines[position]
        if reason:
            made.reject(position, rejected_row(reason, batch.name, file, line, name, "", text))
            continue
        outcome = steps.apply(text, batch.language, screened[position])
        made.changes.update(outcome.changes)
        tidied, verdict = encodable(outcome.text), (outcome.reason, outcome.detail)
        if outcome.reason is None and config.decontaminate:
            shared = contamination.shared_with(folder, tidied)
            verdict = (None, "") if shared is None else ("contaminated", shared)
        if verdict[0] is not None:
            made.reject(position, rejected_row(verdict[0], batch.name, file, line, name, verdict[1], text))
            continue
        made.show_changes(steps, outcome, name, text, batch.language)
        made.keep(encodable(name), tidied, encodable(file), line, position, outcome.language, tidied != text)
    return write(folder, config, made)


def _differing(before: str, after: str) -> tuple[str, str]:
    """Both texts from shortly before the first place that differs."""
    shorter = min(len(before), len(after))
    same = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    start = max(same - _CONTEXT_CHARACTERS, 0)
    return tuple(encodable(text[start : start + _EXCERPT_CHARACTERS]) for text in (before, after))  # type: ignore[return-value]


def write(folder: Path, config: CleanConfig, made: Shard) -> dict[str, Any]:
    """Write the files of a shard; returns its summary."""
    import numpy as np

    languages, files = list(dict.fromkeys(made.languages)), list(dict.fromkeys(made.files))
    ids = [name.encode() for name in made.ids]
    arrays: dict[str, Any] = {
        "ends": np.cumsum([len(text) for text in made.texts], dtype=np.int64),
        "characters": np.array(made.characters, dtype=np.int64),
        "positions": np.array(made.positions, dtype=np.int32),
        "lines": np.array(made.lines, dtype=np.int64),
        "files": _places(made.files, files),
        "languages": _places(made.languages, languages),
        "changed": np.array(made.changed, dtype=bool),
        "digests": dedup.digests(made.texts),
        "ranks": np.array([rank(config.seed, name) for name in ids], dtype=np.uint64),
        "id_ends": np.cumsum([len(name) for name in ids], dtype=np.int64),
        "rejected_positions": np.array([position for position, _ in made.rejected], dtype=np.int32),
    }
    parts = {
        "text": b"".join(made.texts),
        "ids": b"".join(ids),
        "rejected": "".join(f"{line}\n" for _, line in made.rejected).encode(),
    }
    if config.near_duplicates:
        bands = dedup.bands_for(config.near_duplicate_threshold)
        found = dedup.signatures([text.decode() for text in made.texts], bands)
        parts["bands"] = np.ascontiguousarray(found.bands.T).tobytes()
        parts["sketches"] = found.sketches.tobytes()
    for kind, data in parts.items():
        with _replacing(shard_file(folder, made.number, kind)) as path:
            path.write_bytes(data)
    with _replacing(shard_file(folder, made.number, "npz")) as path, path.open("wb") as file:
        np.savez(file, **arrays)
    summary = {
        "number": made.number,
        "source": made.source,
        "name": made.name,
        "documents": len(ids),
        "languages": languages,
        "files": files,
        "rejected": dict(made.reasons),
        "examples": dict(made.examples),
        "changes": dict(made.changes),
        "changed_examples": made.changed_examples,
        "next_start": made.next_start,
    }
    with _replacing(shard_file(folder, made.number, "json")) as path:
        path.write_text(json.dumps(summary, ensure_ascii=False), encoding="utf-8")
    return summary


def _places(values: Sequence[str], distinct: Sequence[str]) -> NDArray[Any]:
    import numpy as np

    places = {value: place for place, value in enumerate(distinct)}
    return np.array([places[value] for value in values], dtype=np.int32)


def read(folder: Path, number: int) -> Shard:
    """A shard as it was written."""
    summary = summary_of(folder, number)
    assert summary is not None
    names = ["ends", "id_ends", "characters", "positions", "lines", "files", "languages", "changed"]
    arrays = [values.tolist() for values in arrays_of(folder, number, [*names, "rejected_positions"])]
    ends, id_ends, characters, positions, lines, files, languages, changed, rejected_positions = arrays
    rejected = shard_file(folder, number, "rejected").read_text(encoding="utf-8").split("\n")[:-1]
    return Shard(
        number,
        summary["source"],
        summary["name"],
        summary["next_start"],
        ids=[name.decode() for name in _cut(shard_file(folder, number, "ids").read_bytes(), id_ends)],
        texts=_cut(shard_file(folder, number, "text").read_bytes(), ends),
        characters=characters,
        files=[summary["files"][place] for place in files],
        lines=lines,
        positions=positions,
        languages=[summary["languages"][place] for place in languages],
        changed=changed,
        rejected=list(zip(rejected_positions, rejected)),
        reasons=Counter(summary["rejected"]),
        examples=defaultdict(list, summary["examples"]),
        changes=Counter(summary["changes"]),
        changed_examples=[tuple(example) for example in summary["changed_examples"]],
    )


def _cut(data: bytes, ends: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in zip([0, *ends], ends)]


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
