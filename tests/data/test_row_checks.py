"""What stands out among chats: each finding on rows where it is known, and silence where there is nothing."""

from __future__ import annotations

from typing import Any

import pytest

from onecard.data import row_checks
from onecard.data.alike import representatives
from onecard.data.dedup import jaccard, shingles
from onecard.data.row_checks import RowChecks, sentences

# Similarity of character 3-grams: .727.
FIRST = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"
SECOND = "机器学习模型需要大量高质量数据才能取得好的效果，清洗数据往往比调整参数更加重要！"
OTHER = "北京是中国的首都，也是全国的政治中心和文化中心，人口超过两千万。"


def test_the_earliest_text_that_is_alike_stands_for_the_later_ones() -> None:
    texts = [FIRST, OTHER, SECOND, "短", FIRST, "短", ""]
    assert representatives(texts, 0.7) == [0, 1, 0, 3, 0, 5, 6]
    assert representatives(texts, 0.8) == [0, 1, 2, 3, 0, 5, 6]
    assert representatives([], 0.7) == []


def test_pairs_above_the_threshold_are_found_among_many() -> None:
    words = [f"w{number}" for number in range(40)]
    texts = [" ".join(words[start:] + words[:start]) + f" {start} {start * start}" for start in range(40)]
    texts += [f"{text} again" for text in texts]
    found = representatives(texts, 0.9)
    for place, first in enumerate(found):
        alike = [
            other
            for other in range(place)
            if found[other] == other and jaccard(shingles(texts[other]), shingles(texts[place])) >= 0.9
        ]
        assert first == (alike[0] if alike else place)
    assert found[40:] == list(range(40))


def checked(*rows: tuple[str, str] | tuple[str, str, bool]) -> dict[str, Any]:
    checks = RowChecks()
    for number, (question, answer, *held_out) in enumerate(rows, 1):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        checks.add(messages, held_out=bool(held_out and held_out[0]), place=f"rows.jsonl:{number}")
    return checks.findings()


def test_questions_that_are_asked_again_and_answered_otherwise() -> None:
    found = checked(
        ("What is up?", "Nothing."), ("what is up", "The sky."), ("Who?", "Me."), ("Who？", "me"), ("x", "y")
    )
    assert found["rows"] == 5
    assert found["repeated_questions"]["questions"] == 2
    assert found["repeated_questions"]["rows"] == 4
    assert found["questions_with_different_answers"] == {
        "questions": 1,
        "question": "What is up?",
        "example": [{"place": "rows.jsonl:1", "text": "Nothing."}, {"place": "rows.jsonl:2", "text": "The sky."}],
    }
    warnings, remarks = sentences(found)
    assert warnings == [
        "1 question has more than one answer, and a model cannot learn both: What is up? -> rows.jsonl:1 (Nothing.) "
        "and rows.jsonl:2 (The sky.). Keep the better one, or ask in different words."
    ]
    assert remarks == [
        "2 questions are asked more than once (4 rows).",
        "1 answers stand in an earlier row too, 0 nearly.",
    ]


def test_nearly_the_same_answer_is_no_second_answer() -> None:
    near = FIRST + "这是大家都知道的事情，不必多说。"
    found = checked(("q", near), ("q", near.replace("大量", "很多")), ("r", OTHER))
    assert found["repeated_questions"]["questions"] == 1
    assert found["questions_with_different_answers"]["questions"] == 0
    assert found["near_duplicate_answers"]["near"] == 1
    assert found["near_duplicate_answers"]["exact"] == 0
    assert [item["place"] for item in found["near_duplicate_answers"]["example"]] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_held_out_questions_that_are_nearly_trained() -> None:
    found = checked((FIRST, "a"), (OTHER, "b", True), (SECOND, "c", True), ("x", "d"))
    assert found["held_out_nearly_trained"]["held_out"] == 2
    assert found["held_out_nearly_trained"]["rows"] == 1
    assert [item["place"] for item in found["held_out_nearly_trained"]["example"]] == ["rows.jsonl:3", "rows.jsonl:1"]
    assert "1 of 2 held-out rows ask nearly what a trained row asks" in sentences(found)[0][0]
    # Two held-out rows that are alike leak nothing.
    assert checked((FIRST, "a", True), (SECOND, "c", True))["held_out_nearly_trained"]["rows"] == 0


def test_wordings_are_joined_over_questions_and_answers() -> None:
    # Rows 1 and 2 by their answer, 2 and 3 by their question: one thing in three wordings. Row 4 alone.
    found = checked(("天为什么是蓝的", OTHER), (FIRST, OTHER), (SECOND, "因为。"), ("别的", "不知道"))
    assert found["wordings"] == {"asked": 2, "in_one_wording": 1, "share": 0.5}


def test_a_suggestion_is_made_where_all_is_asked_in_one_wording() -> None:
    rows = [(f"问题{number}号是什么意思", f"第{number}个答案") for number in range(30)]
    assert sentences(checked(*rows[:19])) == ([], [])
    warnings, remarks = sentences(checked(*rows))
    assert not warnings
    assert remarks[0].startswith("30 of 30 things (100%) are asked in one wording only")


def test_a_system_message_and_earlier_turns() -> None:
    checks = RowChecks()
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    checks.add([{"role": "system", "content": "s"}, *messages], held_out=False, place="1")
    checks.add(messages, held_out=False, place="2")
    checks.add([{"role": "user", "content": "c"}, messages[-1]], held_out=False, place="3")
    found = checks.findings()
    assert (
        found["repeated_questions"]["questions"] == 1
    )  # the same turns before the answer; "c" alone is another question
    assert found["near_duplicate_answers"]["exact"] == 2


def test_of_very_many_rows_the_first_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_checks, "MOST_COMPARED", 2)
    found = checked((FIRST, "a"), (OTHER, "b"), (SECOND, "c", True), (SECOND, "d", True))
    assert found["held_out_nearly_trained"]["rows"] == 0
    assert found["repeated_questions"]["questions"] == 1  # equal ones are found among all
    assert found["wordings"]["asked"] == 3
    assert "among the first 2 alone" in " ".join(sentences(found)[1])


def test_no_rows() -> None:
    assert sentences(RowChecks().findings()) == ([], [])
