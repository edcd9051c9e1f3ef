"""What datatrove calls in benchmarks/clean.py: the cheapest splitting into words, and two filters."""

from __future__ import annotations

from typing import Any

import xxhash
from datatrove.utils.word_tokenizers import WordTokenizer


class Characters(WordTokenizer):  # type: ignore[misc]
    """Every character is a word, as 3-grams of Chinese have it."""

    def word_tokenize(self, text: str) -> list[str]:
        return list(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class Spaced(Characters):
    """Words are what stands between spaces."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def words_of(language: str) -> WordTokenizer:
    """The splitter of a language."""
    return Characters() if language == "zh" else Spaced()


def hashed(text: str) -> int:
    """The hash that it takes by itself; with xxhash 4 its own call fails, for that wants bytes."""
    return xxhash.xxh64_intdigest(text.encode())


def long_enough(document: Any) -> bool:
    """Twenty characters, as onecard has it."""
    return len(document.text) >= 20


def mostly_no_symbols(document: Any) -> bool:
    """At least half letters, digits and spaces."""
    text = document.text
    return sum(map(str.isalnum, text)) + sum(map(str.isspace, text)) >= 0.5 * len(text)
