"""Paragraphs that an earlier document has are removed, where the settings ask for it.

In: the shards as the steps left them. Out: new shards in a folder of their own. A paragraph is a line of at least 60
bytes (20 Chinese characters); the first document that has it keeps it, and what a document repeats within itself is
left to it. A copy of a whole document stays a copy. What is left too short is rejected as repeated_paragraphs.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.config import CleanConfig
from onecard.data import duplicates, shards
from onecard.data.refinery import Tally
from onecard.data.workers import Workers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SHORTEST_BYTES = 60
# The hashes are compared part by part, so that a sixteenth of them is held in memory.
_PARTS = 16


def without_repeated(config: CleanConfig, folder: Path, tally: Tally, workers: Workers) -> tuple[Path, Tally]:
    """Make the new shards; returns their folder and what their summaries come to."""
    import numpy as np

    made = folder / "paragraphs"
    made.mkdir(exist_ok=True)
    numbers = range(tally.shards)
    lengths = [
        np.array(found, dtype=np.int64)
        for found in workers.map(hash_shard, ((folder, made, number) for number in numbers))
    ]
    dropped = _repeated(made, lengths)
    _as_their_first(folder, tally.shards, lengths, dropped)
    ends = np.cumsum([int(counts.sum()) for counts in lengths])
    settings = pickle.dumps(config)
    calls = (
        (folder, made, number, settings, dropped[end - int(counts.sum()) : end])
        for number, counts, end in zip(numbers, lengths, ends.tolist())
    )
    found = Tally()
    for summary in workers.map(rewrite, calls):
        found.add(summary)
    return made, found


def hash_shard(folder: Path, made: Path, number: int) -> list[int]:
    """Write the hashes of a shard's paragraphs; returns how many each document has."""
    import numpy as np
    import xxhash

    (ends,) = shards.arrays_of(folder, number, ["ends"])
    data = shards.shard_file(folder, number, "text").read_bytes()
    hashes: list[int] = []
    counts: list[int] = []
    for start, end in zip([0, *ends.tolist()], ends.tolist()):
        found = [xxhash.xxh3_64_intdigest(line) for line in _paragraphs(data[start:end])]
        hashes += found
        counts.append(len(found))
    np.array(hashes, dtype=np.uint64).tofile(shards.shard_file(made, number, "hashes"))
    return counts


def _paragraphs(text: bytes) -> list[bytes]:
    return [line for line in map(bytes.strip, text.split(b"\n")) if len(line) >= _SHORTEST_BYTES]


def _repeated(made: Path, lengths: list[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Which of all paragraphs, shard by shard, stand in an earlier document."""
    import numpy as np

    documents = sum(len(counts) for counts in lengths)
    counts = np.concatenate([np.empty(0, dtype=np.int64), *lengths])
    dropped = np.zeros(int(counts.sum()), dtype=bool)
    document_of = np.repeat(np.arange(documents, dtype=np.int32), counts)
    for part in range(_PARTS):
        places, hashes = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.uint64)]
        before = 0
        for number in range(len(lengths)):
            here = np.fromfile(shards.shard_file(made, number, "hashes"), np.uint64)
            chosen = np.flatnonzero(here % np.uint64(_PARTS) == part)
            places.append(chosen + before)
            hashes.append(here[chosen])
            before += len(here)
        place, values = np.concatenate(places), np.concatenate(hashes)
        _, first, back = np.unique(values, return_index=True, return_inverse=True)
        dropped[place] = document_of[place[first[back]]] != document_of[place]
    return dropped


def _as_their_first(folder: Path, count: int, lengths: list[NDArray[np.int64]], dropped: NDArray[np.bool_]) -> None:
    """A copy of a whole document loses what its first loses, and stays its copy."""
    import numpy as np

    starts = np.concatenate(([0], np.cumsum(np.concatenate([np.empty(0, dtype=np.int64), *lengths])))).astype(np.int64)
    repeats = duplicates.exact(duplicates.read_table(folder, count))
    for copy in np.flatnonzero(repeats >= 0).tolist():
        first = int(repeats[copy])
        dropped[starts[copy] : starts[copy + 1]] = dropped[starts[first] : starts[first + 1]]


def rewrite(folder: Path, made: Path, number: int, settings: bytes, dropped: NDArray[np.bool_]) -> dict[str, Any]:
    """Write a shard anew without the paragraphs that are dropped; returns its summary."""
    done = shards.summary_of(made, number)
    if done is not None:
        return done
    config: CleanConfig = pickle.loads(settings)
    before = shards.read(folder, number)
    after = dataclasses.replace(
        before, ids=[], texts=[], characters=[], files=[], lines=[], positions=[], languages=[], changed=[],
        changed_examples=[],
    )  # fmt: skip
    drop = iter(dropped.tolist())
    places: dict[int, int] = {}
    for at, text in enumerate(before.texts):
        lines = text.split(b"\n")
        kept = [line for line in lines if len(line.strip()) < _SHORTEST_BYTES or not next(drop)]
        fewer = len(lines) - len(kept)
        rest = (b"\n".join(kept).strip(b"\n") if fewer else text).decode()
        name, file, line, position = before.ids[at], before.files[at], before.lines[at], before.positions[at]
        if fewer and len(rest) < config.minimum_characters:
            detail = f"{fewer} of {len(lines)} lines stand in earlier documents"
            row = shards.rejected_row("repeated_paragraphs", before.name, file, line, name, detail, text.decode())
            after.reject(position, row)
            continue
        after.changes["repeated_paragraphs"] += fewer
        places[at] = len(after.ids)
        after.keep(name, rest, file, line, position, before.languages[at], before.changed[at] or fewer > 0)
    for at, changed, old, new in before.changed_examples:
        if at in places:
            after.changed_examples.append((places[at], changed, old, new))
    after.rejected.sort(key=lambda pair: pair[0])
    return shards.write(made, config, after)
