"""Checks of form: each can hold and fail."""

from __future__ import annotations

from typing import Any

import pytest

from onecard.evaluate.instructions import fault_of, kept, list_items


@pytest.mark.parametrize(
    ("name", "value", "passing", "failing"),
    [
        ("language", "zh", "今天天气很好，我们去公园散步吧。", "The weather is good, so we go to the park."),
        ("language", "en", "The weather is good, so we go to the park.", "今天天气很好。"),
        ("min_characters", 3, "  一二三 ", "一二 "),
        ("max_characters", 3, "一二三\n", "一二三四"),
        ("min_words", 4, "用 GPU 训练。", "The cat, sat."),
        ("max_words", 3, "The cat, sat!", "四个字符"),
        ("json", True, '{"a": [1, 2]}', 'Here it is: {"a": 1}'),
        ("json", False, "plain", "[]"),
        ("contains", "Paris", "in PARIS", "in Rome"),
        ("contains", ["a", "b"], "b and a", "only a"),
        ("not_contains", ["糖", "salt"], "water", "some Salt"),
        ("items", 2, "First:\n- one\n* two", "- one"),
        ("min_items", 3, "1. a\n2. b\n3) c", "1. a\n2. b"),
        ("max_items", 2, "一、甲\n二、乙", "1、甲\n2、乙\n3、丙"),
        ("starts_with", "答", "\n答：是", "是，答"),
        ("ends_with", "。", "好。 ", "好"),
    ],
)
def test_a_check_holds_or_fails(name: str, value: Any, passing: str, failing: str) -> None:
    assert fault_of({name: value}) == ""
    assert kept(passing, {name: value}) == {name: True}
    assert kept(failing, {name: value}) == {name: False}


def test_only_lines_that_begin_a_list_count_as_items() -> None:
    assert list_items("3.5 km is far\n1.2 times\n-5 degrees\n10 people") == 0
    assert list_items("(1) a\n  - b\n• c\nA. d\n十一、e") == 5


@pytest.mark.parametrize(
    ("checks", "fault"),
    [
        ([], "table"),
        ({}, "table"),
        ({"unknown": 1}, "no check unknown"),
        ({"json": 1}, "json cannot be 1"),
        ({"items": True}, "items cannot be True"),
        ({"contains": ["a", 1]}, "not text"),
    ],
)
def test_faults_are_named(checks: Any, fault: str) -> None:
    assert fault in fault_of(checks)
