"""Chats become tokens for fine-tuning: what is kept, what is learned of it, what stands out, three rows to look at.

In: the settings of `finetune` and a tokenizer. Out: encoded rows for training and held out; facts as counts; and what a
person should see before a run (`Look`). Nothing is dropped without a reason and a count. Knows neither model nor loop.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import FinetuneConfig
from onecard.data import contamination
from onecard.data.chats import Chat, read_chats
from onecard.data.records import Rejection, refuse
from onecard.data.row_checks import RowChecks, sentences
from onecard.data.split import question_is_held_out
from onecard.data.tokens import Encoded
from onecard.errors import DataError
from onecard.report import Page
from onecard.tokenizer.template import encode_chat

SHOWN_ROWS = 3
_SHOWN_CHARACTERS = 400
LOOK = "rows.json"
"""Where a run keeps what it found out about its rows, for its report."""

Pieces = list[tuple[str, bool]]


@dataclass
class ChatRows:
    """The rows of a fine-tuning: encoded, by split; `facts` counts them, `look` is for a person (JSON-able)."""

    splits: dict[str, list[Encoded]]
    facts: dict[str, Any]
    look: dict[str, Any]


@dataclass
class _Tally:
    """What became of the rows: read = kept + dropped; truncated are among the kept."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    learned_tokens: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)


def read(config: FinetuneConfig, tokenizer: Any, reject: Callable[[Rejection], object]) -> ChatRows:
    """Encode every chat and put it into train or held_out by its first question; what is dropped goes to `reject`.

    DataError where no row can be used (or, with `strict`, at the first that cannot).
    """
    tally, checks = _Tally(), RowChecks()
    splits: dict[str, list[Encoded]] = {"train": [], "held_out": []}
    trained: list[tuple[Chat, Encoded]] = []

    def drop(rejection: Rejection) -> None:
        tally.read += 1
        tally.dropped[rejection.reason] += 1
        reject(rejection)

    with tempfile.TemporaryDirectory() as folder:
        contamination.prepare(config.decontaminate, Path(folder))
        for chat in read_chats(config.sources, strict=config.strict, reject=drop):
            reason = _evaluated(config, Path(folder), chat)
            encoded = None if reason else _encode(config, tokenizer, chat, tally, drop)
            if reason:
                drop(Rejection("question_in_evaluation", chat.file, chat.line, f"{reason} | {_text(chat)}"))
            if encoded is None:
                continue
            held_out = question_is_held_out(config.seed, config.held_out, chat.messages)
            splits["held_out" if held_out else "train"].append(encoded)
            checks.add(chat.messages, held_out=held_out, place=f"{Path(chat.file).name}:{chat.line}")
            if not held_out:
                trained.append((chat, encoded))
    facts = {
        "read": tally.read,
        "kept": tally.kept,
        "held_out": len(splits["held_out"]),
        "dropped": dict(tally.dropped),
        "truncated": tally.truncated,
        "tokens": tally.tokens,
        "learned_tokens": tally.learned_tokens,
    }
    look = {"findings": checks.findings(), "shown": [_shown(tokenizer, *pair) for pair in _examples(trained)]}
    return ChatRows(splits, facts, look)


def _encode(
    config: FinetuneConfig, tokenizer: Any, chat: Chat, tally: _Tally, drop: Callable[[Rejection], None]
) -> Encoded | None:
    """The ids of a chat and which are learned; None (counted) if it repeats another or keeps no learned token."""
    mark = artifact.hash_json([chat.messages, chat.tools])
    if mark in tally.seen:
        drop(Rejection("exact_duplicate", chat.file, chat.line, _text(chat)))
        return None
    tally.seen.add(mark)
    try:
        encoded = encode_chat(tokenizer, chat.messages, tools=chat.tools, learn=config.learn)
    except DataError as fault:  # such as a role that the template does not know
        rejection = Rejection("refused_by_template", chat.file, chat.line, f"{fault.what} | {_text(chat)}")
        refuse(rejection, strict=config.strict, reject=drop)
        return None
    ids, learned = encoded.ids[: config.row_tokens], encoded.assistant_mask[: config.row_tokens]
    if not any(learned):
        reason = "answer_beyond_max_length" if any(encoded.assistant_mask) else "nothing_to_learn"
        drop(Rejection(reason, chat.file, chat.line, _text(chat)))
        return None
    tally.read += 1
    tally.kept += 1
    tally.truncated += len(ids) < len(encoded.ids)
    tally.tokens += len(ids)
    tally.learned_tokens += sum(learned)
    return Encoded(chat.source, ids, learned)


def _evaluated(config: FinetuneConfig, folder: Path, chat: Chat) -> str | None:
    """The evaluation row that a question of the chat stands in, as file:line."""
    if not config.decontaminate:
        return None
    questions = [str(message["content"]) for message in chat.messages if message["role"] == "user"]
    return next((found for text in questions if (found := contamination.shared_with(folder, text))), None)


def _text(chat: Chat) -> str:
    return json.dumps(chat.messages, ensure_ascii=False)


# --- three rows to look at ----------------------------------------------------------------------------------------


def _examples(trained: Sequence[tuple[Chat, Encoded]]) -> list[tuple[Chat, Encoded]]:
    """The first row, the middle one, and that with the most turns (the last, where all have as many)."""
    if len(trained) <= SHOWN_ROWS:
        return list(trained)
    most = max(range(len(trained)), key=lambda place: (len(trained[place][0].messages), place))
    return [trained[place] for place in sorted({0, len(trained) // 2, most})]


def _shown(tokenizer: Any, chat: Chat, encoded: Encoded) -> dict[str, Any]:
    """Where a row stands, and its text as the model reads it, in pieces that are learned or not."""
    assert encoded.learned is not None
    pieces: Pieces = []
    start = 0
    for end in range(1, len(encoded.ids) + 1):
        if end == len(encoded.ids) or encoded.learned[end] != encoded.learned[start]:
            text = tokenizer.decode(
                list(encoded.ids[start:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            pieces.append((_middle_left_out(text), bool(encoded.learned[start])))
            start = end
    return {
        "place": f"{Path(chat.file).name}:{chat.line}",
        "tokens": len(encoded.ids),
        "learned_tokens": sum(encoded.learned),
        "pieces": pieces,
    }


def _middle_left_out(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def say(look: dict[str, Any], *, as_result: bool = False) -> None:
    """Show the three rows and what stands out: as notes beside a run, or as what was asked for."""
    for row in look["shown"]:
        console.learned(
            f"row {row['place']}: {row['learned_tokens']:,} of {row['tokens']:,} tokens are learned",
            [(text, bool(learned)) for text, learned in row["pieces"]],
            as_result=as_result,
        )
    warnings, remarks = sentences(look["findings"])
    for text in warnings:
        console.warn(text)
    for text in remarks:
        if as_result:
            console.result(text)
        else:
            console.note(f"  {text}")


def on_page(page: Page, look: dict[str, Any]) -> None:
    """The same in the report of a run."""
    page.heading("What it learned from")
    for row in look["shown"]:
        page.marked(
            [(text, bool(learned)) for text, learned in row["pieces"]],
            f"{row['place']}: marked is what is learned, {row['learned_tokens']:,} of {row['tokens']:,} tokens",
        )
    for text in [line for some in sentences(look["findings"]) for line in some]:
        page.paragraph(text)
