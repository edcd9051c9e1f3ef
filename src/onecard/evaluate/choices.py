"""Multiple choice by log-likelihood: the model is not asked to write a letter; each choice is an answer, and the
likeliest is what it chose.

In: questions with choices. Out: for each question the cost of every choice, and which one each way of counting takes:
the whole answer (`sum`), or the mean by token, by character, by byte of the choice. Long choices cost more, so the ways
differ; the mean by token favours a tokenizer's long words, the mean by byte is the same measure for all.

With a chat template a choice is the assistant's answer and includes the end of its turn; without one it follows the
question on a new line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onecard.evaluate.questions import Question
from onecard.evaluate.scoring import Passage, costs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WAYS = ("sum", "token", "character", "byte")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Of one question: each choice's cost in nats and its tokens; and the index that each way of counting takes."""

    nats: list[float]
    tokens: list[int]
    by: Mapping[str, int]

    def right(self, question: Question) -> dict[str, bool]:
        """Whether each way took the right choice."""
        return {way: index == question.right for way, index in self.by.items()}


def choose_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    budget_tokens: int,
    *,
    advance: Callable[[float], None] | None = None,
) -> list[Chosen]:
    """What the model chooses, in the order of the questions; `advance` as in `scoring.costs`, by choice."""
    passages = [_passage(tokenizer, question, choice) for question in questions for choice in question.choices]
    found = iter(zip(costs(model, passages, budget_tokens, advance=advance), passages))
    made = []
    for question in questions:
        pairs = [next(found) for _ in question.choices]
        made.append(_chosen(question, [nats for nats, _ in pairs], [sum(p.scored) for _, p in pairs]))
    return made


def _chosen(question: Question, nats: list[float], tokens: list[int]) -> Chosen:
    lengths = {
        "sum": [1] * len(nats),
        "token": tokens,
        "character": [len(choice) for choice in question.choices],
        "byte": [len(choice.encode()) for choice in question.choices],
    }
    by = {
        way: min(range(len(nats)), key=lambda index: nats[index] / max(1, counts[index]))
        for way, counts in lengths.items()
    }
    return Chosen(nats, tokens, by)


def _passage(tokenizer: PreTrainedTokenizerFast, question: Question, choice: str) -> Passage:
    from onecard.tokenizer.template import encode_chat, encode_prompt

    if tokenizer.chat_template:
        prompt = encode_chat(tokenizer, question.messages, add_generation_prompt=True)
        whole = encode_chat(tokenizer, [*question.messages, {"role": "assistant", "content": choice}])
        begin = len(prompt.ids)
        return Passage(whole.ids, [place >= begin and own for place, own in enumerate(whole.assistant_mask)])
    before = encode_prompt(tokenizer, question.text + "\n")
    after = encode_prompt(tokenizer, choice)
    after = after[1:] if tokenizer.bos_token_id is not None else after
    return Passage([*before, *after], [False] * len(before) + [True] * len(after))
