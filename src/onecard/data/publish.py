"""The last step of cleaning: shards and verdicts become the files of the corpus, several at once.

In: the working folder and what was decided. Out: documents-*.parquet and rejected-*.jsonl, each made of some shards
after another, in the order of reading; a file that is already there is left as it is.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.data.corpus import DOCUMENTS_PER_FILE
from onecard.data.duplicates import EXACT, Table, TextReader, Verdicts
from onecard.data.shards import EXAMPLES, arrays_of, rejected_row, shard_file, summary_of
from onecard.data.workers import Workers

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_BYTES_PER_FILE = 256 << 20
COLUMNS = ("id", "text", "source", "language", "split")


@dataclass(frozen=True, slots=True)
class Part:
    """One pair of output files: which shards go into it, and the verdicts on their documents, shard by shard.

    `repeats` holds (offset, length) of the id that each duplicate repeats, in the file `ids` of the working folder.
    """

    number: int
    shards: list[int]
    kept: list[NDArray[np.bool_]]
    held_out: list[NDArray[np.bool_]]
    similarity: list[NDArray[np.float32]]
    repeats: list[NDArray[np.int64]]


def publish(
    table: Table, verdicts: Verdicts, held_out: NDArray[np.bool_], workers: Workers
) -> Iterator[dict[str, Any]]:
    """Write the files into the folder `out` of the working folder; for each in order: {"examples": {reason: rows}}."""
    (table.folder / "out").mkdir(exist_ok=True)
    calls = ((table.folder, part) for part in _parts(table, verdicts, held_out))
    yield from workers.map(write_part, calls)


def _parts(table: Table, verdicts: Verdicts, held_out: NDArray[np.bool_]) -> Iterator[Part]:
    import numpy as np

    ids = _join_ids(table)
    kept = verdicts.repeats < 0
    part = _empty_part(0)
    documents = size = 0
    for shard, (start, stop) in enumerate(zip(table.starts, table.starts[1:])):
        here = slice(int(start), int(stop))
        count, length = int(kept[here].sum()), int(table.lengths[here][kept[here]].sum())
        if part.shards and (documents + count > DOCUMENTS_PER_FILE or size + length > _BYTES_PER_FILE):
            yield part
            part, documents, size = _empty_part(part.number + 1), 0, 0
        of = np.maximum(verdicts.repeats[here], 0)
        part.shards.append(shard)
        part.kept.append(kept[here])
        part.held_out.append(held_out[here])
        part.similarity.append(verdicts.similarity[here])
        part.repeats.append(
            np.stack((ids[of], ids[of + 1] - ids[of]), axis=1) if len(of) else np.empty((0, 2), np.int64)
        )
        documents, size = documents + count, size + length
    yield part


def _empty_part(number: int) -> Part:
    return Part(number, [], [], [], [], [])


def _join_ids(table: Table) -> NDArray[np.int64]:
    """Lay the ids of all documents end to end in one file; returns where each begins."""
    import numpy as np

    starts, size = [np.zeros(1, dtype=np.int64)], 0
    with (table.folder / "ids").open("wb") as whole:
        for shard in range(len(table.starts) - 1):
            (ends,) = arrays_of(table.folder, shard, ["id_ends"])
            starts.append(ends + size)
            size += whole.write(shard_file(table.folder, shard, "ids").read_bytes())
    return np.concatenate(starts)


def write_part(folder: Path, part: Part) -> dict[str, Any]:
    """Write one pair of files, whole or not at all; returns the first examples of each kind of duplicate."""
    done = folder / "out" / f"part-{part.number:05d}.json"
    if done.is_file():
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    examples: dict[str, list[dict[str, Any]]] = {}
    documents = folder / "out" / f"documents-{part.number:05d}.parquet"
    rejected = folder / "out" / f"rejected-{part.number:05d}.jsonl"
    if any(kept.any() for kept in part.kept):
        _write_documents(documents, folder, part)
    with rejected.open("w", encoding="utf-8", newline="\n") as lines, TextReader(folder) as texts:
        for at, shard in enumerate(part.shards):
            for line in _rejected_lines(folder, part, at, shard, texts, examples):
                lines.write(line)
    if part.number and not rejected.stat().st_size:
        rejected.unlink()
    temporary = done.with_name(f"{done.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"examples": examples}, ensure_ascii=False), encoding="utf-8")
    temporary.replace(done)
    return {"examples": examples}


def _write_documents(path: Path, folder: Path, part: Part) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    # A file, not its path: the library cannot encode every path that Python can, under a C locale.
    with ExitStack() as files:
        file = files.enter_context(path.open("wb"))
        writer = files.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
        for at, shard in enumerate(part.shards):
            if part.kept[at].any():
                columns = _documents(folder, part, at, shard)
                writer.write_table(pa.Table.from_arrays([_strings(column) for column in columns], schema=schema))


def _documents(folder: Path, part: Part, at: int, shard: int) -> list[list[bytes]]:
    """The columns of the kept documents of one shard."""
    import numpy as np

    summary = summary_of(folder, shard)
    assert summary is not None
    ends, id_ends, languages = arrays_of(folder, shard, ["ends", "id_ends", "languages"])
    kept = np.flatnonzero(part.kept[at]).tolist()
    names = [name.encode() for name in summary["languages"]]
    held_out = part.held_out[at].tolist()
    return [
        _chosen(shard_file(folder, shard, "ids").read_bytes(), id_ends, kept),
        _chosen(shard_file(folder, shard, "text").read_bytes(), ends, kept),
        [summary["name"].encode()] * len(kept),
        [names[language] for language in languages[kept].tolist()],
        [b"held_out" if held_out[document] else b"train" for document in kept],
    ]


def _chosen(data: bytes, ends: NDArray[np.int64], places: list[int]) -> list[bytes]:
    bounds = [0, *ends.tolist()]
    return [data[bounds[place] : bounds[place + 1]] for place in places]


def _strings(values: list[bytes]) -> pa.Array:
    """From memory as it lies: what makes arrays of Python objects would import pandas where there is one."""
    import numpy as np
    import pyarrow as pa

    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(values)))


def _rejected_lines(
    folder: Path, part: Part, at: int, shard: int, texts: TextReader, examples: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """The shard's rejected rows and its duplicates, in the order of reading."""
    import numpy as np

    names = ["rejected_positions", "positions", "ends", "id_ends", "lines", "files"]
    before, positions, ends, id_ends, line_of, file_of = arrays_of(folder, shard, names)
    written = shard_file(folder, shard, "rejected").read_text(encoding="utf-8").split("\n")
    duplicates = np.flatnonzero(~part.kept[at])
    if not len(duplicates):
        yield from (f"{line}\n" for line in written[:-1])
        return
    summary = summary_of(folder, shard)
    assert summary is not None
    ids = shard_file(folder, shard, "ids").read_bytes()
    found: list[tuple[int, str]] = list(zip(before.tolist(), written))
    others = os.open(folder / "ids", os.O_RDONLY)
    try:
        for index in duplicates.tolist():
            offset, length = part.repeats[at][index].tolist()
            other = os.pread(others, length, offset).decode()
            similarity = float(part.similarity[at][index])
            reason, detail = "exact_duplicate", other
            if similarity != EXACT:
                reason, detail = "near_duplicate", f"{other} (similarity {similarity:.3f})"
            start, id_start = (int(values[index - 1]) if index else 0 for values in (ends, id_ends))
            text = texts.read(shard, start, int(ends[index]) - start)
            row = rejected_row(
                reason,
                summary["name"],
                summary["files"][file_of[index]],
                int(line_of[index]),
                ids[id_start : int(id_ends[index])].decode(),
                detail,
                text,
            )
            if len(examples.setdefault(reason, [])) < EXAMPLES:
                examples[reason].append(row)
            found.append((int(positions[index]), json.dumps(row, ensure_ascii=False)))
    finally:
        os.close(others)
    yield from (f"{line}\n" for _, line in sorted(found, key=lambda item: item[0]))


def merged_examples(parts: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """The first examples of each reason, of all shards and parts."""
    made: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for reason, rows in part.items():
            held = made.setdefault(reason, [])
            held += rows[: EXAMPLES - len(held)]
    return made


def languages_of(table: Table) -> tuple[NDArray[np.int64], list[str]]:
    """The language of each document as an index, and the languages."""
    import numpy as np

    names: dict[str, int] = {}
    found = [np.empty(0, dtype=np.int64)]
    for shard in range(len(table.starts) - 1):
        (local,) = arrays_of(table.folder, shard, ["languages"])
        summary = summary_of(table.folder, shard)
        assert summary is not None
        places = np.array([names.setdefault(name, len(names)) for name in summary["languages"]], dtype=np.int64)
        found.append(places[local] if len(local) else np.empty(0, dtype=np.int64))
    return np.concatenate(found), list(names)


def rejected_counts(verdicts: Verdicts) -> Counter[str]:
    """How many duplicates of each kind there are."""
    gone = verdicts.repeats >= 0
    exact = int((verdicts.similarity[gone] == EXACT).sum())
    counts = {"exact_duplicate": exact, "near_duplicate": int(gone.sum()) - exact}
    return Counter({reason: count for reason, count in counts.items() if count})
