"""A model answers questions: greedily, so that the same model always says the same.

In: questions. Out: what the model wrote, and why it ended (`stop`: by itself; `length`: it was cut off).
It does not judge whether an answer is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onecard.model.generation import FinishReason, Generated, context_tokens, decode, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from onecard.evaluate.questions import Question

__all__ = ["Answer", "Generated", "answer_questions", "context_tokens", "decode", "generate"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to a question; `tokens` counts the answer without the token that stopped it."""

    question: str
    reference: str
    text: str
    finish_reason: FinishReason
    tokens: int


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int,
    *,
    advance: Callable[[float], None] | None = None,
) -> list[Answer]:
    """The model's answer to each of the questions, in their order.

    Errors: those of the chat template. `advance` is called with the number of questions answered since the last call.
    """
    from onecard.model.load import vocabulary_rows
    from onecard.tokenizer.template import encode_chat, stop_token_ids

    prompts = [encode_chat(tokenizer, q.messages, tools=q.tools, add_generation_prompt=True).ids for q in questions]
    written = generate(
        model,
        prompts,
        stop_ids=stop_token_ids(tokenizer),
        vocabulary_size=vocabulary_rows(tokenizer),
        limit=max_new_tokens,
        batch_size=batch_size,
        advance=advance,
    )
    return [
        Answer(
            question=question.text,
            reference=question.reference,
            text=_without_torn_end(decode(tokenizer, item.ids), item.finish_reason),
            finish_reason=item.finish_reason,
            tokens=len(item.ids),
        )
        for question, item in zip(questions, written)
    ]


def _without_torn_end(text: str, reason: FinishReason) -> str:
    """An answer that was cut off within a character ends before it."""
    return text.rstrip("\ufffd") if reason == "length" else text
