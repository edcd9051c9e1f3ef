"""What a model is asked when it is measured: chats with a reference answer, multiple choice, rows with checks.

In: sources. Out: `Question`s. A row with `choices` (or columns A, B, C, D) and `answer` is multiple choice; a row with
`checks` (instructions.py) need not have a reference answer; all others are chats whose last message is the reference.
Rows that are none of these are refused with a reason. It knows neither models nor tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onecard import console
from onecard.data.chats import ChatRowError, Message, UsableRows, as_messages, parsed, tools_of
from onecard.data.records import Rejection
from onecard.evaluate import instructions
from onecard.settings import Source

_QUESTIONS = ("question", "query", "prompt", "instruction", "问题")
_ANSWERS = ("answer", "answerKey", "label", "答案")
_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True, slots=True)
class Question:
    """Messages that end where the model has to speak, and what is known of a right answer.

    `answer` is the message of the reference; `choices` and `right` (its index) are those of multiple choice.
    """

    messages: list[Message]
    file: str
    line: int
    answer: Message | None = None
    choices: tuple[str, ...] = ()
    right: int = 0
    checks: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The last message before the answer."""
        return str(self.messages[-1].get("content") or "")

    @property
    def reference(self) -> str:
        """The text of the reference answer; empty without one."""
        return str(self.answer.get("content") or "") if self.answer else ""

    @property
    def chat(self) -> list[Message]:
        """The whole conversation, the reference answer (if there is one) at its end."""
        return [*self.messages, *([self.answer] if self.answer else [])]


def as_question(values: Mapping[str, Any], file: str = "", line: int = 0) -> Question:
    """The question of a row; ChatRowError gives the reason for a row that asks nothing that can be measured."""
    choices = _choices(values)
    if choices:
        return _multiple_choice(values, choices, file, line)
    checks = _table(values.get("checks") or {})
    if "checks" in values:
        fault = instructions.fault_of(checks)
        if fault:
            raise ChatRowError("bad_check", fault)
    try:
        messages = as_messages({key: value for key, value in values.items() if key != "checks"})
    except ChatRowError as fault:
        if not checks or fault.reason not in ("missing_fields", "user_last"):
            raise
        return Question(_asked(values), file, line, checks=checks, tools=tools_of(values))
    return Question(messages[:-1], file, line, answer=messages[-1], checks=checks, tools=tools_of(values))


def read_questions(sources: Sequence[Source], *, reject: Callable[[Rejection], None]) -> Iterator[Question]:
    """Stream the questions of all sources in order; DataError at the end if not one row of all could be used."""
    usable = UsableRows(lambda row, _: as_question(row.values, row.file, row.line), strict=False, reject=reject)
    yield from usable.read(sources)
    usable.check(
        "question", "Give chat rows; rows with question, choices and answer; or rows with a prompt and checks."
    )


def choose(
    sources: Sequence[Source], seed: int, wanted: Mapping[str, tuple[int, Callable[[Question], bool]]]
) -> dict[str, list[Question]]:
    """By name so many of the questions that the name's condition holds for, each equally likely, in their order.

    Rows that cannot be asked are left out with a warning. DataError if none can.
    """
    generator = random.Random(seed)
    chosen: dict[str, list[tuple[int, Question]]] = {name: [] for name in wanted}
    seen = dict.fromkeys(wanted, 0)
    reasons: Counter[str] = Counter()
    for question in read_questions(sources, reject=lambda rejection: reasons.update([rejection.reason])):
        for name, (count, holds) in wanted.items():
            if not holds(question):
                continue
            # Each further one takes the place of a chosen one with the right probability: one pass, bounded memory.
            if seen[name] < count:
                chosen[name].append((seen[name], question))
            elif (place := generator.randrange(seen[name] + 1)) < count:
                chosen[name][place] = (seen[name], question)
            seen[name] += 1
    if reasons:
        found = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        console.warn(f"Rows of the questions that cannot be asked are left out: {found}.")
    return {name: [question for _, question in sorted(some, key=lambda pair: pair[0])] for name, some in chosen.items()}


# --- shapes -------------------------------------------------------------------------------------------------------


def _table(value: Any) -> Any:
    """A table or a list that a column holds as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        made = parsed(f"[{value}]")
        return made[0] if isinstance(made, list) else value
    return parsed(value)


def _asked(values: Mapping[str, Any]) -> list[Message]:
    """The messages of a row without an answer."""
    for key in ("messages", "conversations", "prompt"):
        turns = parsed(values.get(key))
        if isinstance(turns, list):
            return as_messages({"messages": [*turns, {"role": "assistant", "content": "-"}]})[:-1]
    return [*_system(values), {"role": "user", "content": _question_text(values)}]


def _system(values: Mapping[str, Any]) -> list[Message]:
    system = values.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []


def _question_text(values: Mapping[str, Any]) -> str:
    for key in _QUESTIONS:
        if isinstance(values.get(key), str) and values[key].strip():
            return str(values[key])
    raise ChatRowError("no_question", f"fields are {', '.join(map(str, values)) or 'none'}")


def _choices(values: Mapping[str, Any]) -> dict[str, str]:
    """The choices by their labels; none for a row that is not multiple choice."""
    found = _table(values.get("choices", values.get("options")))
    if isinstance(found, Mapping) and isinstance(found.get("text"), list):  # ARC
        labels = found.get("label") or list(_LETTERS)
        return {str(label): str(text) for label, text in zip(labels, found["text"])}
    if isinstance(found, Mapping):
        return {str(label): str(text) for label, text in found.items()}
    if isinstance(found, list) and found:
        return dict(zip(_LETTERS, map(str, found)))
    columns = {label: str(values[label]) for label in _LETTERS if values.get(label) is not None}
    return columns if "A" in columns and "B" in columns else {}


def _multiple_choice(values: Mapping[str, Any], choices: Mapping[str, str], file: str, line: int) -> Question:
    texts = list(choices.values())
    if len(texts) < 2 or not all(text.strip() for text in texts):
        raise ChatRowError("bad_choices", "there are not two choices with text")
    messages = [*_system(values), {"role": "user", "content": _question_text(values)}]
    given = next((values[key] for key in _ANSWERS if values.get(key) is not None), None)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(texts):
        right = given
    elif str(given).strip() in texts:
        right = texts.index(str(given).strip())
    elif str(given).strip() in choices:
        right = list(choices).index(str(given).strip())
    elif str(given).strip().isdecimal() and int(str(given)) < len(texts):
        right = int(str(given))
    else:
        raise ChatRowError("bad_answer", f"answer {given!r} is none of {', '.join(choices)}, of 0 to {len(texts) - 1}")
    return Question(messages, file, line, choices=tuple(texts), right=right)
