"""Messages in the form that chat templates read: one form for what means the same, whoever wrote it.

In: messages and tools as users and clients give them (OpenAI's form, flat tool calls, arguments as JSON text). Out:
plain dictionaries without None, contents as strings, arguments as objects. Knows no tokenizer and no template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onecard.data.messages import MessageFault, call_of, text_of
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
        plain = {key: value for key, value in message.items() if value is not None and key not in _NOT_RENDERED}
        plain["content"] = _content(message.get("content"), number)
        if message.get("tool_calls"):
            plain["tool_calls"] = [_call(call, number) for call in message["tool_calls"]]
        made.append(plain)
    return map_strings(made, well_formed), map_strings(list(tools or []), well_formed)


# Calls are brought into one form; whether a message is learned is no matter of templates.
_NOT_RENDERED = ("tool_calls", "train")


def _content(content: Any, number: int) -> str:
    try:
        return text_of(content)
    except MessageFault:
        raise DataError(
            f"The content of message {number} is not text.", "Give text; onecard reads no images or sounds."
        ) from None


def _call(call: Any, number: int) -> dict[str, Any]:
    try:
        return call_of(call)
    except MessageFault as fault:
        what, remedy = _CALL_FAULTS[fault.kind]
        raise DataError(what.format(number=number, detail=fault.detail), remedy) from None


_CALL_FAULTS = {
    "no_name": ("A tool call of message {number} names no function.", "Give it a name and arguments."),
    "not_json": (
        "The arguments of a tool call in message {number} are not valid JSON ({detail}).",
        "Mend the JSON, or give an object.",
    ),
    "no_object": ("The arguments of {detail} in message {number} are not an object.", "Give names with values."),
}


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
