"""Messages in the form that chat templates read: one form for what means the same, whoever wrote it.

In: messages and tools as users and clients give them (OpenAI's form, flat tool calls, arguments as JSON text). Out:
plain dictionaries without None, contents as strings, arguments as objects. Knows no tokenizer and no template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onecard.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def with_arguments(messages: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """The same normalised messages with the arguments of every call changed."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def normalise(messages: Messages, tools: Tools | None) -> tuple[list[dict[str, Any]], list[Any]]:
    """No None, content as a string, arguments as an object, calls nested; DataError names the message that is wrong."""
    if not messages:
        raise DataError("The conversation is empty.", "Give at least one message.")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"Message {number} has no role.", "Give each message a role and a content.")
        plain = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
        plain["content"] = _content(message.get("content"), number)
        if message.get("tool_calls"):
            plain["tool_calls"] = [_call(call, number) for call in message["tool_calls"]]
        made.append(plain)
    return map_strings(made, well_formed), map_strings(list(tools or []), well_formed)


def _content(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise DataError(f"The content of message {number} is not text.", "Give text; onecard reads no images or sounds.")


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"A tool call of message {number} names no function.", "Give it a name and arguments.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as fault:
            raise DataError(
                f"The arguments of {function['name']} in message {number} are not valid JSON: {fault}.",
                "Mend the JSON, or give an object.",
            ) from None
    if not isinstance(arguments, Mapping | None):
        raise DataError(
            f"The arguments of {function['name']} in message {number} are not an object.", "Give names with values."
        )
    kept = {"id": call["id"]} if call.get("id") is not None else {}
    nested = {"name": function["name"], "arguments": dict(arguments or {})}
    return {**kept, "type": "function", "function": nested}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every string in it changed, names of keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def well_formed(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, become U+FFFD; halves that belong together are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
