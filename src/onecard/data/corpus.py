"""The corpus directory: documents-*.parquet, with the split of each document, read and written as streams.

Columns: id (stable name of the document), text, source, language, split ("train" or "held_out").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onecard import artifact
from onecard.errors import ArtifactError

Split = Literal["train", "held_out"]
DOCUMENTS_PER_FILE = 100_000


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `language` is a code such as zh or en; `id` names it in reports and rejections."""

    id: str
    text: str
    source: str
    language: str
    split: Split = "train"


def write_documents(directory: Path, documents: Iterable[Document]) -> int:
    """Write documents-*.parquet files into an existing directory; returns how many documents. Memory stays bounded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in ("id", "text", "source", "language", "split")])
    written = 0
    batch: list[Document] = []
    batch_characters = 0
    writer = None
    open_files = contextlib.ExitStack()

    def flush() -> None:
        nonlocal batch_characters
        if batch and writer is not None:
            columns = {name: [getattr(item, name) for item in batch] for name in schema.names}
            writer.write_table(pa.table(columns, schema=schema))
        batch.clear()
        batch_characters = 0

    try:
        for document in documents:
            if written % DOCUMENTS_PER_FILE == 0:
                flush()
                if writer is not None:
                    writer.close()
                    open_files.close()
                name = f"documents-{written // DOCUMENTS_PER_FILE:05d}.parquet"
                # A file, not its path: the library cannot encode every path that Python can, under a C locale.
                file = open_files.enter_context((directory / name).open("wb"))
                writer = pq.ParquetWriter(file, schema, compression="zstd")
            batch.append(document)
            batch_characters += len(document.text)
            written += 1
            if len(batch) >= 1000 or batch_characters > 8_000_000:
                flush()
        flush()
    finally:
        if writer is not None:
            writer.close()
        open_files.close()
    return written


def write_corpus(directory: Path, documents: Iterable[Document]) -> None:
    """Write a complete corpus directory with its manifest (what `clean` does, without the cleaning)."""
    with artifact.new_directory(directory) as temporary:
        count = write_documents(temporary, documents)
        artifact.write_manifest(temporary, "corpus", settings={}, result={"read": count, "kept": count, "rejected": {}})


def read_documents(directory: Path, split: Split | None = None) -> Iterator[Document]:
    """Stream the documents of a finished corpus in their order, of one split or all."""
    import pyarrow.parquet as pq

    artifact.read_manifest(directory, "corpus")
    files = sorted(directory.glob("documents-*.parquet"))
    if not files:
        raise ArtifactError(f"The corpus {directory} holds no documents-*.parquet.", "Run `onecard clean` again.")
    for path in files:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    if split is None or row["split"] == split:
                        yield Document(**row)
