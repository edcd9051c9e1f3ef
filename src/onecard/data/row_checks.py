"""What stands out among chats before they are learned: questions asked again, questions with two answers, answers that
repeat each other, held-out questions that are nearly trained ones, and how many ways each thing is asked.

In: the messages of the kept rows, and which are held out. Out: counts with an example each, and sentences for a person.
Nothing is removed. It knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onecard.data.alike import representatives
from onecard.data.split import question_key

# A question is nearly another one, an answer nearly another one, from these similarities of 3-grams on.
ALIKE_QUESTIONS = 0.7
ALIKE_ANSWERS = 0.8
# Nearly equal texts are looked for among so many distinct ones: about ten seconds.
MOST_COMPARED = 50_000
_LETTERS = re.compile(r"[^\W_]+")
_EXAMPLE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class _Row:
    """A chat as it is compared: all that comes before its last answer, the first question's key, the answer."""

    question: str
    key: str
    answer: str
    held_out: bool
    place: str


class RowChecks:
    """Collects chats; `findings` compares them."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, messages: Sequence[Mapping[str, Any]], *, held_out: bool, place: str) -> None:
        """One more kept row; `place` is its file and line."""
        before = "\n".join(
            str(message.get("content") or "") for message in messages[:-1] if message["role"] != "system"
        )
        answer = str(messages[-1].get("content") or "")
        self._rows.append(_Row(before, question_key(messages), answer, held_out, place))

    def findings(self) -> dict[str, Any]:
        """Counts and examples, JSON-able; about a second for 10,000 rows."""
        rows = self._rows
        questions = [_folded(row.question) for row in rows]
        answers = [_folded(row.answer) for row in rows]
        by_question = _groups(questions)
        again = {key: places for key, places in by_question.items() if len(places) > 1}
        same_answer = _alike([row.answer for row in rows], answers, ALIKE_ANSWERS)
        different = [_unlike(places, same_answer) for places in again.values()]
        different = [pair for pair in different if pair]
        same_question = _alike([row.question for row in rows], questions, ALIKE_QUESTIONS)
        return {
            "rows": len(rows),
            "repeated_questions": {
                "questions": len(again),
                "rows": sum(map(len, again.values())),
                "example": self._example(again.values(), lambda row: row.question),
            },
            "questions_with_different_answers": {
                "questions": len(different),
                "question": _short(rows[different[0][0]].question) if different else "",
                "example": self._example(different, lambda row: row.answer),
            },
            "near_duplicate_answers": self._near_answers(answers, same_answer),
            "held_out_nearly_trained": self._leaks(same_question),
            "wordings": _wordings(questions, same_question, same_answer),
        }

    def _near_answers(self, answers: Sequence[str], of: Sequence[int]) -> dict[str, Any]:
        """Rows whose answer is an earlier one, word for word or nearly."""
        exact = sum(count - 1 for count in Counter(answers).values())
        near = [place for place, first in enumerate(of) if first != place and answers[first] != answers[place]]
        example = [[of[near[0]], near[0]]] if near else []
        return {"exact": exact, "near": len(near), "example": self._example(example, lambda row: row.answer)}

    def _leaks(self, of: Sequence[int]) -> dict[str, Any]:
        """Held-out rows whose question is nearly one that is trained."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for place, first in enumerate(of):
            groups[first].append(place)
        rows = self._rows
        pairs = []
        for places in groups.values():
            trained = next((place for place in places if not rows[place].held_out), None)
            pairs += [[place, trained] for place in places if rows[place].held_out and trained is not None]
        held_out = sum(row.held_out for row in rows)
        return {"held_out": held_out, "rows": len(pairs), "example": self._example(pairs, lambda row: row.question)}

    def _example(self, groups: Iterable[Sequence[int]], shown: Callable[[_Row], str]) -> list[dict[str, str]]:
        """The first two of the first group: where they stand, and their text cut short."""
        first: Sequence[int] = next(iter(groups), [])
        return [{"place": self._rows[place].place, "text": _short(shown(self._rows[place]))} for place in first[:2]]


def _unlike(places: Sequence[int], same_answer: Sequence[int]) -> list[int]:
    """The first of the rows, and the first one after it whose answer is another one; nothing if there is none."""
    other = next((place for place in places if same_answer[place] != same_answer[places[0]]), None)
    return [] if other is None else [places[0], other]


def _groups(keys: Sequence[str]) -> dict[str, list[int]]:
    made: defaultdict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        made[key].append(place)
    return made


def _alike(texts: Sequence[str], keys: Sequence[str], threshold: float) -> list[int]:
    """For each row the first with the same text (but for case and punctuation) or, of the first, nearly the same."""
    first: dict[str, int] = {}
    distinct = [place for place, key in enumerate(keys) if first.setdefault(key, place) == place][:MOST_COMPARED]
    found = representatives([texts[place] for place in distinct], threshold)
    of = {keys[place]: distinct[found[index]] for index, place in enumerate(distinct)}
    return [of.get(key, first[key]) for key in keys]


def _wordings(questions: Sequence[str], same_question: Sequence[int], same_answer: Sequence[int]) -> dict[str, Any]:
    """How many different things are asked, and how many of them in one wording only.

    Rows ask the same thing where their questions or their answers are nearly the same, directly or over others.
    """
    parent = list(range(len(questions)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for of in (same_question, same_answer):
        for place, first in enumerate(of):
            parent[root(place)] = root(first)
    wordings: defaultdict[int, set[str]] = defaultdict(set)
    for place, question in enumerate(questions):
        wordings[root(place)].add(question)
    once = sum(len(found) == 1 for found in wordings.values())
    return {"asked": len(wordings), "in_one_wording": once, "share": once / len(wordings) if wordings else 0.0}


def _folded(text: str) -> str:
    return "".join(_LETTERS.findall(text.casefold())) or text


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _EXAMPLE_CHARACTERS else flat[: _EXAMPLE_CHARACTERS - 1] + "…"


# --- in words -----------------------------------------------------------------------------------------------------

# From this share of things asked in one wording on, more wordings are worth suggesting.
_ONE_WORDING = 0.8
_FEW_ROWS = 20


def sentences(findings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What a person should know of the findings: warnings, then remarks. Nothing is said of what is not there."""
    warnings, remarks = [], []
    different, leaks = findings["questions_with_different_answers"], findings["held_out_nearly_trained"]
    if different["questions"]:
        warnings.append(
            f"{_count(different['questions'], 'question has', 'questions have')} more than one answer, and a model "
            f"cannot learn both: {different['question']} -> {_both(different['example'])}. Keep the better one, or ask "
            "in different words."
        )
    if leaks["rows"]:
        warnings.append(
            f"{leaks['rows']:,} of {leaks['held_out']:,} held-out rows ask nearly what a trained row asks, so the "
            f"held-out loss is a little too good: {_both(leaks['example'])}."
        )
    repeated, answers = findings["repeated_questions"], findings["near_duplicate_answers"]
    if repeated["questions"]:
        remarks.append(
            f"{_count(repeated['questions'], 'question is', 'questions are')} asked more than once "
            f"({repeated['rows']:,} rows)."
        )
    if answers["exact"] or answers["near"]:
        example = f": {_both(answers['example'])}" if answers["near"] else ""
        remarks.append(
            f"{answers['exact']:,} answers stand in an earlier row too, {answers['near']:,} nearly{example}."
        )
    if findings["rows"] > MOST_COMPARED:
        remarks.append(f"Nearly equal texts were looked for among the first {MOST_COMPARED:,} alone.")
    wordings = findings["wordings"]
    if wordings["asked"] >= _FEW_ROWS and wordings["share"] >= _ONE_WORDING:
        remarks.append(
            f"{wordings['in_one_wording']:,} of {wordings['asked']:,} things ({wordings['share']:.0%}) are asked in "
            "one wording only: the model will know the question by its words. Two or three wordings of what matters "
            "most (a question, an order, a short form) help more than further passes."
        )
    return warnings, remarks


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _both(example: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"{item['place']} ({item['text']})" for item in example)
