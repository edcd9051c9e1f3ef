"""Every usual shape of a chat row, and the reasons for which a row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.data.chats import ChatRowError, as_messages, read_chats, recognised_shape, tools_of
from onecard.data.records import Rejection
from onecard.errors import DataError
from onecard.settings import Source

U, A, S = "user", "assistant", "system"


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("row", "shape", "expected"),
    [
        ({"messages": said((S, "s"), (U, "q"), (A, "a"))}, "messages (role/content)", [(S, "s"), (U, "q"), (A, "a")]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "conversations (from/value)",
            [(S, "s"), (U, "q"), (A, "a")],
        ),
        ({"conversations": said((U, "q"), (A, "a"))}, "conversations (role/content)", [(U, "q"), (A, "a")]),
        (
            {"conversations": ["q", "a", "q2", "a2"]},
            "conversations (list of strings)",
            [(U, "q"), (A, "a"), (U, "q2"), (A, "a2")],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca (instruction/output)", [(U, "q"), (A, "a")]),
        (
            {"instruction": "译", "input": "hello", "output": "你好", "history": [["q", "a"]], "system": "s"},
            "alpaca (instruction/output)",
            [(S, "s"), (U, "q"), (A, "a"), (U, "译\nhello"), (A, "你好")],
        ),
        (
            {"instruction": "q", "output": "a", "history": '[["x", "y"]]'},
            "alpaca (instruction/output)",
            [(U, "x"), (A, "y"), (U, "q"), (A, "a")],
        ),
        ({"prompt": "q", "completion": " a"}, "prompt/completion", [(U, "q"), (A, " a")]),
        (
            {"prompt": said((S, "s"), (U, "q")), "completion": said((A, "a"))},
            "prompt/completion",
            [(S, "s"), (U, "q"), (A, "a")],
        ),
        ({"query": "q", "response": "a", "n": 1}, "query/response", [(U, "q"), (A, "a")]),
        ({"question": "q", "answer": "a"}, "question/answer", [(U, "q"), (A, "a")]),
        ({"messages": json.dumps(said((U, "q"), (A, "a")))}, "messages (role/content)", [(U, "q"), (A, "a")]),
    ],
)
def test_shapes(row: dict[str, Any], shape: str, expected: list[tuple[str, str]]) -> None:
    assert recognised_shape(row) == shape
    assert as_messages(row) == said(*expected)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([(U, "a"), (U, "b"), (A, "c")], "consecutive_user_turns"),
        ([(U, "a"), (A, "b"), (A, "c")], "consecutive_assistant_turns"),
        ([(U, "a"), (S, "b"), (A, "c")], "system_in_the_middle"),
        ([(A, "a"), (U, "b"), (A, "c")], "assistant_first"),
        ([(S, "s"), (A, "a")], "assistant_first"),
        ([(U, "a"), (A, "b"), (U, "c")], "user_last"),
        ([(U, "a"), (A, " \n")], "empty_assistant_turn"),
        ([(U, ""), (A, "b")], "empty_user_turn"),
        ([(U, "a"), ("narrator", "b")], "unknown_role"),
        ([(S, "s")], "system_last"),
        ([], "no_messages"),
    ],
)
def test_order_of_turns(turns: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(ChatRowError) as caught:
        as_messages({"messages": said(*turns)})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "missing_fields"),
        ({"instruction": "q"}, "missing_fields"),
        ({"instruction": "q", "output": None}, "empty_assistant_turn"),
        ({"instruction": "q", "output": 5}, "not_text"),
        ({"instruction": "q", "output": "a", "history": [["only one"]]}, "bad_history"),
        ({"conversations": ["q", {"no": "text"}]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": "q"}, "a"]}, "bad_turn"),
    ],
)
def test_rows_that_are_no_chats(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ChatRowError) as caught:
        as_messages(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("arguments", [{"city": "北京"}, '{"city": "北京"}'])
def test_tool_calls_have_one_form(content: dict[str, Any], arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    row = [
        {"role": "user", "content": "天气？"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "content": "晴", "tool_call_id": "1"},
        {"role": "assistant", "content": "晴天。"},
    ]
    messages = as_messages({"messages": row})
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}],
    }
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_malformed_tool_arguments() -> None:
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{bad"}]}]
    with pytest.raises(ChatRowError, match="bad_tool_call"):
        as_messages({"messages": row})


def test_reading_counts_every_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        [(U, "a"), (U, "b"), (A, "c")],
        [(U, "a"), (S, "b"), (A, "c")],
        [(A, "a"), (U, "b"), (A, "c")],
        [(U, "a"), (A, "b"), (U, "c")],
        [(U, "a"), (A, "")],
    ]
    good = [(S, "s"), (U, "一"), (A, "二"), (U, "三"), (A, "四")]
    lines = [json.dumps({"messages": said(*turns)}, ensure_ascii=False) for turns in [*bad, good]]
    path.write_text("\n".join([*lines, "{broken"]), encoding="utf-8")
    rejected: list[Rejection] = []
    chats = list(read_chats([Source(path=str(path), name="talk")], strict=False, reject=rejected.append))
    assert [(chat.messages, chat.line, chat.file, chat.source) for chat in chats] == [
        (said(*good), 6, str(path), "talk")
    ]
    assert [(item.line, item.reason) for item in rejected] == [
        (1, "consecutive_user_turns"),
        (2, "system_in_the_middle"),
        (3, "assistant_first"),
        (4, "user_last"),
        (5, "empty_assistant_turn"),
        (7, "bad_json"),
    ]
    with pytest.raises(DataError, match="line 1: .*consecutive_user_turns"):
        list(read_chats([Source(path=str(path))], strict=True, reject=rejected.append))
    path.write_text("\n".join(lines[:5]), encoding="utf-8")
    with pytest.raises(DataError, match="No chat is left"):
        list(read_chats([Source(path=str(path))], strict=False, reject=rejected.append))


def test_calls_under_roles_of_their_own() -> None:
    call = {"name": "weather", "arguments": {"city": "北京"}}
    row = {
        "conversations": [
            {"from": "human", "value": "天气？"},
            {"from": "function_call", "value": json.dumps(call, ensure_ascii=False)},
            {"from": "observation", "value": "晴"},
            {"from": "gpt", "value": "晴天。"},
        ]
    }
    messages = as_messages(row)
    assert [message["role"] for message in messages] == [U, A, "tool", A]
    assert messages[1] == {"role": A, "content": "", "tool_calls": [{"type": "function", "function": call}]}
    several = [{"from": "human", "value": "q"}, {"from": "tool_call", "value": json.dumps([call, call])}]
    assert len(as_messages({"conversations": several})[1]["tool_calls"]) == 2
    several[1]["value"] = "{broken"
    with pytest.raises(ChatRowError, match="bad_tool_call: turn 2 is not JSON"):
        as_messages({"conversations": several})


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "weather", "description": "d"}],
        [{"type": "function", "function": {"name": "weather", "description": "d"}}],
        '[{"name": "weather", "description": "d"}]',
    ],
)
def test_tools_have_one_form(tools: Any) -> None:
    expected = [{"type": "function", "function": {"name": "weather", "description": "d"}}]
    assert tools_of({"tools": tools}) == tools_of({"functions": tools}) == expected
    assert tools_of({"tools": []}) is tools_of({"tools": ""}) is tools_of({}) is None


@pytest.mark.parametrize("tools", ["{broken", {"name": "x"}, ["x"], [{"description": "no name"}], "5"])
def test_tools_that_are_none(tools: Any) -> None:
    with pytest.raises(ChatRowError) as caught:
        tools_of({"tools": tools})
    assert caught.value.reason == "bad_tools"


@pytest.mark.parametrize(
    ("mark", "kept"),
    [({"train": False}, {"train": False}), ({"weight": 0}, {"train": False}), ({"loss": False}, {"train": False}),
     ({"train": True}, {}), ({"weight": 1}, {}), ({"train": None}, {}), ({}, {})],
)  # fmt: skip
def test_an_answer_may_say_that_it_is_not_learned(mark: dict[str, Any], kept: dict[str, Any]) -> None:
    messages = as_messages({"messages": [{"role": U, "content": "q"}, {"role": A, "content": "a", **mark}]})
    assert messages[1] == {"role": A, "content": "a", **kept}


def test_only_answers_are_learned_one_by_one() -> None:
    answer = {"role": A, "content": "a"}
    with pytest.raises(ChatRowError, match="learn = everything"):
        as_messages({"messages": [{"role": U, "content": "q", "train": True}, answer]})
    with pytest.raises(ChatRowError, match="neither true nor false"):
        as_messages({"messages": [{"role": U, "content": "q"}, {**answer, "train": "often"}]})
    assert as_messages({"messages": [{"role": U, "content": "q", "train": False}, answer]})[0] == said((U, "q"))[0]


def test_reasoning_stays_beside_the_content() -> None:
    answer = {"role": A, "content": "4", "reasoning_content": "2 + 2"}
    assert as_messages({"messages": [{"role": U, "content": "q"}, answer]})[1] == answer
