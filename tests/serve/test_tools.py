"""Calls of functions in streamed text."""

from __future__ import annotations

import json

import pytest

from onecard.serve.tools import ToolCalls

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_whatever_the_pieces(size: int) -> None:
    text = f"Let me look.\n{CALL}\n{CALL}"
    tools, shown = ToolCalls(), ""
    for start in range(0, len(text), size):
        shown += tools.feed(text[start : start + size])[0]
    shown += tools.finish()
    assert shown.strip() == "Let me look."
    assert [call["index"] for call in tools.found] == [0, 1]
    function = tools.found[0]["function"]
    assert function["name"] == "weather"
    assert json.loads(function["arguments"]) == {"city": "北京"}
    assert "北京" in function["arguments"]


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call> after", CALL[:-5], "a < b <tool", "[1]"])
def test_what_is_no_call_stays_text(text: str) -> None:
    tools = ToolCalls()
    assert tools.feed(text)[0] + tools.finish() == text
    assert tools.found == []
