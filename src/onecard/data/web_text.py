"""What the web leaves in a text: navigation and boilerplate, the filler of forums, advertisements.

In: one text. Out: the text without it. A line goes only where it is nothing else: prose that speaks of copyrights,
sofas or WeChat stays, and so do fenced code, tables, and what Markdown marks as a heading or a list. The words and
patterns stand in web_text.toml.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

_LONGEST_LINE_CHARACTERS = 90
_LONGEST_ITEM_CHARACTERS = 24
_LONGEST_NOTICE_CHARACTERS = 400
_LONGEST_FILLER_CHARACTERS = 24
_LONGEST_ADVERTISEMENT_CHARACTERS = 160
_COUNTED_CHARACTERS = 80  # of a sentence without an end in sight not more than this is the advertisement
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 160, 300
_TAIL_SENTENCES = 6
_MENU_ITEMS = 3  # so many in a row or in a column are a menu
_FRAME = " \t\u3000:：>»›<«‹[]【】()（）|·.…!！,，。-—_↑↓←→▲▼■◆►"
_PADDING = " \t\u3000!！.。,，~～…?？:：;；^_、)）(（][【】\"“”'=>"
# With these begin headings, lists and tables.
_MARKDOWN = frozenset("#*-|")
# With these a line may begin before a phrase or a count of comments.
_BEGINNINGS = frozenset(_FRAME) - frozenset(" \t\u3000") | frozenset("0123456789")
_MENU_SEPARATOR = re.compile(r"\s*[|｜·•»›>/]\s*|\s{2,}|[\t\u3000]+| - ")
_MENU_MARKS = ("|", "｜", "  ", "\u3000", "»", "·", ">", " - ")
_COMMENT_COUNT = re.compile(r"\d+ (comments?|replies|views|shares|likes)", re.IGNORECASE)
_SENTENCE_ENDS = "。！？!?\n"
_SENTENCE_END = re.compile("[。！？!?\n]+")
_SENTENCES = re.compile(r"[^。！？!?\n]+[。！？!?]*")
_ENDINGS = "。！？!~～哦 \t\u3000\n"


@dataclass(frozen=True, slots=True)
class _Phrases:
    """web_text.toml, ready for use."""

    phrases: frozenset[str]
    menu_items: frozenset[str]
    starts: dict[str, re.Pattern[str]]
    beginnings: frozenset[str]
    anywhere_words: tuple[str, ...]
    anywhere: re.Pattern[str]
    head_words: tuple[str, ...]
    head: re.Pattern[str]
    tail_words: tuple[str, ...]
    tail: re.Pattern[str]
    filler: re.Pattern[str]
    filler_beginnings: frozenset[str]
    ambiguous: frozenset[str]
    forum_signs: re.Pattern[str]
    chinese_beginnings: re.Pattern[str]
    chinese_marks: tuple[str, ...]
    english_marks: tuple[bytes, ...]
    advertisement: re.Pattern[str]


@functools.cache
def _known() -> _Phrases:
    tables = tomllib.loads((resources.files("onecard.data") / "web_text.toml").read_text(encoding="utf-8"))
    boilerplate, forum, advertisement = tables["boilerplate"], tables["forum"], tables["advertisement"]
    starts = {
        first: re.compile(entry["pattern"], re.IGNORECASE)
        for entry in boilerplate["starts"]
        for first in entry["first"].split()
    }
    phrases = _words(boilerplate["phrases"])
    first_two = {phrase[:2] for phrase in (*phrases, *starts)}
    return _Phrases(
        phrases=phrases,
        beginnings=frozenset(form for two in first_two for form in (two, two.upper(), two.title())),
        menu_items=_words(boilerplate["menu_items"]),
        starts=starts,
        anywhere_words=tuple(boilerplate["anywhere_words"]),
        anywhere=_any_of(boilerplate["anywhere"]),
        head_words=tuple(boilerplate["head_words"]),
        head=_any_of(boilerplate["head"]),
        tail_words=tuple(boilerplate["tail_words"]),
        tail=_any_of(boilerplate["tail"]),
        filler=re.compile(f"(?:{_any_of(forum['filler']).pattern})+", re.IGNORECASE),
        filler_beginnings=frozenset(forum["beginnings"]) | frozenset(_PADDING),
        ambiguous=_words(forum["ambiguous"]),
        forum_signs=_any_of(forum["signs"]),
        chinese_beginnings=_beginnings_of(advertisement["chinese_marks"]),
        chinese_marks=tuple(advertisement["chinese_marks"]),
        english_marks=tuple(mark.encode() for mark in advertisement["english_marks"]),
        advertisement=_any_of(advertisement["patterns"]),
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.strip().split("\n"))


def _beginnings_of(words: Any) -> re.Pattern[str]:
    """Any character that begins one of the words and any that is second in one: the quickest test that there is."""
    return re.compile("[{}][{}]".format("".join(word[0] for word in words), "".join(word[1] for word in words)))


def _any_of(patterns: Any) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


def _touchable(text: str, lines: Sequence[str]) -> list[bool]:
    """For each line whether rules may take it away: not in fenced code, not a row of a table."""
    if "```" not in text and "~~~" not in text and "|" not in text:
        return [True] * len(lines)
    fenced = False
    free = []
    for line in lines:
        start = line.lstrip()[:3]
        fence = start in ("```", "~~~")
        fenced = fenced != fence
        free.append(not fenced and not fence and not start.startswith("|"))
    return free


def _without(text: str, lines: list[str], junk: Sequence[bool]) -> list[str]:
    if not any(junk):
        return lines
    return [line for line, bad, free in zip(lines, junk, _touchable(text, lines)) if not (bad and free)]


# --- navigation and boilerplate -----------------------------------------------------------------------------------


def without_boilerplate(text: str) -> tuple[str, int]:
    """The text without navigation and boilerplate, and how many lines and sentences of it went."""
    known = _known()
    lines = text.split("\n")
    short = len(lines) > 1 or len(text) <= _LONGEST_NOTICE_CHARACTERS
    words = [word for word in known.anywhere_words if word in text] if short else []
    marks = [mark for mark in _MENU_MARKS if mark in text] if short else []
    # Hardly any line begins like a phrase that is known, and then nothing more is asked of it.
    junk = [
        ((line[:2] in known.beginnings or line[:1] in _BEGINNINGS) and _is_notice(line, known))
        or (bool(words) and _holds(line, words) and known.anywhere.fullmatch(line.strip(_FRAME)) is not None)
        or (bool(marks) and _holds(line, marks) and _is_menu(line, known.menu_items))
        for line in lines
    ]
    kept = _without(text, lines, junk)
    if len(kept) >= _MENU_ITEMS:
        kept = _without_columns(text, kept, known.menu_items)
    removed = len(lines) - len(kept)
    if removed:
        text = "\n".join(kept).strip("\n")
    text, sentences = _without_frame(text, known)
    return text, removed + sentences


def _holds(line: str, words: Sequence[str]) -> bool:
    return len(line) <= _LONGEST_NOTICE_CHARACTERS and line[:1] not in _MARKDOWN and any(word in line for word in words)


def _is_notice(line: str, known: _Phrases) -> bool:
    """Whether a line is one of the phrases, or begins like a notice and goes on like one."""
    length = len(line)
    if length > _LONGEST_NOTICE_CHARACTERS or line[0] in _MARKDOWN:
        return False
    bare = line.strip(_FRAME)
    pattern = known.starts.get(bare[:2].lower())
    if pattern is not None and pattern.fullmatch(bare):
        return True
    if length > _LONGEST_LINE_CHARACTERS:
        return False
    return bare.lower() in known.phrases or (bare[:1].isdigit() and _COMMENT_COUNT.fullmatch(bare) is not None)


def _is_menu(line: str, menu_items: frozenset[str]) -> bool:
    """Whether a line is a row of short items, of which at least two, and a third of all, belong to menus of sites."""
    items = [item.lower() for item in _MENU_SEPARATOR.split(line.strip()) if item]
    if len(items) < _MENU_ITEMS or max(map(len, items)) > _LONGEST_ITEM_CHARACTERS:
        return False
    found = sum(item in menu_items for item in items)
    return found >= max(2, len(items) / 3)


def _without_columns(text: str, lines: list[str], menu_items: frozenset[str]) -> list[str]:
    """Without runs of lines that each are one item of a menu."""
    items = [
        0 < len(line) <= _LONGEST_ITEM_CHARACTERS
        and line[0] not in _MARKDOWN
        and line.strip(_FRAME).lower() in menu_items
        for line in lines
    ]
    if sum(items) < _MENU_ITEMS:
        return lines
    kept: list[str] = []
    for is_item, run in itertools.groupby(
        zip(lines, items, _touchable(text, lines)), key=lambda each: each[1] and each[2]
    ):
        found = [line for line, _, _ in run]
        if not (is_item and len(found) >= _MENU_ITEMS):
            kept += found
    return kept


def _without_frame(text: str, known: _Phrases) -> tuple[str, int]:
    """Without the call to follow an account at the head, and without the credits, notices and calls at the end."""
    removed = 0
    head = text[:_HEAD_CHARACTERS]
    if any(word in head for word in known.head_words):
        shorter, removed = known.head.subn("", head)
        text = shorter + text[_HEAD_CHARACTERS:]
    for _ in range(_TAIL_SENTENCES):
        tail = text[-_TAIL_CHARACTERS:]
        if not any(word in tail for word in known.tail_words):
            break
        length = next((n for n in _last_sentences(tail) if known.tail.fullmatch(tail[-n:].strip(_ENDINGS))), 0)
        if not length:
            break
        text = text[:-length].rstrip()
        removed += 1
    return text, removed


def _last_sentences(text: str) -> Iterator[int]:
    """The lengths of the last sentence, and of its last part after a space."""
    body = text.rstrip(_ENDINGS)
    for ends in ("。！？\n", " \t\u3000"):
        start = max(body.rfind(end) for end in ends) + 1
        if start:
            yield len(text) - start


# --- forums -------------------------------------------------------------------------------------------------------


def without_filler(text: str) -> tuple[str, int]:
    """The text without lines that are nothing but the filler of forums, and how many went."""
    known = _known()
    lines = text.split("\n")
    words = [_filler(line, known) for line in lines]
    if not any(words):
        return text, 0
    certain = (
        any(word and word not in known.ambiguous for word in words)
        or all(word or not line for word, line in zip(words, lines))
        or any(known.forum_signs.search(line) for word, line in zip(words, lines) if not word)
    )
    if not certain:
        return text, 0
    kept = [line for line, word, free in zip(lines, words, _touchable(text, lines)) if not (word and free)]
    return "\n".join(kept).strip("\n"), len(lines) - len(kept)


def _filler(line: str, known: _Phrases) -> str:
    """What the line says, if that is filler alone; else an empty string."""
    if not 0 < len(line) <= _LONGEST_FILLER_CHARACTERS or line[0].lower() not in known.filler_beginnings:
        return ""
    bare = line.strip(_PADDING).lower()
    return bare if bare and known.filler.fullmatch(bare) else ""


# --- advertisements -----------------------------------------------------------------------------------------------


def without_advertisements(text: str, *, chinese: bool) -> tuple[str, int, float]:
    """The text without short lines that advertise; how many went; and the share (0 to 1) of the text that advertised.

    From a text of one line nothing is cut.
    """
    known = _known()
    sentences = _chinese_candidates(text, known) if chinese else _english_candidates(text, known)
    advertising = sum(
        min(len(sentence), _COUNTED_CHARACTERS) for sentence in sentences if known.advertisement.search(sentence)
    )
    if not advertising:
        return text, 0, 0.0
    share = advertising / len(text)
    lines = text.split("\n")
    if len(lines) == 1:
        return text, 0, share
    junk = [
        len(line) <= _LONGEST_ADVERTISEMENT_CHARACTERS and known.advertisement.search(line) is not None
        for line in lines
    ]
    kept = _without(text, lines, junk)
    removed = len(lines) - len(kept)
    return ("\n".join(kept).strip("\n") if removed else text), removed, share


def _chinese_candidates(text: str, known: _Phrases) -> Iterator[str]:
    """The sentences with a word that advertisements hardly do without."""
    done = 0
    for mark in known.chinese_beginnings.finditer(text):
        if mark.start() < done or not text.startswith(known.chinese_marks, mark.start()):
            continue
        start = max(text.rfind(end, done, mark.start()) for end in _SENTENCE_ENDS) + 1
        end = _SENTENCE_END.search(text, mark.end())
        done = end.end() if end else len(text)
        yield text[max(start, 0) : done]


def _english_candidates(text: str, known: _Phrases) -> Iterator[str]:
    """All sentences, if such a word is anywhere: a search in bytes is several times as fast as one in characters."""
    data = text.encode("utf-8", "surrogatepass")
    if any(mark in data for mark in known.english_marks):
        for sentence in _SENTENCES.finditer(text):
            yield sentence[0]
