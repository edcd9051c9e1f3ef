"""Contents and calls: every form that means the same becomes the same, and what means nothing is a fault."""

from __future__ import annotations

from typing import Any

import pytest

from onecard.data.messages import MessageFault, call_of, text_of

NESTED = {"type": "function", "function": {"name": "weather", "arguments": {"city": "上海"}}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "output_text", "text": "a"}], "a"),
    ],
)
def test_contents(content: Any, text: str) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("content", "found"), [(5, "int"), ({"text": "a"}, "dict"), ([{"type": "image"}], "list"), (["a"], "list")]
)
def test_what_is_no_text(content: Any, found: str) -> None:
    with pytest.raises(MessageFault) as fault:
        text_of(content)
    assert (fault.value.kind, fault.value.detail) == ("not_text", found)


@pytest.mark.parametrize(
    ("call", "made"),
    [
        (NESTED, NESTED),
        ({"name": "weather", "arguments": '{"city": "上海"}'}, NESTED),
        ({"id": "1", **NESTED}, {"id": "1", **NESTED}),
        ({"id": None, "name": "now"}, {"type": "function", "function": {"name": "now", "arguments": {}}}),
        ({"name": "now", "arguments": " "}, {"type": "function", "function": {"name": "now", "arguments": {}}}),
    ],
)
def test_calls(call: Any, made: dict[str, Any]) -> None:
    assert call_of(call) == made


@pytest.mark.parametrize(
    ("call", "kind", "detail"),
    [
        ("weather", "no_name", ""),
        ({"function": "weather"}, "no_name", ""),
        ({"name": 3}, "no_name", ""),
        ({"name": "now", "arguments": "{"}, "not_json", "now: Expecting"),
        ({"name": "now", "arguments": [1]}, "no_object", "now"),
        ({"name": "now", "arguments": "[1]"}, "no_object", "now"),
    ],
)
def test_what_is_no_call(call: Any, kind: str, detail: str) -> None:
    with pytest.raises(MessageFault) as fault:
        call_of(call)
    assert fault.value.kind == kind and fault.value.detail.startswith(detail)
