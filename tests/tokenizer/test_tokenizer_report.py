"""The report's numbers, computed by hand on texts whose tokens are known, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onecard.config import TokenizerTrainConfig
from onecard.data.corpus import Document, write_corpus
from onecard.tokenizer import report
from onecard.tokenizer.train import train


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """265 fixed entries and "aa", "aaaa": one learned entry more than the text below uses."""
    from onecard.tokenizer.train import train_model, wrap

    made = wrap(train_model(["aaaa"] * 3, vocabulary_size=1000, pre_tokenizer="qwen2", maximum_token_characters=16))
    assert made.convert_ids_to_tokens([265, 266]) == ["aa", "aaaa"]
    assert len(made) == 267
    return made


def test_counts_by_language_on_held_out_documents(byte_tokenizer: Any, tmp_path: Path) -> None:
    documents = [
        Document("1", "aaa\n", "s", "en", "held_out"),  # aa, a, line break: 4 characters, 4 bytes, 3 tokens
        Document("2", "下aa", "s", "zh", "held_out"),  # three bytes, aa: 3 characters, 5 bytes, 4 tokens
        Document("3", "b" * 50, "s", "en", "train"),  # not measured: English is held out
        Document("4", "é", "s", "fr", "train"),  # two bytes: 1 character, 2 bytes, 2 tokens
    ]
    write_corpus(tmp_path / "corpus", documents)
    found = report.measure(byte_tokenizer, tmp_path / "corpus")
    assert found.by_language == {
        "en": report.Count(documents=1, characters=4, bytes=4, tokens=3),
        "zh": report.Count(documents=1, characters=3, bytes=5, tokens=4),
        "fr": report.Count(documents=1, characters=1, bytes=2, tokens=2),
    }
    assert found.unused_share == 0.5  # "aa" is used, "aaaa" is not
    assert found.longest == [("aaaa", 266), ("aa", 265)]
    assert found.notes == ["No document of language fr is held out: its numbers come from the training text."]
    assert found.summary() == {
        "characters_per_token": {"en": 1.333, "zh": 0.75, "fr": 0.5},
        "bytes_per_token": 1.222,  # 11 bytes in 9 tokens
        "unused_share": 0.5,
        "longest_token_characters": 4,
    }


def test_what_is_measured_is_bounded(byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MEASURED_CHARACTERS", 10)
    documents = [Document(str(n), "b" * 7, "s", "en", "held_out") for n in range(3)]
    write_corpus(tmp_path / "corpus", documents)
    assert report.measure(byte_tokenizer, tmp_path / "corpus").by_language["en"].characters == 10


def test_pieces_keep_characters_whole(byte_tokenizer: Any) -> None:
    assert report.pieces(byte_tokenizer, "aaa 下b") == [("aa", 1), ("a", 1), (" ", 1), ("下", 3), ("b", 1)]
    assert report.pieces(byte_tokenizer, "👍👍") == [("👍", 4), ("👍", 4)]
    assert report.pieces(byte_tokenizer, "") == []


def test_the_page_shows_splits_and_escapes_text(tmp_path: Path) -> None:
    documents = [Document(str(n), "天下 <b>&amp;</b> " * 9, "s", "zh", s) for n, s in enumerate(("train", "held_out"))]
    write_corpus(tmp_path / "corpus", documents)
    result = train(TokenizerTrainConfig(corpus=tmp_path / "corpus", output=tmp_path / "t", vocabulary_size=300))
    page = (tmp_path / "t" / "report.html").read_text(encoding="utf-8")
    assert "<b>&amp;</b> " not in page
    assert "&lt;" in page
    assert '<div class="sample pieces"><small>zh</small><i>' in page
    assert f"Tokenizer of {result['vocabulary_size']} entries" in page
    assert "Longest tokens" in page
