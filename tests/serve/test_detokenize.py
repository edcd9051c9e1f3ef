"""Streamed text: equal to the whole, whole characters only, no stop string and no near-miss withheld."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.model.load import load_tokenizer
from onecard.serve.detokenize import Detokenizer, StopStrings, TokenBytes

SHARED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_directory: Path) -> Any:
    return load_tokenizer(tiny_tokenizer_directory)


@pytest.fixture(scope="module")
def token_bytes(tokenizer: Any) -> TokenBytes:
    return TokenBytes(tokenizer)


def byte_token(tokenizer: Any, value: int) -> int:
    from onecard.serve.detokenize import _byte_alphabet

    character = next(char for char, byte in _byte_alphabet().items() if byte == value)
    return int(tokenizer.convert_tokens_to_ids(character))


def chunks_of(token_bytes: TokenBytes, ids: list[int], stops: list[str] | None = None) -> list[str]:
    stream = Detokenizer(token_bytes, stops or [])
    return [*(stream.feed(token) for token in ids), stream.finish()]


@SHARED
@given(ids=st.lists(st.integers(0, 383), max_size=40))
def test_random_ids_join_to_what_decode_gives(tokenizer: Any, token_bytes: TokenBytes, ids: list[int]) -> None:
    chunks = chunks_of(token_bytes, ids)
    final = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(chunks) == final
    # What was sent is never taken back.
    sent = ""
    for chunk in chunks:
        sent += chunk
        assert final.startswith(sent)


@pytest.mark.parametrize("text", ["周末七国分争", "👨‍👩‍👧 ok", "𠮷野家 héllo", "<tool_call>x</tool_call>"])
def test_no_chunk_of_valid_text_holds_a_replacement_character(
    tokenizer: Any, token_bytes: TokenBytes, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    chunks = chunks_of(token_bytes, ids)
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_character_cut_by_the_end_is_one_replacement_at_the_very_end(tokenizer: Any, token_bytes: TokenBytes) -> None:
    ids = [byte_token(tokenizer, value) for value in "好👍".encode()[:-1]]
    chunks = chunks_of(token_bytes, ids)
    assert chunks == ["", "", "好", "", "", "", "\ufffd"]
    assert "".join(chunks) == tokenizer.decode(ids)


def test_invalid_bytes_do_not_stall_the_stream(tokenizer: Any, token_bytes: TokenBytes) -> None:
    invalid, letter = byte_token(tokenizer, 0x80), byte_token(tokenizer, ord("a"))
    assert chunks_of(token_bytes, [invalid] * 5) == ["\ufffd"] * 5 + [""]
    beginning = byte_token(tokenizer, 0xF0)
    assert chunks_of(token_bytes, [beginning, letter]) == ["", "\ufffda", ""]


def test_special_tokens_are_silent_and_can_be_spelled(tokenizer: Any, token_bytes: TokenBytes) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_bytes(end) == b""
    assert token_bytes(end, special=True) == b"<|im_end|>"


@pytest.fixture(scope="module")
def sentencepiece_like() -> Any:
    """A tokenizer with word marks and byte tokens, as Llama 2 has."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁ab", "好"]
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_word_marks_and_byte_tokens(sentencepiece_like: Any) -> None:
    token_bytes = TokenBytes(sentencepiece_like)
    words = sentencepiece_like.convert_tokens_to_ids(["▁ab", "▁ab", "好", "b", "</s>"])
    emoji = sentencepiece_like.convert_tokens_to_ids([f"<0x{value:02X}>" for value in "👍".encode()])
    ids = [*words, *emoji, words[0]]
    assert chunks_of(token_bytes, ids) == ["ab", " ab", "好", "b", "", "", "", "", "👍", " ab", ""]
    assert sentencepiece_like.decode(ids, skip_special_tokens=True) == "ab ab好b👍 ab"
    continued = Detokenizer(token_bytes, continues=True)
    assert continued.feed(words[0]) == " ab"


def reference_cut(text: str, stops: list[str]) -> str:
    """Letter by letter: at the first place where a stop string ends, the text before the longest that ends there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab好", max_size=4), max_size=12),
    stops=st.lists(st.text("ab好", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    text, given_so_far, sent = "".join(pieces), "", ""
    wanted = reference_cut(text, stops)
    for piece in pieces:
        given_so_far += piece
        sent += matcher.feed(piece)
        assert wanted.startswith(sent)
        if not matcher.stopped:
            held = given_so_far[len(sent) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert matcher.stopped == (wanted != text or any(text.endswith(stop) for stop in stops))
    assert sent + matcher.flush() == wanted


def test_a_near_miss_is_sent_when_it_misses_and_at_the_end(tokenizer: Any, token_bytes: TokenBytes) -> None:
    ids = [byte_token(tokenizer, ord(letter)) for letter in "xENyEN"]
    assert chunks_of(token_bytes, ids, ["END"]) == ["x", "", "", "ENy", "", "", "EN"]
