"""Tokenizers side by side: counts by hand, terms, and what a vocabulary size means for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.config import TokenizerReportConfig
from onecard.data.corpus import Document, write_corpus
from onecard.errors import ConfigError
from onecard.model.presets import preset
from onecard.model.tokenizer_report import report
from onecard.settings import build


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One that knows nothing but bytes and "aa", and one that knows 天下 as well."""
    from onecard.tokenizer.train import save_tokenizer, train_model, wrap

    folder = tmp_path_factory.mktemp("tokenizers")
    made = []
    for name, texts in (("plain", ["aa"] * 3), ("other", ["aa", "天下"] * 3)):
        model = train_model(texts, vocabulary_size=1000, pre_tokenizer="qwen2", maximum_token_characters=2)
        (folder / name).mkdir()
        save_tokenizer(wrap(model), folder / name)
        made.append(folder / name)
    return made


def settings(**values: Any) -> TokenizerReportConfig:
    return build(TokenizerReportConfig, values)


def test_counts_by_language_and_source_and_terms(tokenizers: list[Path], tmp_path: Path) -> None:
    write_corpus(
        tmp_path / "corpus",
        [
            Document("1", "aa aa b", "letters", "en", "held_out"),  # aa, space, aa, space, b
            Document("2", "天下", "words", "zh", "held_out"),  # 6 bytes, or one token
            Document("3", "天下aa" * 50, "words", "zh", "train"),
        ],
    )
    (tmp_path / "terms.txt").write_text("天下\naa\n", encoding="utf-8")
    result = report(
        settings(
            tokenizers=[str(path) for path in tokenizers],
            corpus=str(tmp_path / "corpus"),
            terms=str(tmp_path / "terms.txt"),
            sizes=[266, 268],
            output=str(tmp_path / "out"),
        )
    )
    plain, other = result["tokenizers"]["plain"], result["tokenizers"]["other"]
    assert plain["by_language"]["en"] == {"tokens": 5, "characters_per_token": 1.4, "bytes_per_token": 1.4}
    assert plain["by_language"]["zh"]["tokens"] == 6
    assert plain["by_source"]["words"]["tokens"] == 6
    assert other["by_language"]["zh"] == {"tokens": 1, "characters_per_token": 2.0, "bytes_per_token": 6.0}
    assert result["terms"] == {"天下": {"plain": 6, "other": 1}, "aa": {"plain": 1, "other": 1}}
    assert plain["unused_share"] == 0.0  # its one learned entry is used
    artifact.verify(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8")) == result
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for words in ("Tokenizers side by side", "By language", "By source", "If you trained a tokenizer", "<svg"):
        assert words in page


def test_the_curve_falls_and_tells_the_cost(tokenizers: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"话说天下大势，分久必合，合久必分 {n}" for n in range(400)), encoding="utf-8")
    result = report(
        settings(
            tokenizers=[str(tokenizers[0])], text=[str(text)], sizes=[280, 290, 100_000], output=str(tmp_path / "o")
        )
    )
    curve = result["vocabulary_sizes"]
    assert [row["vocabulary_size"] for row in curve][:2] == [280, 290]
    assert curve[-1]["vocabulary_size"] < 100_000  # the text gives no more
    assert curve[0]["tokens"] > curve[1]["tokens"] > curve[-1]["tokens"]
    row, shape = curve[0], preset("12M")
    cost = row["models"]["12M"]
    assert cost["parameters"] == shape.parameters(280)
    assert cost["table_share"] == round(280 * shape.width / shape.parameters(280), 4)
    tokens_per_character = 1 / row["characters_per_token"]
    expected = shape.training_flops_per_token(280, shape.context_tokens / 2) * tokens_per_character
    assert cost["training_flops_per_character"] == pytest.approx(expected, rel=1e-3)


def test_without_sizes_there_is_no_curve(tokenizers: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("aa " * 50)
    result = report(
        settings(
            tokenizers=[str(tokenizers[0])], text=[str(tmp_path / "text.txt")], sizes=[], output=str(tmp_path / "o")
        )
    )
    assert result["vocabulary_sizes"] == []
    assert "If you trained" not in (tmp_path / "o" / "report.html").read_text(encoding="utf-8")


def test_there_has_to_be_one_text(tokenizers: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one text to measure on"):
        report(settings(tokenizers=[str(tokenizers[0])], output=str(tmp_path / "o")))
