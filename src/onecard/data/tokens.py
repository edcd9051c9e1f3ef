"""The token store: documents as ids in one memory-mapped file, so that any position is reached at once.

tokens.bin     all ids, one after another, in the smallest unsigned type that holds the largest id of the vocabulary
documents.npy  int64, documents + 1: where each document begins (and the end of the last)
sources.npy    uint16, documents: index into meta.json's source names
learned.bin    uint8, beside tokens.bin, only for chats: 1 where the token is learned
values.npy     float64, documents x columns, only where an objective wants numbers of each document
meta.json      dtype, count, documents, sources, tokenizer hash
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard import artifact
from onecard.errors import ArtifactError, DataError


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document: its ids, the name of its source, and (for chats) which tokens are learned."""

    source: str
    ids: Sequence[int] | NDArray[np.integer[Any]]
    learned: list[bool] | None = None


def smallest_dtype(vocabulary: int) -> np.dtype[Any]:
    """uint16 up to 65,536 entries, else uint32."""
    return np.dtype(np.uint16) if vocabulary <= 1 << 16 else np.dtype(np.uint32)


def write_store(
    directory: Path, documents: Iterable[Encoded], *, vocabulary: int, tokenizer_hash: str, learned: bool = False
) -> TokenStore:
    """Write a store (whole or not at all) and open it; DataError if there is no document or an id is out of range."""
    dtype = smallest_dtype(vocabulary)
    starts, sources, names = [0], [], dict[str, int]()
    with artifact.new_directory(directory, replace=True) as temporary:
        with ExitStack() as files:
            token_file = files.enter_context((temporary / "tokens.bin").open("wb"))
            mask_file = files.enter_context((temporary / "learned.bin").open("wb")) if learned else None
            for document in documents:
                ids = np.asarray(document.ids, dtype=np.int64)
                if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
                    bad = ids.min() if ids.min() < 0 else ids.max()
                    raise DataError(
                        f"A token id {bad} is outside the vocabulary of {vocabulary}.",
                        "Use the tokenizer that belongs to the model.",
                    )
                token_file.write(ids.astype(dtype).tobytes())
                if mask_file is not None:
                    assert document.learned is not None and len(document.learned) == len(document.ids)
                    mask_file.write(np.asarray(document.learned, dtype=np.uint8).tobytes())
                starts.append(starts[-1] + ids.size)
                sources.append(names.setdefault(document.source, len(names)))
        np.save(temporary / "documents.npy", np.asarray(starts, dtype=np.int64))
        np.save(temporary / "sources.npy", np.asarray(sources, dtype=np.uint16))
        meta = {
            "dtype": dtype.name,
            "count": starts[-1],
            "documents": len(sources),
            "sources": list(names),
            "vocabulary": vocabulary,
            "tokenizer_hash": tokenizer_hash,
        }
        artifact.write_json_atomically(temporary / "meta.json", meta)
    return TokenStore(directory)


class TokenStore:
    """A store opened by memory map."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.meta: dict[str, Any] = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
            self.starts: NDArray[np.int64] = np.load(directory / "documents.npy")
            self.source_of: NDArray[np.uint16] = np.load(directory / "sources.npy")
            self.sources: list[str] = self.meta["sources"]
            self.count = int(self.meta["count"])
        except (OSError, ValueError, KeyError, TypeError, EOFError) as fault:
            raise ArtifactError(
                f"The token store {directory} is incomplete ({fault}).", "Delete it; it is made again."
            ) from fault
        self.tokens = self._map("tokens.bin", np.dtype(self.meta["dtype"]))
        masked = (directory / "learned.bin").exists()
        self.learned = self._map("learned.bin", np.dtype(np.uint8)) if masked else None
        self.values: NDArray[np.float64] | None = None
        if (directory / "values.npy").exists():
            self.values = np.load(directory / "values.npy")

    def write_values(self, values: NDArray[np.float64]) -> None:
        """Keep numbers of each document beside it (documents x columns), in place of those there were."""
        assert len(values) == len(self.source_of)
        made = io.BytesIO()
        np.save(made, values)
        artifact.write_bytes_atomically(self.directory / "values.npy", made.getvalue())
        self.values = values

    def _map(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self.directory / name
        if not path.is_file() or path.stat().st_size != self.count * dtype.itemsize:
            raise ArtifactError(
                f"{path} does not have the length that meta.json says.", "Delete the store; it is made again."
            )
        return np.memmap(path, dtype=dtype, mode="r") if self.count else np.empty(0, dtype)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.starts)
