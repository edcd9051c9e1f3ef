from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onecard.data.tokens import Encoded, TokenStore, smallest_dtype, write_store
from onecard.errors import ArtifactError, DataError


def test_the_type_follows_the_vocabulary() -> None:
    assert smallest_dtype(65_536) == np.uint16
    assert smallest_dtype(65_537) == np.uint32


def test_ids_above_65535_are_read_back(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [Encoded("a", [151_645, 0, 65_536])], vocabulary=151_646, tokenizer_hash="h")
    assert store.meta["dtype"] == "uint32"
    assert TokenStore(tmp_path / "s").tokens.tolist() == [151_645, 0, 65_536]  # in 16 bits 151645 would be 20573


def test_documents_sources_and_masks_are_read_back(tmp_path: Path) -> None:
    documents = [
        Encoded("b", [1, 2, 3], [False, True, True]),
        Encoded("a", [], []),
        Encoded("b", [4], [True]),
    ]
    write_store(tmp_path / "s", documents, vocabulary=300, tokenizer_hash="h", learned=True)
    store = TokenStore(tmp_path / "s")
    assert store.tokens.tolist() == [1, 2, 3, 4]
    assert store.starts.tolist() == [0, 3, 3, 4]
    assert store.lengths().tolist() == [3, 0, 1]
    assert [store.sources[i] for i in store.source_of] == ["b", "a", "b"]
    assert store.learned is not None and store.learned.tolist() == [0, 1, 1, 1]
    assert store.tokens.dtype == np.uint16
    assert store.meta["tokenizer_hash"] == "h"


@pytest.mark.parametrize("ids", [[300], [1, -1]])
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match=f"id {ids[-1]} is outside the vocabulary of 300"):
        write_store(tmp_path / "s", [Encoded("a", ids)], vocabulary=300, tokenizer_hash="h")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_store_can_be_opened(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [], vocabulary=300, tokenizer_hash="h", learned=True)
    assert (store.count, store.sources, store.tokens.tolist()) == (0, [], [])


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "sources.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_store_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write_store(tmp_path / "s", [Encoded("a", [1, 2, 3])], vocabulary=300, tokenizer_hash="h")
    path = tmp_path / "s" / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
        if name == "meta.json":
            path.write_text(json.dumps({"dtype": "uint16"}))
    with pytest.raises(ArtifactError, match=r"tokens\.bin|is incomplete"):
        TokenStore(tmp_path / "s")
