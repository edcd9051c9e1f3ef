"""Chats from rows: every usual shape becomes a list of messages with role and content, in the order it has.

Nothing is repaired by guessing: a row whose turns are not a conversation that ends with an answer is refused with a
reason. Knows nothing of templates and tokens.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from onecard.data.messages import MessageFault, call_of, text_of
from onecard.data.records import Rejection, Row, read_rows, refuse
from onecard.errors import DataError
from onecard.settings import Source

Message = dict[str, Any]
Made = TypeVar("Made")

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "bing": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
# Roles whose content is a call as JSON.
_CALLING = ("function_call", "tool_call")
# What a message may have beside its content, and templates may show.
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")
# Whether a message is learned, by the names that others give it; false or 0 is no.
_TRAINED = ("train", "training", "weight", "loss")
# Question and answer under other names, in the order in which they are looked for.
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "answer"),
    ("ask", "answer"),
    ("input", "output"),
    ("问题", "答案"),
    ("问题", "回答"),
)


class ChatRowError(ValueError):
    """A row that is no usable conversation: `reason` is a short name to count by, `detail` says which turn."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation that ends with an answer, and where it stands."""

    messages: list[Message]
    file: str
    line: int
    source: str
    tools: list[dict[str, Any]] | None = None


def recognised_shape(values: Mapping[str, Any]) -> str:
    """The name of the shape of a row, to be said to the user; ChatRowError(missing_fields) if it has none."""
    return _recognise(values)[0]


def as_messages(values: Mapping[str, Any]) -> list[Message]:
    """The conversation of a row: optional system message, then user and assistant in turn, the last an answer.

    Each message is {"role", "content"}; those of tools keep `tool_calls`, `tool_call_id` and `name` too, with
    arguments as objects; `reasoning_content` and `thinking` stay beside the content, for templates that show them; an
    answer that shall not be learned keeps `train: False`. ChatRowError gives the reason for a row that cannot be used.
    """
    shape, read = _recognise(values)
    messages = read(values)
    system = values.get("system")
    if isinstance(system, str) and system.strip() and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    _check_turns(messages)
    return messages


def read_chats(sources: Sequence[Source], *, strict: bool, reject: Callable[[Rejection], None]) -> Iterator[Chat]:
    """Stream the chats of all sources in order; unusable rows go to `reject` (or, with strict, raise DataError).

    DataError at the end if not one row of all could be used.
    """

    def chat(row: Row, source: Source) -> Chat:
        return Chat(as_messages(row.values), row.file, row.line, source.label, tools_of(row.values))

    usable = UsableRows(chat, strict=strict, reject=reject)
    yield from usable.read(sources)
    usable.check(
        "chat", "Give rows with messages, conversations, instruction/output, prompt/completion or question/answer."
    )


class UsableRows(Generic[Made]):
    """Rows of any sources as what `make` makes of them; those of which it raises ChatRowError are set aside."""

    def __init__(
        self, make: Callable[[Row, Source], Made], *, strict: bool, reject: Callable[[Rejection], None]
    ) -> None:
        self._make, self._strict, self._reject = make, strict, reject
        self._reasons: Counter[str] = Counter()
        self._kept = 0

    def read(self, sources: Sequence[Source]) -> Iterator[Made]:
        """Stream them in order; with strict DataError at the first bad row."""
        for source in sources:
            for row in read_rows(source, strict=self._strict, reject=self._count):
                try:
                    made = self._make(row, source)
                except ChatRowError as fault:
                    refuse_chat_row(row, fault, strict=self._strict, reject=self._count)
                    continue
                self._kept += 1
                yield made

    def _count(self, rejection: Rejection) -> None:
        self._reasons[rejection.reason] += 1
        self._reject(rejection)

    def check(self, kind: str, remedy: str) -> None:
        """DataError, with the reasons, if not one row could be used."""
        if not self._kept:
            found = ", ".join(f"{reason} {number:,}" for reason, number in self._reasons.most_common()) or "no rows"
            raise DataError(f"No {kind} is left: {found}.", remedy)


def refuse_chat_row(row: Row, fault: ChatRowError, *, strict: bool, reject: Callable[[Rejection], None]) -> None:
    """Set aside a row that is no usable conversation, or stop at it."""
    text = json.dumps(row.values, ensure_ascii=False, default=str)
    refuse(Rejection(fault.reason, row.file, row.line, f"{fault.detail} | {text}"), strict=strict, reject=reject)


# --- shapes -------------------------------------------------------------------------------------------------------

_Reader = Callable[[Mapping[str, Any]], list[Message]]


def _recognise(values: Mapping[str, Any]) -> tuple[str, _Reader]:
    for key in ("messages", "conversations", "conversation"):
        turns = parsed(values.get(key))
        if not isinstance(turns, list):
            continue
        first = turns[0] if turns else {}
        if isinstance(first, str):
            return f"{key} (list of strings)", functools.partial(_from_strings_at, key)
        if isinstance(first, dict):
            style = "from/value" if "from" in first else "role/content"
            return f"{key} ({style})", functools.partial(_from_messages_at, key)
    if "instruction" in values and "output" in values:
        return "alpaca (instruction/output)", _from_alpaca
    for question, answer in _PAIRS:
        if question in values and answer in values:
            return f"{question}/{answer}", functools.partial(_from_pair_at, question, answer)
    raise ChatRowError("missing_fields", f"fields are {', '.join(map(str, values)) or 'none'}")


def parsed(value: Any) -> Any:
    """A list that a table holds as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _from_strings_at(key: str, values: Mapping[str, Any]) -> list[Message]:
    return _from_strings(parsed(values[key]))


def _from_messages_at(key: str, values: Mapping[str, Any]) -> list[Message]:
    return [_message(turn, number) for number, turn in enumerate(parsed(values[key]), 1)]


def _from_pair_at(question: str, answer: str, values: Mapping[str, Any]) -> list[Message]:
    return _from_pair(values[question], values[answer])


def _from_strings(turns: list[Any]) -> list[Message]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": _text(turn, number + 1)}
        for number, turn in enumerate(turns)
    ]


def _from_alpaca(values: Mapping[str, Any]) -> list[Message]:
    history = parsed(values.get("history") or [])
    if not isinstance(history, list):
        raise ChatRowError("bad_history", "history is not a list of [question, answer]")
    turns: list[Any] = []
    for pair in history:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise ChatRowError("bad_history", "history is not a list of [question, answer]")
        turns += pair
    parts = [_text(values[key] or "", len(turns) + 1) for key in ("instruction", "input") if values.get(key)]
    turns += ["\n".join(part for part in parts if part.strip()), values["output"]]
    return _from_strings(turns)


def _from_pair(question: Any, answer: Any) -> list[Message]:
    """Two texts, or (as some libraries write it) two lists of messages."""
    question, answer = _as_turns(question), _as_turns(answer)
    if isinstance(question, list) and isinstance(answer, list):
        return [_message(turn, number) for number, turn in enumerate([*question, *answer], 1)]
    return _from_strings([question, answer])


def _as_turns(value: Any) -> Any:
    found = parsed(value)
    return found if isinstance(found, list) and all(isinstance(turn, dict) for turn in found) else value


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ChatRowError("bad_turn", f"turn {number} is not an object")
    name = turn.get("from", turn.get("role"))
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise ChatRowError("unknown_role", f"turn {number} is by {name!r}")
    calls = turn.get("tool_calls") or None
    content = turn.get("value") if "value" in turn else turn.get("content")
    if str(name).lower() in _CALLING:
        calls, content = _calls_in(content, number), None
    message: Message = {"role": role, "content": "" if content is None and calls else _text(content, number)}
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    message.update({key: turn[key] for key in _KEPT if turn.get(key)})
    marks = [turn[key] for key in _TRAINED if turn.get(key) is not None]
    if any(mark not in (True, False, 0, 1) for mark in marks):
        raise ChatRowError("bad_train", f"turn {number}: train is neither true nor false")
    if role == "assistant" and not all(marks):
        message["train"] = False
    elif role == "user" and any(marks):
        raise ChatRowError("bad_train", f"turn {number}: only answers are learned one by one (else learn = everything)")
    return message


def _calls_in(content: Any, number: int) -> list[Any]:
    """The calls that the content of a turn is: one as JSON, or a list of them."""
    try:
        found = json.loads(content) if isinstance(content, str) else content
    except ValueError as fault:
        raise ChatRowError("bad_tool_call", f"turn {number} is not JSON ({fault})") from None
    return found if isinstance(found, list) else [found]


def tools_of(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a row describes, in the form that templates read: a list of functions, each in its envelope.

    They stand in `tools` or `functions`, as a list or as JSON text; None without. ChatRowError for what is no list of
    objects with names.
    """
    found = next((values[key] for key in ("tools", "functions") if values.get(key)), None)
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except ValueError as fault:
            raise ChatRowError("bad_tools", f"tools are not JSON ({fault})") from None
    if not found:
        return None
    if not isinstance(found, list | tuple):
        raise ChatRowError("bad_tools", "tools are not a list")
    made = []
    for number, tool in enumerate(found, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatRowError("bad_tools", f"tool {number} has no name")
        made.append({"type": "function", "function": function})
    return made


_CALL_FAULTS = {
    "no_name": "a tool call has no name",
    "not_json": "arguments are not JSON",
    "no_object": "arguments are not an object",
}


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    try:
        return call_of(call)
    except MessageFault as fault:
        detail = f" ({fault.detail})" if fault.detail else ""
        raise ChatRowError("bad_tool_call", f"turn {number}: {_CALL_FAULTS[fault.kind]}{detail}") from None


def _text(content: Any, number: int) -> str:
    try:
        return text_of(content)
    except MessageFault as fault:
        raise ChatRowError(fault.kind, f"turn {number} holds a {fault.detail}") from None


# --- order --------------------------------------------------------------------------------------------------------


def _check_turns(messages: list[Message]) -> None:
    """ChatRowError unless: [system] (user, assistant [tool ..., assistant])+."""
    if not messages:
        raise ChatRowError("no_messages")
    before = "start"
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "system" and number > 1:
            raise ChatRowError("system_in_the_middle", f"turn {number}")
        if role in ("assistant", "tool") and before in ("start", "system"):
            raise ChatRowError(f"{role}_first", f"turn {number}")
        if role == before and role in ("user", "assistant"):
            raise ChatRowError(f"consecutive_{role}_turns", f"turns {number - 1} and {number}")
        if role == "tool" and before == "user":
            raise ChatRowError("tool_without_call", f"turn {number}")
        if role in ("user", "assistant") and not message["content"].strip() and not message.get("tool_calls"):
            raise ChatRowError(f"empty_{role}_turn", f"turn {number}")
        before = role
    if before != "assistant":
        raise ChatRowError(f"{before}_last", f"turn {len(messages)}")
