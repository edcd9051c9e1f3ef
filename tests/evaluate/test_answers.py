"""Greedy answers: the same one by one or together, ended for the right reason, and compared with the reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard.evaluate.answers import Generated, answer_questions, context_tokens, generate
from onecard.evaluate.questions import Question
from onecard.model.load import load_model, load_tokenizer
from onecard.tokenizer.template import encode_chat, stop_token_ids


class SuccessorModel:
    """Expects after each token the next number, and has five rows more than its tokenizer has entries."""

    device = torch.device("cpu")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=12))

    def __call__(self, **arguments: Any) -> SimpleNamespace:
        return self.forward(**arguments)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> SimpleNamespace:
        following = torch.nn.functional.one_hot(input_ids[:, -1:] + 1, 105).float()
        following[:, :, 100:] = 9.0
        return SimpleNamespace(logits=following, past_key_values=None)


def successors(prompts: list[list[int]], limit: int = 4, batch_size: int = 2) -> list[Generated]:
    model: Any = SuccessorModel()
    return generate(
        model, prompts, stop_ids=[50, 60], vocabulary_size=100, limit=limit, batch_size=batch_size, advance=None
    )


def test_an_answer_ends_at_a_stop_token_or_at_its_longest_length() -> None:
    found = successors([[1, 47], [10], [58], [1, 2, 59]])
    assert found[0] == Generated([48, 49], "stop")
    assert found[1] == Generated([11, 12, 13, 14], "length")
    assert found[2] == Generated([59], "stop")
    assert found[3] == Generated([], "stop")


def test_an_answer_ends_where_the_context_ends() -> None:
    full = list(range(12))
    found = successors([full, full[:10], [], [3]], limit=50, batch_size=4)
    assert found[0] == Generated([], "length")
    assert found[1] == Generated([10, 11], "length")
    assert found[2] == Generated([], "length")
    assert found[3] == Generated(list(range(4, 15)), "length")


def test_context_is_what_the_model_says_else_1024() -> None:
    assert context_tokens(SuccessorModel.config) == 12
    assert context_tokens(SimpleNamespace(get_text_config=lambda: SimpleNamespace())) == 1024


@pytest.fixture(scope="module")
def tiny(tiny_model_directory: Path) -> Any:
    model = load_model(tiny_model_directory)
    # Small random weights answer every question alike; larger ones tell them apart.
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return SimpleNamespace(model=model, tokenizer=load_tokenizer(tiny_model_directory))


CHATS = [
    Question([{"role": "user", "content": question}], "", 0, answer={"role": "assistant", "content": reference})
    for question, reference in [
        ("你好", "你好！"),
        ("What is the capital of France, and what is it known for?", "Paris."),
        ("合久必分，下一句是什么？", "分久必合。"),
        ("hi", "hello"),
    ]
]
CHATS.append(
    Question(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        ],
        "",
        0,
        answer={"role": "assistant", "content": "4"},
    )
)


def test_answers_are_the_same_one_by_one_and_together(tiny: Any) -> None:
    alone = answer_questions(tiny.model, tiny.tokenizer, CHATS, 12, 1)
    together = answer_questions(tiny.model, tiny.tokenizer, CHATS, 12, 3)
    assert alone == together
    assert len({answer.text for answer in alone}) > 1
    assert [answer.question for answer in alone] == [chat.messages[-1]["content"] for chat in CHATS]
    assert [answer.reference for answer in alone] == [chat.reference for chat in CHATS]


def test_answers_are_those_of_the_whole_forward_pass(tiny: Any) -> None:
    """Every token is the likeliest after the conversation so far, which begins with one BOS and holds all turns."""
    stops = stop_token_ids(tiny.tokenizer)
    prompts = [encode_chat(tiny.tokenizer, c.messages, add_generation_prompt=True).ids for c in CHATS]
    found = generate(tiny.model, prompts, stop_ids=stops, vocabulary_size=len(tiny.tokenizer), limit=8, batch_size=5)
    for prompt, item in zip(prompts, found):
        assert prompt.count(tiny.tokenizer.bos_token_id) == 1
        with torch.no_grad():
            logits = tiny.model(input_ids=torch.tensor([prompt + item.ids])).logits[0]
        expected = logits.argmax(-1).tolist()[len(prompt) - 1 :]
        assert item.ids == expected[: len(item.ids)]
        if item.finish_reason == "stop":
            assert expected[-1] in stops


def test_what_was_asked_of_the_model_is_what_it_answers(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is decoded without control tokens, the tokens are counted, and progress is told."""
    words = tiny.tokenizer.encode("天下 hello", add_special_tokens=False)
    end = stop_token_ids(tiny.tokenizer)[0]
    script = iter([*words, end])

    class Scripted(SuccessorModel):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=512))

        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> SimpleNamespace:
            row = torch.nn.functional.one_hot(torch.tensor([[next(script)]]), len(tiny.tokenizer)).float()
            return SimpleNamespace(logits=row, past_key_values=None)

    done: list[float] = []
    model: Any = Scripted()
    [answer] = answer_questions(model, tiny.tokenizer, CHATS[:1], 50, 4, advance=done.append)
    assert answer.text == "天下 hello"
    assert answer.finish_reason == "stop"
    assert answer.tokens == len(words)
    assert done == [1]
    # Cut off within a character (its first byte alone is a token here): the answer ends before it.
    torn = tiny.tokenizer.encode("好\U0001f9ff", add_special_tokens=False)
    assert tiny.tokenizer.decode(torn[:-1]).endswith("\ufffd")
    script = iter(torn)
    [answer] = answer_questions(model, tiny.tokenizer, CHATS[:1], len(torn) - 1, 4)
    assert (answer.text, answer.finish_reason) == ("好", "length")


def test_padding_does_not_move_the_positions_of_a_model_that_learned_them() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config).eval()
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21], [30]]

    def continued(batch_size: int) -> list[Generated]:
        return generate(model, prompts, stop_ids=[], vocabulary_size=64, limit=50, batch_size=batch_size)

    assert continued(1) == continued(3)
    assert [len(item.ids) for item in continued(3)] == [24, 30, 31]  # to the end of the 32 positions
