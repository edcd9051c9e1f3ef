"""Plain text among the chats of fine-tuning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import weights, write_corpus

from onecard.config import FinetuneConfig
from onecard.data.batches import RowOrder
from onecard.data.corpus import read_documents
from onecard.data.packing import PackedRows
from onecard.data.tokens import TokenStore
from onecard.errors import ConfigError
from onecard.model.load import load_tokenizer
from onecard.settings import build
from onecard.train import finetune as verb
from onecard.train import session, text_mix
from onecard.train.finetune import finetune


def settings(folder: Path, model: Path, **changes: Any) -> FinetuneConfig:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes {i}."} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / "run"),
        "max_length": 64,
        "batch_size": 1,
        "max_steps": 3,
        "num_epochs": 2,
        "compile": False,
        "precision": "fp32",
        "held_out": 0.0,
    }
    return build(FinetuneConfig, made | changes)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


def test_an_epoch_has_the_share_of_text_that_was_asked_for() -> None:
    assert text_mix.weights(["chats", "more", text_mix.SOURCE], [30, 10, 80], 0.2) == [1.0, 1.0, 0.125]
    order = RowOrder([30, 10, 80], [1.0, 1.0, 0.125], seed=0, rows_per_update=50)
    rows = order.rows_of_update(0)
    assert len(rows) == 50
    assert sum(row >= 40 for row in rows) == 10
    # Another epoch takes other text.
    assert not {row for row in rows if row >= 40} & {row for row in order.rows_of_update(1) if row >= 40}
    assert text_mix.weights(["chats"], [30], 0.0) == [1.0]


def test_text_is_learned_whole_beside_the_answers(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path)
    stores: list[TokenStore] = []
    original = PackedRows.__init__

    def spy(self: PackedRows, store: TokenStore, max_length: int) -> None:
        stores.append(store)
        original(self, store, max_length)

    monkeypatch.setattr(verb.PackedRows, "__init__", spy)
    result = finetune(settings(tmp_path, tiny_model_directory, text_share=0.5, corpus=str(corpus)))
    store = stores[0]
    assert store.sources == ["chats.jsonl", text_mix.SOURCE]
    assert store.learned is not None
    tokenizer = load_tokenizer(tiny_model_directory)
    text = ""
    for document in range(len(store.source_of)):
        span = slice(int(store.starts[document]), int(store.starts[document + 1]))
        whole = bool((store.learned[span] == 1).all())
        assert whole == (store.source_of[document] == 1)
        assert span.stop - span.start <= 64
        if whole:
            text += tokenizer.decode(store.tokens[span].astype(int).tolist(), skip_special_tokens=True)
    assert "天" in text or "机器学习" in text
    assert "fox" in text
    assert result["rows"]["text_tokens"] == int(store.lengths()[store.source_of == 1].sum())
    assert result["rows"]["kept"] == 12


def test_text_alone_trains_a_model_further_also_one_without_a_chat_template(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    corpus = write_corpus(tmp_path)
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    (base / "chat_template.jinja").unlink()
    assert load_tokenizer(base).chat_template is None
    changes = {"sources": [], "text_share": 1, "corpus": str(corpus), "learning_rate": 3e-3, "num_epochs": "auto"}
    result = finetune(settings(tmp_path, base, **changes, max_steps=12, batch_size=4))
    store = {split: list(read_documents(corpus, split)) for split in ("train", "held_out")}
    tokenizer = load_tokenizer(base)
    rows = 0
    for documents in store.values():
        rows += sum(-(-len(tokenizer(one.text)["input_ids"]) // 64) for one in documents)
    assert abs(result["rows"]["kept"] - rows) <= sum(map(len, store.values()))  # an end of text may open a row
    assert result["rows"]["learned_tokens"] == result["rows"]["tokens"] == result["rows"]["text_tokens"]
    assert result["rows"]["held_out"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_chats_and_text_alone_exclude_each_other(tmp_path: Path, tiny_model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no row for the chats"):
        settings(tmp_path, tiny_model_directory, text_share=1)
    with pytest.raises(ConfigError, match="sources is missing"):
        settings(tmp_path, tiny_model_directory, sources=[], text_share=0.5)


def test_the_same_settings_give_the_same_run_and_another_share_another(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    corpus = write_corpus(tmp_path)
    for name, share in (("a", 0.5), ("b", 0.5), ("c", 0.2)):
        finetune(
            settings(tmp_path, tiny_model_directory, text_share=share, corpus=str(corpus), output=str(tmp_path / name))
        )
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_tokens_of_another_share_are_not_taken_from_the_cache(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_TOKEN_CACHE", str(tmp_path / "cache"))
    corpus, found = write_corpus(tmp_path), []
    for share in (0.0, 0.5):
        changes = {"text_share": share, "corpus": str(corpus)} if share else {}
        output = str(tmp_path / f"run-{share}")
        found.append(finetune(settings(tmp_path, tiny_model_directory, output=output, **changes))["rows"])
    assert "text_tokens" not in found[0]
    assert found[1]["text_tokens"] > 0


def test_a_share_without_a_corpus_is_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="no corpus is given"):
        finetune(settings(tmp_path, tiny_model_directory, text_share=0.5))
