"""Rendered chats and plain text become ids without a user's text ever becoming a control token.

In: a tokenizer, and text in which the control tokens that a message spells were replaced by characters that occur
nowhere else. Out: ids. Works on copies of the tokenizer's backend, in which nobody changes truncation or padding; knows
neither messages nor templates.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onecard.errors import ConfigError
from onecard.tokenizer.messages import map_strings

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast


class Spelled:
    """Control tokens that occur in the messages as text, each replaced by a character that occurs nowhere in them."""

    def __init__(self, pattern: re.Pattern[str], found: set[str], taken: set[str]) -> None:
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in taken)
        self._characters = {token: next(free) for token in sorted(found)}
        self._tokens = {character: token for token, character in self._characters.items()}
        self._pattern = pattern

    def hide(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._characters[match[0]], text) if self._characters else text

    def restore(self, text: str) -> str:
        for character, token in self._tokens.items():
            text = text.replace(character, token)
        return text

    def in_text(self, text: str) -> bool:
        return any(character in text for character in self._tokens)


class Encoder:
    """Copies of a tokenizer's backend, in which no setting (truncation, padding) can be changed by others."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.size = len(tokenizer)
        self._source = tokenizer.backend_tokenizer.to_str()
        added = tokenizer.added_tokens_decoder
        self.control = {token.content: index for index, token in added.items() if token.special and token.content}
        self.markup = [token.content for token in added.values() if not token.special and token.content]
        longest_first = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def full(self) -> Tokenizer:
        """Parses control tokens, as the template's own text needs."""
        return self._copy(lambda description: None)

    @cached_property
    def plain(self) -> Tokenizer:
        """Takes control tokens for text."""
        made = self._copy(lambda description: None)
        made.encode_special_tokens = True
        return made

    @cached_property
    def inner(self) -> Tokenizer:
        """`plain` for a text that goes on in the middle: no space is put before it."""
        made = self._copy(_without_prefix)
        made.encode_special_tokens = True
        return made

    @cached_property
    def puts_space(self) -> bool:
        """Whether a text by itself is encoded otherwise than one that goes on in the middle."""
        return self.plain.to_str() != self.inner.to_str()

    def _copy(self, edit: Callable[[Any], None]) -> Tokenizer:
        from tokenizers import Tokenizer

        description = json.loads(self._source)
        description["truncation"] = description["padding"] = description["post_processor"] = None
        edit(description)
        made: Tokenizer = Tokenizer.from_str(json.dumps(description))
        return made

    def spelled(self, values: Any) -> Spelled:
        found: set[str] = set()
        taken: set[str] = set()

        def look(text: str) -> str:
            found.update(self.pattern.findall(text))
            taken.update(text)
            return text

        map_strings(values, look)
        return Spelled(self.pattern, found, taken)

    def encode(self, text: str, spelled: Spelled, answers: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Ids of a rendered chat, and which answer each belongs to (-1: none); `answers` are (start, end) in the text.

        The text is cut at the genuine control tokens; a run between two of them is encoded anew if it holds a spelled
        control token or the start of an answer.
        """
        encoding = self.full.encode(text, add_special_tokens=False)
        ids: list[int] = []
        owners: list[int] = []

        def put(some: list[int], start: int) -> None:
            ids.extend(some)
            owner = next((number for number, (first, last) in enumerate(answers) if first <= start < last), -1)
            owners.extend([owner] * len(some))

        token = position = 0
        for mark, start, end in [*self._marks(text, encoding), (len(encoding.ids), len(text), len(text))]:
            if mark > token:
                # At most one answer begins between two control tokens: the one before it ended with one.
                begin = next((first for first, _ in answers if position < first < start), start)
                self._put_run(
                    encoding.ids[token:mark], (text[position:begin], text[begin:start]), position, spelled, put
                )
            put(encoding.ids[mark : mark + 1], start)
            token, position = mark + 1, end
        return ids, owners

    def _marks(self, text: str, encoding: Encoding) -> list[tuple[int, int, int]]:
        """(index, start, end) of each genuine control token; an unknown token stands for other text than its own."""
        names = {index: name for name, index in self.control.items()}
        return [
            (n, start, end)
            for n, (index, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets))
            if index in names and names[index] in text[start:end]
        ]

    def _put_run(
        self,
        ids: list[int],
        parts: tuple[str, str],
        start: int,
        spelled: Spelled,
        put: Callable[[list[int], int], None],
    ) -> None:
        """Put the ids of the text between two control tokens, cut into `parts` where an answer begins."""
        run = "".join(parts)
        if not parts[1] and not spelled.in_text(run):
            put(ids, start)
            return
        encode = self._faithful(run, ids)
        before, after = (spelled.restore(part) for part in parts)
        whole = encode(before + after)
        if not after:
            put(whole.ids, start)
            return
        left = encode(before).ids
        kept = sum(last <= len(before) for _, last in whole.offsets)
        right = whole.ids[kept:]
        if whole.ids[:kept] != left or any(first < len(before) for first, _ in whole.offsets[kept:]):
            right = self.inner.encode(after, add_special_tokens=False).ids
        put(left, start)
        put(right, start + len(parts[0]))

    def _faithful(self, run: str, ids: list[int]) -> Callable[[str], Encoding]:
        """The copy that encodes this run, taken by itself, as it was encoded within the whole chat."""
        for copy in (self.plain, self.inner):
            if copy.encode(run, add_special_tokens=False).ids == ids:
                return lambda text, copy=copy: copy.encode(text, add_special_tokens=False)  # type: ignore[misc]
        raise ConfigError(
            "This tokenizer splits a text otherwise alone than within a chat, so that control tokens spelled in a "
            "message cannot be kept as text.",
            "Remove them from the messages, or use another tokenizer.",
        )


def _without_prefix(description: Any) -> None:
    """Switch off, in a tokenizer's description, every way to put a space before a text."""
    if isinstance(description, list):
        for item in description:
            _without_prefix(item)
    elif isinstance(description, dict):
        if description.get("type") == "Metaspace":
            description["prepend_scheme"] = "never"
        if description.get("type") == "ByteLevel":
            description["add_prefix_space"] = False
        if description.get("type") == "Prepend":
            description["prepend"] = ""
        for key in ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers"):
            _without_prefix(description.get(key))


_encoders: weakref.WeakKeyDictionary[Any, Encoder] = weakref.WeakKeyDictionary()


def encoder_of(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """The encoder of a tokenizer, made once (and again after tokens were added to it)."""
    known = _encoders.get(tokenizer)
    if known is None or known.size != len(tokenizer):
        known = _encoders[tokenizer] = Encoder(tokenizer)
    return known
