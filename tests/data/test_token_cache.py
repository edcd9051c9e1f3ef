"""Stores are kept for the next run of the same key, and for no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onecard.data import token_cache
from onecard.data.tokens import Encoded, TokenStore, write_store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def store(folder: Path, ids: list[int]) -> Path:
    write_store(folder, [Encoded("s", ids, [True] * len(ids))], vocabulary=300, tokenizer_hash="", learned=True)
    return folder


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ONECARD_TOKEN_CACHE")
    assert token_cache.folder() == tmp_path / "onecard" / "tokens"
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", "/big/disk")
    assert token_cache.folder() == Path("/big/disk")
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", "none")
    assert token_cache.folder() is None


def test_what_is_kept_comes_back_with_its_facts(cache: Path, tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", [1, 2, 3]), store(tmp_path / "b", [4])
    (a / "values.npy").write_bytes(b"of the run")
    assert token_cache.fetch("key", {"train": tmp_path / "c"}) is None
    token_cache.keep("key", {"train": a, "held_out": b}, {"read": 4})
    assert token_cache.fetch("other", {"train": tmp_path / "c"}) is None
    assert token_cache.fetch("key", {"train": tmp_path / "c", "held_out": tmp_path / "d"}) == {"read": 4}
    found = TokenStore(tmp_path / "c")
    assert found.tokens.tolist() == [1, 2, 3]
    assert found.learned is not None
    assert TokenStore(tmp_path / "d").tokens.tolist() == [4]
    assert not (tmp_path / "c" / "values.npy").exists()
    # On one disk the bytes are there once.
    assert (tmp_path / "c" / "tokens.bin").stat().st_ino == (a / "tokens.bin").stat().st_ino


def test_a_damaged_entry_is_not_used(cache: Path, tmp_path: Path) -> None:
    token_cache.keep("key", {"train": store(tmp_path / "a", [1])}, {})
    (cache / "key" / "facts.json").write_text("{")
    assert token_cache.fetch("key", {"train": tmp_path / "c"}) is None


def test_what_was_used_longest_ago_makes_room(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(
        path.stat().st_size for path in store(tmp_path / "a", [1] * 100).iterdir() if path.name != "onecard.json"
    )
    monkeypatch.setattr(token_cache, "MOST_BYTES", int(2.5 * size))
    for number, key in enumerate(("one", "two")):
        token_cache.keep(key, {"train": tmp_path / "a"}, {})
        os.utime(cache / key, (number, number))
    assert token_cache.fetch("one", {"train": tmp_path / "c"}) == {}  # used: now the newest
    token_cache.keep("three", {"train": tmp_path / "a"}, {})
    assert sorted(path.name for path in cache.iterdir()) == ["one", "three"]
    monkeypatch.setattr(token_cache, "MOST_BYTES", size)
    token_cache.keep("four", {"train": tmp_path / "a"}, {})  # more than half of all there is
    assert not (cache / "four").exists()


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", str(tmp_path / "file"))
    token_cache.keep("key", {"train": store(tmp_path / "a", [1])}, {})
    assert token_cache.fetch("key", {"train": tmp_path / "c"}) is None
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", "none")
    token_cache.keep("key", {"train": tmp_path / "a"}, {})
    assert token_cache.fetch("key", {"train": tmp_path / "c"}) is None
