"""Finds the calls of functions in what a model writes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

In: text as it comes. Out: the text that is for the reader, and the calls in OpenAI's form. A block that is cut off or
is not valid JSON stays text, so that nothing the model said is lost. The marks are those of the chat templates of
onecard, Qwen and Hermes; other models' calls pass as text.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from onecard.serve.detokenize import StopStrings

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCalls:
    """Splits a stream of text into text and calls."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._text = StopStrings([_OPEN])
        self._block: str | None = None  # what came after an opening mark, None outside of one

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Take more text; give what the reader may see now and the calls that are complete now."""
        shown, calls = "", []
        while text:
            if self._block is None:
                outside, text = self._outside(text)
                shown += outside
                continue
            self._block += text
            inside, mark, text = self._block.partition(_CLOSE)
            if not mark:
                break
            self._block = None
            call = self._parse(inside)
            if call is None:
                shown += _OPEN + inside + _CLOSE
            else:
                calls.append(call)
        # White space between calls is layout, not an answer.
        return ("" if self.found and not shown.strip() else shown), calls

    def finish(self) -> str:
        """The rest, at the end: a block that was never closed is text."""
        return self._text.flush() if self._block is None else _OPEN + self._block

    def _outside(self, text: str) -> tuple[str, str]:
        """Text before the next opening mark, and what comes after the mark."""
        shown = ""
        for index, character in enumerate(text):
            shown += self._text.feed(character)
            if self._text.stopped:
                self._text, self._block = StopStrings([_OPEN]), ""
                return shown, text[index + 1 :]
        return shown, ""

    def _parse(self, block: str) -> dict[str, Any] | None:
        try:
            value = json.loads(block)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {
            "index": len(self.found),
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": value["name"], "arguments": spelled},
        }
        self.found.append(call)
        return call
