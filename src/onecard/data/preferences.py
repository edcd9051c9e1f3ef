"""Preferences from rows: a question with a better and a worse answer, or with one answer that was judged.

Every usual shape becomes whole conversations that are the same but for their end. In: rows. Out: `Comparison`s. Rows
that compare nothing are refused with a reason. Knows nothing of templates and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onecard.data.chats import ChatRowError, Message, UsableRows, as_messages, parsed
from onecard.data.records import Rejection, Row
from onecard.settings import Source

_JUDGED = ("label", "kto_tag")
_TRUE, _FALSE = ("true", "1", "yes", "good", "好", "是"), ("false", "0", "no", "bad", "坏", "否")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Conversations that end with an answer: the one preferred, the one not; None where the row judges one alone."""

    chosen: list[Message] | None
    rejected: list[Message] | None
    file: str
    line: int
    source: str

    @property
    def shared(self) -> int:
        """How many messages the two have in common from the beginning; of one alone: all but its last."""
        one, other = self.chosen, self.rejected
        if one is None or other is None:
            return len(one or other or ()) - 1
        return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))

    @property
    def question(self) -> list[Message]:
        """The messages that both answers follow."""
        return (self.chosen or self.rejected or [])[: self.shared]


def as_comparison(values: Mapping[str, Any], file: str = "", line: int = 0, source: str = "") -> Comparison:
    """The comparison of a row; ChatRowError gives the reason for a row that compares nothing.

    `chosen` and `rejected` are texts, messages, lists of answering messages, or whole conversations; what they answer
    stands in `prompt`, `instruction` (with `input`, `history`), `messages` or `conversations`. A row with `label` (or
    `kto_tag`) judges the answer it has, in any shape of a chat.
    """
    if "chosen" in values and "rejected" in values:
        chosen, rejected = (_answered(values, values[key]) for key in ("chosen", "rejected"))
        if chosen == rejected:
            raise ChatRowError("same_answers")
        made = Comparison(chosen, rejected, file, line, source)
        after = [messages[made.shared :] for messages in (chosen, rejected)]
        if not all(rest and rest[0]["role"] == "assistant" for rest in after):
            raise ChatRowError("different_questions", "chosen and rejected part before an answer")
        return made
    for key in _JUDGED:
        if key in values:
            good = _judgement(values[key])
            messages = as_messages({name: value for name, value in values.items() if name != key})
            return Comparison(messages if good else None, None if good else messages, file, line, source)
    raise ChatRowError("missing_fields", f"fields are {', '.join(map(str, values)) or 'none'}")


def read_comparisons(
    sources: Sequence[Source], *, strict: bool, reject: Callable[[Rejection], None]
) -> Iterator[Comparison]:
    """Stream the comparisons of all sources in order; unusable rows go to `reject` (with strict: DataError).

    DataError at the end if not one row of all could be used.
    """

    def comparison(row: Row, source: Source) -> Comparison:
        return as_comparison(row.values, row.file, row.line, source.label)

    usable = UsableRows(comparison, strict=strict, reject=reject)
    yield from usable.read(sources)
    usable.check(
        "preference",
        "Give rows with prompt, chosen and rejected; or with prompt, completion and label (true or false).",
    )


def _answered(values: Mapping[str, Any], answer: Any) -> list[Message]:
    """The conversation of a row with this answer at its end."""
    answer = parsed(answer)
    if isinstance(answer, list) and answer and isinstance(answer[0], dict) and _is_question(answer[0]):
        return as_messages({"messages": answer, **_system(values)})  # the whole conversation
    turns = answer if isinstance(answer, list) else [answer]
    ending = [turn if isinstance(turn, dict) else {"role": "assistant", "content": turn} for turn in turns]
    for key in ("messages", "conversations", "conversation", "prompt"):
        before = parsed(values.get(key))
        if isinstance(before, list):
            return as_messages({"messages": [*before, *ending], **_system(values)})
    for key in ("prompt", "query", "question", "问题"):
        if isinstance(values.get(key), str):
            question = {"role": "user", "content": values[key]}
            return as_messages({"messages": [question, *ending], **_system(values)})
    if "instruction" in values:
        if len(ending) == 1:
            content = ending[0].get("content", ending[0].get("value"))
            return as_messages({**values, "output": content})
        raise ChatRowError("bad_turn", "an answer to an instruction is one message")
    raise ChatRowError("missing_fields", f"fields are {', '.join(map(str, values))}")


def _is_question(turn: Mapping[str, Any]) -> bool:
    return str(turn.get("from", turn.get("role"))).lower() in ("system", "developer", "user", "human")


def _system(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"system": values["system"]} if "system" in values else {}


def _judgement(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ChatRowError("bad_label", f"{value!r} is neither true nor false")
