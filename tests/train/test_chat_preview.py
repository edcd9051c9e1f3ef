"""What is seen before a fine-tuning: rows with what is learned marked, what stands out, what is left out; and that the
run learns exactly that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import quicken

from onecard import cli, console
from onecard.config import FinetuneConfig
from onecard.data.records import Rejection
from onecard.data.tokens import TokenStore
from onecard.errors import ConfigError, DataError
from onecard.model.load import load_tokenizer
from onecard.report import Page
from onecard.settings import build
from onecard.train import chat_rows
from onecard.train.finetune import prepare
from onecard.train.preview import preview

U, A = "user", "assistant"
TURNS = [
    {"role": U, "content": "一"},
    {"role": A, "content": "first", "train": False},
    {"role": U, "content": "二"},
    {"role": A, "content": "second"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def settings(model: Path, rows: Path, **changes: Any) -> FinetuneConfig:
    plain = {"model": str(model), "sources": [str(rows)], "max_length": 128, "held_out": 0.0}
    return build(FinetuneConfig, plain | changes)


def read(config: FinetuneConfig, model: Path) -> tuple[chat_rows.ChatRows, list[Rejection]]:
    rejected: list[Rejection] = []
    return chat_rows.read(config, load_tokenizer(model), rejected.append), rejected


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("answers", ["second<|im_end|>"]),
        ("last_answer", ["second<|im_end|>"]),
        ("everything", ["<|startoftext|><|im_start|>user\n一<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
                        "<|im_start|>user\n二<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n"]),
    ],
)  # fmt: skip
def test_what_is_shown_as_learned_is_what_the_store_learns(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learn: str, expected: list[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    config = settings(tiny_model_directory, rows, learn=learn, output=str(tmp_path / "run"))
    found, _ = read(config, tiny_model_directory)
    [shown] = found.look["shown"]
    assert [text for text, learned in shown["pieces"] if learned] == expected
    tokenizer = load_tokenizer(tiny_model_directory)
    quicken(monkeypatch)
    prepare(config)
    store = TokenStore(tmp_path / "run" / "tokens" / "train")
    assert store.learned is not None
    ids = [int(i) for i, own in zip(store.tokens, store.learned) if own]
    assert tokenizer.decode(ids) == "".join(expected)
    assert "".join(text for text, _ in shown["pieces"]) == tokenizer.decode(store.tokens.astype(int).tolist())
    assert shown["learned_tokens"] == len(ids)
    kept = json.loads((tmp_path / "run" / chat_rows.LOOK).read_text(encoding="utf-8"))
    assert kept["shown"] == [{**shown, "pieces": [list(piece) for piece in shown["pieces"]]}]


def test_a_row_of_which_nothing_is_learned_is_dropped(tiny_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}, {"messages": TURNS}, {"question": "q", "answer": "很" * 200}]
    config = settings(tiny_model_directory, write(tmp_path / "rows.jsonl", rows), max_length=24)
    found, rejected = read(config, tiny_model_directory)
    assert [(item.line, item.reason) for item in rejected] == [
        (1, "nothing_to_learn"), (2, "answer_beyond_max_length"), (3, "exact_duplicate")
    ]  # fmt: skip
    assert found.facts["read"] == 4
    assert found.facts["kept"] == found.facts["truncated"] == 1
    assert found.facts["tokens"] == 24


def test_rows_that_the_template_refuses_are_counted(tiny_model_directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_directory, model)
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refusal + template, encoding="utf-8")
    rows = [{"question": "q", "answer": "a", "system": "s"}, {"question": "q", "answer": "a"}]
    path = write(tmp_path / "rows.jsonl", rows)
    found, rejected = read(settings(model, path), model)
    assert [(item.line, item.reason) for item in rejected] == [(1, "refused_by_template")]
    assert "no system here" in rejected[0].text
    assert (found.facts["read"], found.facts["kept"]) == (2, 1)
    with pytest.raises(DataError, match="line 1: .*refused_by_template"):
        read(settings(model, path, strict=True), model)
    with pytest.raises(DataError, match=r"No row is left to train on \(refused_by_template 1\)"):
        prepare(settings(model, write(path, rows[:1]), output=str(tmp_path / "run")))


def test_questions_of_an_evaluation_are_never_trained(tiny_model_directory: Path, tmp_path: Path) -> None:
    question = "一名五十岁的男性患者近日出现持续高热、咳嗽和胸痛，应当首先做什么检查？"
    rows = [
        {"question": question, "answer": "a"},
        {"question": f"医生您好：{question}谢谢！", "answer": "b"},
        {"question": "别的问题，与此无关吗？", "answer": "c"},
        {"messages": [*TURNS, {"role": U, "content": question}, {"role": A, "content": "d"}]},
    ]
    evaluation = write(tmp_path / "evaluation.jsonl", [{"question": question, "choices": ["x", "y"], "answer": 0}])
    config = settings(
        tiny_model_directory, write(tmp_path / "rows.jsonl", rows), decontaminate=[str(evaluation)], max_length=250
    )
    found, rejected = read(config, tiny_model_directory)
    assert [(item.line, item.reason) for item in rejected] == [(n, "question_in_evaluation") for n in (1, 2, 4)]
    assert all("evaluation.jsonl:1" in item.text for item in rejected)
    assert found.facts["kept"] == 1
    assert found.facts["read"] == 4


def test_the_first_the_middle_and_the_longest_row_are_shown(tiny_model_directory: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"question": f"q{number}", "answer": "a"} for number in range(9)]
    rows[6] = {"messages": TURNS}
    found, _ = read(settings(tiny_model_directory, write(tmp_path / "r.jsonl", rows)), tiny_model_directory)
    assert [row["place"] for row in found.look["shown"]] == ["r.jsonl:1", "r.jsonl:5", "r.jsonl:7"]
    found, _ = read(settings(tiny_model_directory, write(tmp_path / "r.jsonl", rows[:6])), tiny_model_directory)
    assert [row["place"] for row in found.look["shown"]] == ["r.jsonl:1", "r.jsonl:4", "r.jsonl:6"]


def test_preview_says_everything_and_writes_nothing(
    tiny_model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": "Q?", "answer": "b c"}, {"bad": 1}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert cli.main(["preview", str(tiny_model_directory), "--sources", str(path), "--held-out", "0"]) == 0
    out, err = capsys.readouterr()
    assert "⟦a<|im_end|>⟧" in out
    assert "row rows.jsonl:1: 2 of" in out
    assert "missing_fields" in out
    assert "1 question has more than one answer" in err
    assert "3 rows: 2 kept" in err
    assert sorted(item.name for item in tmp_path.iterdir()) == ["rows.jsonl"]
    assert cli.main(["preview", str(tiny_model_directory), "--sources", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kept"] == 2
    assert document["findings"]["repeated_questions"]["questions"] == 1


def test_preview_refuses_what_a_run_would_refuse(tiny_model_directory: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError, match="256 positions"):
        preview(settings(tiny_model_directory, rows, max_length=300))
    with pytest.raises(DataError, match="No chat is left"):
        preview(settings(tiny_model_directory, write(tmp_path / "none.jsonl", [{"bad": 1}])))


def test_the_page_marks_what_is_learned(tiny_model_directory: Path, tmp_path: Path) -> None:
    found, _ = read(
        settings(tiny_model_directory, write(tmp_path / "r.jsonl", [{"question": "<b>", "answer": "1 < 2"}])),
        tiny_model_directory,
    )
    page = Page("x")
    chat_rows.on_page(page, found.look)
    assert "<mark>1 &lt; 2&lt;|im_end|&gt;</mark>" in page.html()
    assert "user\n&lt;b&gt;" in page.html()


def test_colours_on_a_terminal_and_brackets_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pieces = [("asked ", False), ("said", True)]
    console.learned("row 1", pieces)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "row 1\nasked ⟦said⟧\n")
    console.configure(quiet=True)
    console.learned("row 1", pieces)
    assert capsys.readouterr().err == ""
    console.configure(json_output=True)
    console.learned("row 1", pieces, as_result=True)
    assert capsys.readouterr().out == ""
    console.configure()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console.learned("row 1", pieces, as_result=True)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "32m" in shown  # green
    assert "⟦" not in shown
