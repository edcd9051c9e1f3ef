"""Multiple choice by log-likelihood, against whole forward passes, and what each way of counting takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.evaluate import choices
from onecard.evaluate.choices import choose_answers
from onecard.evaluate.questions import Question
from onecard.model.load import load_model, load_tokenizer
from onecard.tokenizer.template import encode_chat

QUESTION = Question([{"role": "user", "content": "首都？"}], "", 0, choices=("北京", "in the beginning", "是"), right=0)


@pytest.mark.parametrize("template", [True, False])
def test_the_cost_of_a_choice_is_that_of_its_tokens(tiny_model_directory: Path, template: bool) -> None:
    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    if template:
        prompt = encode_chat(tokenizer, QUESTION.messages, add_generation_prompt=True).ids
        end = encode_chat(tokenizer, [*QUESTION.messages, {"role": "assistant", "content": ""}]).ids[len(prompt) :][:1]
    else:
        tokenizer.chat_template = None
        prompt = [tokenizer.bos_token_id, *tokenizer.encode("首都？\n", add_special_tokens=False)]
        end = []
    [found] = choose_answers(model, tokenizer, [QUESTION], 4096)
    for choice, nats, tokens in zip(QUESTION.choices, found.nats, found.tokens):
        answer = tokenizer.encode(choice, add_special_tokens=False) + end
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        expected = -sum(float(logits[len(prompt) - 1 + n, token]) for n, token in enumerate(answer))
        assert nats == pytest.approx(expected, rel=1e-4)
        assert tokens == len(answer)


def test_each_way_divides_by_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    # Costs 6, 8, 5 of 3, 5, 2 tokens; 2, 16, 1 characters; 6, 16, 3 bytes.
    passages: list[Any] = [choices.Passage([0] * (n + 1), [False, *[True] * n]) for n in (3, 5, 2)]
    monkeypatch.setattr(choices, "_passage", lambda *_: passages.pop(0))
    monkeypatch.setattr(choices, "costs", lambda *_, **__: [6.0, 8.0, 5.0])
    [found] = choose_answers(None, None, [QUESTION], 1)  # type: ignore[arg-type]
    # Sums: 5 is least. By token 2, 1.6, 2.5. By character 3, 0.5, 5. By byte 1, 0.5, 1.67.
    assert found.by == {"sum": 2, "token": 1, "character": 1, "byte": 1}
    assert found.right(QUESTION) == {"sum": False, "token": False, "character": False, "byte": False}
