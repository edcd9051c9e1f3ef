"""Contents and tool calls of messages in the one form that is meant, whoever wrote them.

In: what rows and clients give (strings or parts of text; calls nested or flat, arguments as an object or as JSON). Out:
a string; a nested call with an object. Knows neither rows nor templates: whoever asks says where the fault stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class MessageFault(Exception):
    """`kind`: not_text, no_name, not_json or no_object. `detail`: what was found instead, or the call's name."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def text_of(content: Any) -> str:
    """A content as a string: of parts their texts, of None nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise MessageFault("not_text", type(content).__name__)


def call_of(call: Any) -> dict[str, Any]:
    """A tool call with its function nested and its arguments as an object; its id, if it has one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise MessageFault("no_name", "")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as fault:
            raise MessageFault("not_json", f"{name}: {fault}") from None
    if not isinstance(arguments, Mapping | None):
        raise MessageFault("no_object", name)
    kept = {"id": call["id"]} if call.get("id") is not None else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
