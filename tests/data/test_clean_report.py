"""What the report of a cleaning shows: numbers, examples, the most repeated documents, changes with their marks."""

from __future__ import annotations

import json
from pathlib import Path

from onecard.config import CleanConfig
from onecard.data.clean import clean
from onecard.data.clean_report import Change, page
from onecard.data.clusters import Cluster
from onecard.settings import Source

RESULT = {
    "read": 8,
    "kept": 5,
    "rejected": {"too_short": 2, "bad_json": 1},
    "held_out": 1,
    "characters": 600,
    "bytes": 1536,
    "changed": 2,
    "changes": {"unicode": 2, "personal_data: email": 3},
    "by_source": {"a.txt": {"read": 8, "kept": 5, "rejected": 3, "held_out": 1, "characters": 600, "bytes": 1536}},
    "by_language": {"zh": {"kept": 4, "held_out": 1, "characters": 500, "bytes": 1400}},
}


def test_the_page_tells_everything() -> None:
    examples = {
        "too_short": [{"source": "a.txt", "file": "a.txt", "line": 3, "detail": "2 characters", "text": "<短>"}],
        "bad_json": [{"source": "a.txt", "file": "a.txt", "line": 0, "detail": "", "text": ""}],
    }
    changes = [
        Change("personal_data: a.txt:1", "写给jo@firm.cn吧", "写给<邮箱>吧"),
        *(Change(f"unicode: a.txt:{i}", f"{i}\u3000", f"{i}") for i in range(5)),
    ]
    clusters = [Cluster("a.txt:4", "反复出现的文字", 7, [("a.txt:5", 1.0), ("a.txt:9", 0.812)])]
    html = page(RESULT, examples, changes, {"zh": [100, 200, 120, 80], "en": [100], "fr": []}, clusters).html()
    assert "3 of 8 (37.5%)" in html
    assert "too_short, the first of 2:" in html
    assert "<small>a.txt, line 3 · 2 characters</small>&lt;短&gt;" in html
    assert "bad_json, 1:" in html
    assert "<small>a.txt</small>(no text)" in html
    assert "<small>a.txt:4 · repeated 7 times: a.txt:5 (1.00), a.txt:9 (0.81), ...</small>反复出现的文字" in html
    assert "写给<mark>jo@firm.cn</mark>吧" in html
    assert "写给<mark>&lt;邮箱&gt;</mark>吧" in html
    # Three examples of each step, no more; what cannot be seen is made visible.
    assert html.count("unicode: a.txt:") == 3
    assert "0<mark>▢</mark>" in html
    assert ">zh</text>" in html
    assert ">fr</text>" not in html


def test_an_empty_report_has_no_empty_sections() -> None:
    html = page({**RESULT, "rejected": {}, "changed": 0, "changes": {}}, {}, [], {"zh": [20]}).html()
    assert "set aside" in html  # the number 0
    for heading in ("What was set aside", "most repeated", "Before and after"):
        assert heading not in html


def test_the_most_repeated_of_a_real_cleaning(tmp_path: Path) -> None:
    texts = [f"第{i}篇文章说的是另外一件事情，与别的文章没有关系。{chr(0x4E00 + 97 * i) * 3}" for i in range(6)]
    rows = [*texts, texts[4], texts[2], texts[4], f"  {texts[4]}"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    clean(CleanConfig(sources=[Source(path=str(path))], output=tmp_path / "corpus", near_duplicates=False))
    html = (tmp_path / "corpus/report.html").read_text(encoding="utf-8")
    most = "a.jsonl:5 · repeated 3 times: a.jsonl:7 (1.00), a.jsonl:9 (1.00), a.jsonl:10 (1.00)"
    second = "a.jsonl:3 · repeated once: a.jsonl:8 (1.00)"
    assert 0 < html.index(most) < html.index(second)
    assert html.count("· repeated") == 2
