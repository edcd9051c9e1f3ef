"""A second run with the same text and tokenizer does not tokenise again; one in which anything changed does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onecard.config import FinetuneConfig
from onecard.data.corpus import Document, write_corpus
from onecard.model.load import load_tokenizer, tokenizer_hash, vocabulary_rows
from onecard.settings import build
from onecard.train import chat_rows, finetune, pretrain


class TokenisedAgainError(Exception):
    pass


def refuse(*_: Any, **__: Any) -> Any:
    raise TokenisedAgainError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(folder: Path) -> Any:
    folder.mkdir()
    return SimpleNamespace(path=folder, tokens=folder / "tokens", plan=None)


def pretrain_store(folder: Path, corpus: Path, tokenizer: Path, split: Any = "train") -> Any:
    loaded = load_tokenizer(tokenizer)
    return pretrain._store(run(folder), corpus, split, loaded, vocabulary_rows(loaded), tokenizer_hash(tokenizer))


def test_documents(tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, tokenizer = tmp_path / "corpus", tmp_path / "tokenizer"
    shutil.copytree(tiny_tokenizer_directory, tokenizer)
    documents = [Document(str(n), f"文本 {n}", "s", "zh", "held_out" if n == 3 else "train") for n in range(5)]
    write_corpus(corpus, documents)
    first = pretrain_store(tmp_path / "a", corpus, tokenizer)
    monkeypatch.setattr(pretrain, "encode_stream", refuse)
    again = pretrain_store(tmp_path / "b", corpus, tokenizer)
    assert np.array_equal(again.tokens, first.tokens)
    assert (again.meta, again.sources) == (first.meta, first.sources)
    with pytest.raises(TokenisedAgainError):
        pretrain_store(tmp_path / "c", corpus, tokenizer, "held_out")
    settings = tokenizer / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"<|startoftext|>"', '"<|pad|>"'))
    with pytest.raises(TokenisedAgainError):
        pretrain_store(tmp_path / "d", corpus, tokenizer)
    # Another text behind the manifest of the first.
    write_corpus(tmp_path / "other", [*documents[:-1], Document("4", "文本 5", "s", "zh")])
    shutil.copy(tmp_path / "other" / "documents-00000.parquet", corpus / "documents-00000.parquet")
    with pytest.raises(TokenisedAgainError):
        pretrain_store(tmp_path / "e", corpus, tiny_tokenizer_directory)


_CHANGES: list[dict[str, Any]] = [
    {"max_length": 32},
    {"seed": 1},
    {"held_out": 0.4},
    {"strict": True},
    {"learn": "everything"},
]


def test_chats(tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    shutil.copytree(tiny_model_directory, model)
    rows = [{"query": f"Q{n}", "response": "A"} for n in range(6)]
    chats.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0]]))

    def stores(folder: Path, **changes: Any) -> Any:
        values = {"model": str(model), "sources": [str(chats)], "max_length": 64, "held_out": 0.3, **changes}
        return finetune.stores_of(build(FinetuneConfig, values), run(folder), load_tokenizer(model))

    found, first = stores(tmp_path / "a")
    assert found["dropped"] == {"exact_duplicate": 1}
    with monkeypatch.context() as patch:
        patch.setattr(chat_rows, "encode_chat", refuse)
        same, again = stores(tmp_path / "b")
        assert same == found
        for name in ("train", "held_out"):
            assert np.array_equal(again[name].tokens, first[name].tokens)
            assert np.array_equal(again[name].learned, first[name].learned)
        rejected = [(tmp_path / name / "rejected-00000.jsonl").read_text() for name in "ab"]
        assert rejected[0] == rejected[1] != ""
        looks = [(tmp_path / name / chat_rows.LOOK).read_text() for name in "ab"]
        assert looks[0] == looks[1] != ""
        for number, change in enumerate(_CHANGES):
            with pytest.raises(TokenisedAgainError):
                stores(tmp_path / f"changed-{number}", **change)
        template = model / "chat_template.jinja"
        before = template.read_text()
        template.write_text(before.replace("<|im_start|>assistant", "<|im_start|>bot"))
        with pytest.raises(TokenisedAgainError):
            stores(tmp_path / "c")
        template.write_text(before)
        chats.write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(TokenisedAgainError):
            stores(tmp_path / "d")
