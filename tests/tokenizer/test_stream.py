"""Documents of any length become the ids that they have when encoded whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.tokenizer import stream
from onecard.tokenizer.encoding import encoder_of
from onecard.tokenizer.special import PRE_TOKENIZERS
from onecard.tokenizer.stream import encode_arrays, encode_stream, safe_pieces
from onecard.tokenizer.template import encode_documents

PARTS = [
    "话说天下大势，分久必合，合久必分。", "the quick brown fox ", "don't I'LL ", "12345678901234567890", " ", "  ",
    "\n", "\n\n", "\t",
    "\r\n", "e\u0301", "é", "👍🏽", "<think>", "</think>", "<|im_end|>", "，", "。", "……", "--", "x=1;", "周末七国分争",
]  # fmt: skip


def text_of(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices(PARTS, k=count))


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    from onecard.tokenizer.train import train_model, wrap

    texts = [text_of(seed, 400) for seed in range(3)]
    return wrap(train_model(texts, vocabulary_size=500, pre_tokenizer=request.param, maximum_token_characters=16))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(20, 200))
def test_pieces_give_the_ids_of_the_whole(tokenizer: Any, seed: int, characters: int) -> None:
    encoder = encoder_of(tokenizer)
    text = text_of(seed, 300)
    pieces = list(safe_pieces(encoder, text, characters))
    assert "".join(pieces) == text
    assert len(pieces) > 1
    whole = encoder.plain.encode(text, add_special_tokens=False).ids
    assert [i for piece in pieces for i in encoder.inner.encode(piece, add_special_tokens=False).ids] == whole


def test_a_text_without_a_safe_place_stays_whole(tokenizer: Any) -> None:
    text = "天下" * 500
    assert list(safe_pieces(encoder_of(tokenizer), text, 100)) == [text]
    late = text + "，" + "分" * 300
    assert [len(piece) for piece in safe_pieces(encoder_of(tokenizer), late, 100)] == [1000, 301]


def test_a_cut_does_not_break_a_token_that_was_added(tokenizer: Any) -> None:
    """A letter ends and a mark begins inside <think>, which is one token: not a place to cut."""
    text = "<think>" * 100
    pieces = list(safe_pieces(encoder_of(tokenizer), text, 50))
    assert all(len(piece) % len("<think>") == 0 for piece in pieces)


def test_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    from tokenizers import pre_tokenizers

    from onecard.tokenizer.train import train_model, wrap

    model = train_model([text_of(1, 400)], vocabulary_size=400, pre_tokenizer="qwen2", maximum_token_characters=16)
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced = wrap(model)
    marked = text_of(2, 300)
    encoder = encoder_of(spaced)
    assert list(safe_pieces(encoder, marked, 100)) == [marked]  # a text begins anew behind <think>
    text = marked.replace("think", "")
    expected = encode_documents(spaced, [text])[0]
    pieces = list(safe_pieces(encoder, text, 100))
    assert len(pieces) > 3
    first = encoder.plain.encode(pieces[0], add_special_tokens=False).ids
    rest = [i for piece in pieces[1:] for i in encoder.inner.encode(piece, add_special_tokens=False).ids]
    assert [*first, *rest] == expected[1:-1]


def test_documents_as_arrays_are_those_as_lists(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["", "a\ud83db", text_of(5, 200), "的", text_of(6, 900)]
    expected = encode_documents(tokenizer, texts)
    assert [found.tolist() for found in encode_arrays(tokenizer, texts)] == expected
    # Batches and pieces end anywhere.
    monkeypatch.setattr(stream, "PIECE_CHARACTERS", 150)
    monkeypatch.setattr(stream, "BATCH_CHARACTERS", 400)
    made = encode_arrays(tokenizer, texts)
    assert [found.tolist() for found in made] == expected
    assert made[0].dtype == np.uint32
    streamed = list(encode_stream(tokenizer, [(f"s{n}", text) for n, text in enumerate(texts)]))
    assert [item.source for item in streamed] == ["s0", "s1", "s2", "s3", "s4"]
    assert [np.asarray(item.ids).tolist() for item in streamed] == expected


def test_nothing_gives_nothing(tiny_tokenizer_directory: Path) -> None:
    from onecard.model.load import load_tokenizer

    assert list(encode_stream(load_tokenizer(tiny_tokenizer_directory), [])) == []
