"""Many texts together are found to be what each is found to be alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onecard.config import CleanConfig
from onecard.data import characters, rules
from onecard.data.dedup import word_hashes
from onecard.data.screening import screen
from onecard.data.steps import Steps

SOME = [
    *"abc XYZ\t\n\r\x00\x85\u2028一二三的，。！あア가ก🙂é\u0301\u200b\u00ad\ufeff\u200d\u00a0\ud83d12",
    "Ã©",
    "hello world ",
]


def texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    made = ["".join(draw.choices(SOME, k=draw.choice((0, 1, 5, 9, 10, 11, 300)))) for _ in range(40)]
    return [*made, "", "plain ascii only", "x" * 25_000, "一段重复的话，" * 60, ""]


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_each_alone(seed: int) -> None:
    given = texts(seed)
    for text, found in zip(given, screen(given)):
        codes = characters.codes_of(text)
        assert found.codes.tolist() == codes.tolist()
        assert found.counts == characters.count(codes)
        assert found.junk == characters.junk_in(codes)
        assert found.spans.tolist() == rules.span_hashes(codes).tolist()


def test_spans_in_any_place_are_numbered_alike() -> None:
    base, letters = 0x9E3779B97F4A7C15, "".join(random.Random(1).choices("abcdefgh", k=40_000))
    spans = rules.span_hashes(characters.codes_of(letters)).tolist()
    assert len(spans) == 40_000 - 9
    for place in (0, 16_374, 16_375, 16_383, 16_384, 32_768, 39_990):  # where portions end and begin, and between
        by_hand = sum(ord(letters[place + at]) * base ** (9 - at) for at in range(10)) % 2**64
        assert spans[place] == by_hand
    assert rules.span_hashes(characters.codes_of("nine char")).tolist() == []


@pytest.mark.parametrize("given", [[], [""], ["", ""], ["one"]])
def test_few_and_empty(given: list[str]) -> None:
    assert [found.text for found in screen(given)] == given


def test_steps_find_the_same_with_it_and_without() -> None:
    steps = Steps(CleanConfig(sources=["x"], maximum_repetition=0.3))
    given = texts(7)
    for text, found in zip(given, screen(given)):
        assert steps.apply(text, "auto", found) == steps.apply(text)


def test_words_are_the_same_wherever_they_stand() -> None:
    given = ["the cat\tsat", "", " cat ", "\u3000the\u2028the\n", "x", "ÉCOLE école", "hat the"]
    hashes, counts = word_hashes(given)
    assert counts.tolist() == [len(text.split()) for text in given]
    words = [word for text in given for word in text.split()]
    by_word: dict[str, int] = {}
    for word, found in zip(words, hashes.tolist()):
        assert by_word.setdefault(word, found) == found
    assert len(set(by_word.values())) == len(by_word) == 7
    many = [f"word{number}" for number in range(50_000)]
    found, _ = word_hashes([" ".join(many)])
    assert len(np.unique(found)) == 50_000
