"""Whether an answer keeps to what was asked of its form: checks that a row carries, each told without a judge.

In: an answer, and the row's `checks`. Out: which of them hold. The checks:

    language          zh, zh-Hant, en ...: what the answer is written in (zh alone stands for both scripts)
    min_characters, max_characters, min_words, max_words    lengths; a Chinese character counts as a word
    json              true: the whole answer is one JSON document; false: it is none
    contains, not_contains    a text, or a list of which all must stand (none may stand) in it; case does not count
    items, min_items, max_items    lines that begin as those of a list do: "- ", "1. ", "一、"
    starts_with, ends_with    but for space around the answer

It knows nothing of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from onecard.data.rules import language_of
from onecard.evaluate.repetition import units

_ITEM = re.compile(
    r"^\s*(?:[-*•·]\s+|[(（]?(?:\d{1,3}|[a-zA-Z])[.)）:：](?!\d)|\d{1,3}、|[一二三四五六七八九十]{1,3}[、.)）])",
    re.MULTILINE,
)


def _language(answer: str, wanted: str) -> bool:
    found = language_of(answer)
    return found == wanted or (wanted == "zh" and found == "zh-Hant")


def _is_json(answer: str) -> bool:
    try:
        json.loads(answer)
    except ValueError:
        return False
    return True


def _folded(texts: str | list[str]) -> list[str]:
    return [text.casefold() for text in ([texts] if isinstance(texts, str) else texts)]


def _words(answer: str) -> int:
    return len(units(answer, punctuation=False))


def list_items(answer: str) -> int:
    """How many lines of it begin as those of a list do."""
    return len(_ITEM.findall(answer))


_CHECKS: dict[str, tuple[type | tuple[type, ...], Callable[[str, Any], bool]]] = {
    "language": (str, _language),
    "min_characters": (int, lambda answer, least: len(answer.strip()) >= least),
    "max_characters": (int, lambda answer, most: len(answer.strip()) <= most),
    "min_words": (int, lambda answer, least: _words(answer) >= least),
    "max_words": (int, lambda answer, most: _words(answer) <= most),
    "json": (bool, lambda answer, wanted: _is_json(answer) is wanted),
    "contains": ((str, list), lambda answer, texts: all(text in answer.casefold() for text in _folded(texts))),
    "not_contains": ((str, list), lambda answer, texts: not any(text in answer.casefold() for text in _folded(texts))),
    "items": (int, lambda answer, wanted: list_items(answer) == wanted),
    "min_items": (int, lambda answer, least: list_items(answer) >= least),
    "max_items": (int, lambda answer, most: list_items(answer) <= most),
    "starts_with": (str, lambda answer, text: answer.strip().startswith(text)),
    "ends_with": (str, lambda answer, text: answer.strip().endswith(text)),
}


def fault_of(checks: Any) -> str:
    """What is wrong with the checks of a row, or nothing."""
    if not isinstance(checks, Mapping) or not checks:
        return "checks is not a table of checks"
    for name, value in checks.items():
        if name not in _CHECKS:
            return f"there is no check {name}; there are {', '.join(_CHECKS)}"
        kind, _ = _CHECKS[name]
        texts = value if isinstance(value, list) else []
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"{name} cannot be {value!r}"
        if not all(isinstance(text, str) for text in texts):
            return f"{name} holds something that is not text"
    return ""


def kept(answer: str, checks: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the checks (without fault) an answer passes, by name."""
    return {name: _CHECKS[name][1](answer, value) for name, value in checks.items()}
