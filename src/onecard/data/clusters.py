"""The documents that were repeated most often, for a person to see.

In: the documents of all shards and the verdicts on them. Out: a few clusters with the start of their text.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.data.duplicates import Table, TextReader, Verdicts
from onecard.data.shards import arrays_of, shard_file

_MEMBERS_NAMED = 3
_TEXT_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Cluster:
    """A kept document and those that went because they repeat it; of these the first few, with their similarity."""

    id: str
    text: str
    repeated_by: int
    some: list[tuple[str, float]]


def largest_clusters(table: Table, verdicts: Verdicts, count: int = 10) -> list[Cluster]:
    """The `count` kept documents with most duplicates, the largest first; equal ones in the order of reading."""
    import numpy as np

    kept, sizes = np.unique(verdicts.repeats[verdicts.repeats >= 0], return_counts=True)
    made = []
    with TextReader(table.folder) as texts:
        for place in np.lexsort((kept, -sizes))[:count].tolist():
            document = int(kept[place])
            members = np.flatnonzero(verdicts.repeats == document)[:_MEMBERS_NAMED].tolist()
            # What stands for equal texts is larger than 1.
            some = [(_id(table, member), min(float(verdicts.similarity[member]), 1.0)) for member in members]
            made.append(Cluster(_id(table, document), _start(table, texts, document), int(sizes[place]), some))
    return made


def _id(table: Table, document: int) -> str:
    import numpy as np

    shard = int(np.searchsorted(table.starts, document, side="right")) - 1
    index = document - int(table.starts[shard])
    (ends,) = arrays_of(table.folder, shard, ["id_ends"])
    start = int(ends[index - 1]) if index else 0
    return shard_file(table.folder, shard, "ids").read_bytes()[start : int(ends[index])].decode()


def _start(table: Table, texts: TextReader, document: int) -> str:
    import numpy as np

    shard, offset, length = table.places(np.array([document], dtype=np.int64))[0].tolist()
    return texts.read(shard, offset, length)[:_TEXT_CHARACTERS]
