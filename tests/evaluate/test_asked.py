"""Rows become questions: chats, multiple choice of every usual shape, rows with checks; and why others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.data.chats import ChatRowError
from onecard.data.records import Rejection
from onecard.errors import DataError
from onecard.evaluate.questions import Question, as_question, choose, read_questions
from onecard.settings import Source

USER = {"role": "user", "content": "q"}


def test_a_chat_is_its_messages_and_its_last_answer() -> None:
    row = {"instruction": "q", "output": "a", "history": [["x", "y"]], "system": "s"}
    found = as_question(row, "f", 3)
    assert [message["content"] for message in found.messages] == ["s", "x", "y", "q"]
    assert (found.answer, found.text, found.reference) == ({"role": "assistant", "content": "a"}, "q", "a")
    assert (found.file, found.line, found.choices, found.checks) == ("f", 3, (), {})
    assert [message["content"] for message in found.chat] == ["s", "x", "y", "q", "a"]


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"choices": ["x", "y", "z"], "answer": 2}, 2),
        ({"choices": ["x", "y", "z"], "answer": "y"}, 1),
        ({"choices": ["x", "y", "z"], "answer": "C"}, 2),
        ({"choices": ["x", "y", "z"], "answer": "0"}, 0),
        # The text of a choice goes before its number, its letter before a number too.
        ({"choices": ["1", "2", "0"], "answer": "0"}, 2),
        ({"choices": '["x", "y", "z"]', "answer": "B"}, 1),
        ({"choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"}, 2),
        ({"options": {"A": "x", "B": "y", "C": "z"}, "answer": "A"}, 0),
        ({"A": "x", "B": "y", "C": "z", "答案": "B"}, 1),
    ],
)
def test_multiple_choice(fields: dict[str, Any], right: int) -> None:
    found = as_question({"question": "q", **fields})
    assert found.messages == [USER]
    assert len(found.choices) == 3
    assert found.right == right
    assert found.answer is None


def test_rows_with_checks_need_no_reference() -> None:
    checks = {"language": "zh", "max_characters": 20}
    for row in ({"prompt": "q"}, {"messages": [USER]}, {"question": "q", "system": ""}):
        found = as_question({**row, "checks": checks})
        assert (found.messages, found.answer, found.checks) == ([USER], None, checks)
    both = as_question({"question": "q", "answer": "a", "checks": json.dumps(checks)})
    assert (both.reference, both.checks) == ("a", checks)


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"question": "q", "choices": ["x"], "answer": 0}, "bad_choices", "two choices"),
        ({"question": "q", "choices": ["x", " "], "answer": 0}, "bad_choices", "two choices"),
        ({"question": "q", "choices": ["x", "y"], "answer": 2}, "bad_answer", "2 is none of A, B, of 0 to 1"),
        ({"question": "q", "choices": ["x", "y"]}, "bad_answer", "None"),
        ({"question": "q", "choices": ["x", "y"], "answer": True}, "bad_answer", "True"),
        ({"choices": ["x", "y"], "answer": 0}, "no_question", "choices, answer"),
        ({"prompt": "q", "checks": {"colour": "red"}}, "bad_check", "no check colour; there are language"),
        ({"prompt": "q", "checks": {"items": "3"}}, "bad_check", "items cannot be '3'"),
        ({"prompt": "q", "checks": []}, "bad_check", "table"),
        ({"checks": {"items": 3}}, "no_question", "checks"),
        ({"text": "t"}, "missing_fields", "text"),
        ({"messages": [USER]}, "user_last", "turn 1"),
        ({"messages": [USER, USER], "checks": {"items": 3}}, "consecutive_user_turns", "turns 1 and 2"),
    ],
)
def test_rows_that_ask_nothing(row: dict[str, Any], reason: str, detail: str) -> None:
    with pytest.raises(ChatRowError, match=detail) as caught:
        as_question(row)
    assert caught.value.reason == reason


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    rows = [{"question": str(n), "answer": "a"} for n in range(20)]
    rows += [{"question": f"c{n}", "choices": ["x", "y"], "answer": "A"} for n in range(5)] + [{"bad": 1}]  # type: ignore[list-item]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [Source(path=str(path))]


def test_rows_that_cannot_be_asked_are_named(sources: list[Source], tmp_path: Path) -> None:
    rejected: list[Rejection] = []
    found = list(read_questions(sources, reject=rejected.append))
    assert len(found) == 25
    assert [(item.line, item.reason) for item in rejected] == [(26, "missing_fields")]
    path = tmp_path / "none.jsonl"
    path.write_text('{"bad": 1}\n{"broken', encoding="utf-8")
    with pytest.raises(DataError, match="No question is left: missing_fields 1, bad_json 1"):
        list(read_questions([Source(path=str(path))], reject=rejected.append))


def test_each_condition_chooses_its_own(sources: list[Source], capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(seed: int, count: int = 4) -> dict[str, list[str]]:
        wanted = {"chats": (count, lambda q: q.answer is not None), "choices": (9, lambda q: bool(q.choices))}
        return {name: [q.text for q in some] for name, some in choose(sources, seed, wanted).items()}

    found = chosen(0)
    assert found == chosen(0)
    assert found["choices"] == ["c0", "c1", "c2", "c3", "c4"]
    assert len(found["chats"]) == 4
    assert found["chats"] == sorted(found["chats"], key=int)
    assert len({tuple(chosen(seed)["chats"]) for seed in range(8)}) > 4
    # Each of twenty is taken about as often: 4 of 20 in 400 draws are 80 each.
    taken = [text for seed in range(400) for text in chosen(seed)["chats"]]
    assert all(50 < taken.count(str(n)) < 112 for n in range(20))
    assert "missing_fields 1" in capsys.readouterr().err


def test_a_question_without_reference_has_an_empty_one() -> None:
    assert Question([USER], "", 0).reference == ""
    assert Question([USER], "", 0).chat == [USER]
