"""Paging through a corpus: filters, pages, whole rows, the first page where nobody can be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onecard import artifact, console
from onecard.cli import main
from onecard.config import InspectConfig
from onecard.data.corpus import Document, write_documents
from onecard.data.inspect import inspect
from onecard.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Six documents of two sources and three rejected rows."""
    directory = tmp_path / "corpus"
    documents = [
        Document(f"poems:{i}", f"第{i}首诗\u2028明月", "poems", "zh", "held_out" if i == 1 else "train")
        for i in (1, 2, 3, 4)
    ]
    documents += [Document("news:1", "The Moon rose.", "news", "en"), Document("news:2", "明月報", "news", "zh-Hant")]
    rejected = [
        {
            "reason": reason,
            "source": "news",
            "file": "n.txt",
            "line": line,
            "id": f"news:{line}",
            "detail": "",
            "text": text,
        }
        for line, reason, text in (
            (3, "too_short", "短\u2028短"),
            (4, "too_short", "明"),
            (5, "near_duplicate", "The moon rose!"),
        )
    ]
    with artifact.new_directory(directory) as temporary:
        write_documents(temporary, documents)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rejected)
        (temporary / "rejected-00000.jsonl").write_text(lines, encoding="utf-8")
        result = {
            "read": 9,
            "kept": 6,
            "rejected": {"too_short": 2, "near_duplicate": 1},
            "by_source": {"poems": {}, "news": {}},
        }
        artifact.write_manifest(temporary, "corpus", settings={}, result=result)
    return directory


def ids(corpus: Path, **filters: object) -> list[str]:
    return [row["id"] for row in inspect(InspectConfig(corpus=corpus, **filters))["rows"]]  # type: ignore[arg-type]


def test_filters(corpus: Path) -> None:
    kept = ["poems:1", "poems:2", "poems:3", "poems:4", "news:1", "news:2"]
    assert ids(corpus) == [*kept, "news:3", "news:4", "news:5"]
    assert ids(corpus, show="kept") == ids(corpus, reason="kept") == kept
    assert ids(corpus, show="rejected") == ["news:3", "news:4", "news:5"]
    assert ids(corpus, reason="too_short") == ["news:3", "news:4"]
    assert ids(corpus, source="news") == ["news:1", "news:2", "news:3", "news:4", "news:5"]
    assert ids(corpus, language="zh") == [*kept[:4], "news:2"]
    assert ids(corpus, language="zh-Hant") == ["news:2"]
    assert ids(corpus, search="MOON") == ["news:1", "news:5"]
    assert ids(corpus, search="poems:3") == ["poems:3"]


def test_nothing_passes(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"too_short \(2\), near_duplicate \(1\); sources: poems, news"):
        inspect(InspectConfig(corpus=corpus, reason="too_long"))


def test_the_first_page_where_nobody_can_be_asked(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(corpus), "--rows", "2", "--characters", "4"]) == 0
    said = capsys.readouterr().out.split("\n")
    assert said[:4] == [
        "   1  kept  held_out  zh  poems:1",
        "      第1首诗 …",
        "   2  kept  train  zh  poems:2",
        "      第2首诗 …",
    ]
    assert "There are more" in said[4]
    assert main(["inspect", str(corpus), "--reason", "near_duplicate", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["more"] is False
    assert page["rows"] == [
        {
            "id": "news:5", "source": "news", "language": "", "reason": "near_duplicate", "detail": "", "file": "n.txt",
            "line": 5, "text": "The moon rose!",
        }
    ]  # fmt: skip


def test_turning_pages(corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[str] = iter(["", "5", "9", "b", "", "", "q"])
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    monkeypatch.setattr(console, "ask", lambda prompt: next(answers))
    inspect(InspectConfig(corpus=corpus, rows=4, show="kept"))
    said = capsys.readouterr().out
    shown = [line.split()[0] for line in said.split("\n") if line[:4].strip().isdecimal() and "kept" in line]
    # Page 1, page 2, back to page 1, page 2 again; then there is no more.
    assert shown == ["1", "2", "3", "4", "5", "6", "1", "2", "3", "4", "5", "6"]
    assert "\n5  kept  train  en  news:1\n\nThe Moon rose.\n" in said
    assert "This page has the rows 5 to 6." in said
    assert "No more rows." in said
    assert list(answers) == ["q"]
