"""Rows with preferences in the shapes that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.data.chats import ChatRowError
from onecard.data.preferences import as_comparison, read_comparisons
from onecard.data.records import Rejection
from onecard.errors import DataError
from onecard.settings import Source

QUESTION = {"role": "user", "content": "你好吗"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("很好。", "滚。"))
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "你好吗", "chosen": "很好。", "rejected": "滚。"},
        {"question": "你好吗", "chosen": "很好。", "rejected": "滚。"},
        {"instruction": "你好吗", "input": "", "chosen": "很好。", "rejected": "滚。"},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"chosen": json.dumps([QUESTION, GOOD]), "rejected": json.dumps([QUESTION, BAD])},
        {
            "conversations": [{"from": "human", "value": "你好吗"}],
            "chosen": {"from": "gpt", "value": "很好。"},
            "rejected": {"from": "gpt", "value": "滚。"},
        },
    ],
)
def test_every_shape_of_a_pair_is_the_same_comparison(row: dict[str, Any]) -> None:
    made = as_comparison(row)
    assert made.chosen == [QUESTION, GOOD]
    assert made.rejected == [QUESTION, BAD]
    assert made.shared == 1
    assert made.question == [QUESTION]


def test_a_system_message_and_earlier_turns_belong_to_the_question() -> None:
    row = {"system": "Be kind.", "prompt": [QUESTION, GOOD, QUESTION], "chosen": "很好。", "rejected": "滚。"}
    assert as_comparison(row).question == [SYSTEM, QUESTION, GOOD, QUESTION]
    row = {"instruction": "你好吗", "history": [["你好吗", "很好。"]], "chosen": "很好。", "rejected": "滚。"}
    assert as_comparison(row).question == [QUESTION, GOOD, QUESTION]


@pytest.mark.parametrize(("label", "good"), [(True, True), (0, False), ("false", False), ("好", True)])
def test_a_judged_answer_stands_on_its_side(label: Any, good: bool) -> None:
    made = as_comparison({"prompt": "你好吗", "completion": "很好。", "label": label})
    assert (made.chosen if good else made.rejected) == [QUESTION, GOOD]
    assert (made.rejected if good else made.chosen) is None
    assert made.shared == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "same_answers"),
        ({"chosen": [QUESTION, GOOD], "rejected": [{**QUESTION, "content": "x"}, BAD]}, "different_questions"),
        ({"prompt": "a", "completion": "b", "label": "perhaps"}, "bad_label"),
        ({"prompt": "a", "completion": "b"}, "missing_fields"),
        ({"chosen": "a", "rejected": "b"}, "missing_fields"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "empty_assistant_turn"),
    ],
)
def test_what_compares_nothing_is_refused_with_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ChatRowError) as caught:
        as_comparison(row)
    assert caught.value.reason == reason


def test_rows_are_kept_or_refused_by_line(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused: list[Rejection] = []
    kept = list(read_comparisons([Source(path=str(path))], strict=False, reject=refused.append))
    assert [(item.line, item.question[0]["content"]) for item in kept] == [(1, "a"), (3, "d")]
    assert [(item.reason, item.line) for item in refused] == [("same_answers", 2)]
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match="same_answers 1"):
        list(read_comparisons([Source(path=str(path))], strict=False, reject=refused.append))
