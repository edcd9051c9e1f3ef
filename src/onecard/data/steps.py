"""The named steps that a text walks through, in the order of the settings: each mends it, or refuses it with a reason.

In: one text and its language ("auto": to be found). Out: an Outcome. Pure, and the same in every process: `Steps`
holds its settings alone, so that workers can be handed one. Knows nothing of files, duplicates and other documents.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onecard.config import CleanConfig, PersonalDataKind
from onecard.data import characters, personal_data, rules, web_text
from onecard.data.familiarity import familiarity_with
from onecard.errors import MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from onecard.data.characters import Codes, Counts
    from onecard.data.screening import Screened

# Fewer digits hold no personal number: an IP address has four, a licence plate may have one.
_FEWEST_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one text; `reason` is None for a kept one.

    `changes` counts what was mended by each step, such as {"boilerplate": 3} for three lines that went; what is masked
    is counted by its kind, such as "personal_data: email". `unicode` and `chinese` count a text once.
    """

    text: str
    language: str
    reason: str | None = None
    detail: str = ""
    changes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """What one step did to a text: the text before it and after it, or the reason for which it refused the text."""

    step: str
    before: str
    after: str
    count: int
    reason: str | None = None
    detail: str = ""


class _Draft:
    """A text on its way; its characters are counted once for all steps that ask, and again when it has changed."""

    def __init__(self, text: str, language: str, screened: Screened | None) -> None:
        self.text = text
        self._screened = screened
        self.given_language = language
        self.language = "" if language == "auto" else language
        self.reason: str | None = None
        self.detail = ""
        self.changes: dict[str, int] = {}
        self._counted: tuple[str, Codes, Counts] | None = None

    @property
    def codes(self) -> Codes:
        return self._count()[1]

    @property
    def counts(self) -> Counts:
        return self._count()[2]

    def _count(self) -> tuple[str, Codes, Counts]:
        screened = self._screened
        if screened is not None and screened.text is self.text:
            return screened.text, screened.codes, screened.counts
        if self._counted is None or self._counted[0] is not self.text:
            codes = characters.codes_of(self.text)
            self._counted = self.text, codes, characters.count(codes)
        return self._counted

    @property
    def junk(self) -> int:
        """What characters.junk_in finds."""
        screened = self._screened
        if screened is not None and screened.text is self.text:
            return screened.junk
        return characters.junk_in(self.codes)

    @property
    def spans(self) -> NDArray[np.uint64]:
        """What rules.span_hashes finds."""
        screened = self._screened
        return screened.spans if screened is not None and screened.text is self.text else rules.span_hashes(self.codes)

    def known_language(self) -> str:
        """The language, found if no step has said it yet."""
        if not self.language:
            self.language = rules.language_by(self.text, self.counts)
        return self.language

    def mend(self, what: str, text: str, count: int) -> None:
        """Take another text."""
        if count:
            self.text = text
            self.changes[what] = self.changes.get(what, 0) + count

    def refuse(self, reason: str, detail: str = "") -> None:
        """End the text's way."""
        self.reason, self.detail = reason, detail


# --- the steps ----------------------------------------------------------------------------------------------------


def _unicode(draft: _Draft, config: CleanConfig) -> None:
    tidied = rules.normalise(draft.text, draft.junk)
    draft.mend("unicode", tidied, int(tidied != draft.text))
    if not draft.text:
        draft.refuse("empty")
    elif rules.is_garbled(draft.text):
        draft.refuse("garbled")


def _language(draft: _Draft, config: CleanConfig) -> None:
    language = draft.known_language()
    # A name includes its branches: zh is both ways of writing Chinese.
    if config.languages and not any(language == name or language.startswith(f"{name}-") for name in config.languages):
        draft.refuse("other_language", language)


def _boilerplate(draft: _Draft, config: CleanConfig) -> None:
    text, removed = web_text.without_boilerplate(draft.text)
    draft.mend("boilerplate", text, removed)
    if not text:
        draft.refuse("boilerplate")


def _forum_filler(draft: _Draft, config: CleanConfig) -> None:
    text, removed = web_text.without_filler(draft.text)
    draft.mend("forum_filler", text, removed)
    if not text:
        draft.refuse("forum_filler")


def _advertisements(draft: _Draft, config: CleanConfig) -> None:
    chinese = draft.known_language().startswith("zh")
    text, removed, share = web_text.without_advertisements(draft.text, chinese=chinese)
    if share > config.maximum_advertising or not text:
        draft.refuse("advertisement", f"{share:.0%} advertising")
        return
    draft.mend("advertisements", text, removed)


def _length(draft: _Draft, config: CleanConfig) -> None:
    if len(draft.text) < config.minimum_characters:
        count = len(draft.text)
        draft.refuse("too_short", f"{count} character{'' if count == 1 else 's'}")


def _symbols(draft: _Draft, config: CleanConfig) -> None:
    counts = draft.counts
    visible = max(counts.visible, 1)
    for reason, share, limit, word in (
        ("too_many_symbols", counts.symbol / visible, config.maximum_symbol_ratio, "symbols"),
        ("too_much_punctuation", counts.punctuation / visible, config.maximum_punctuation_ratio, "punctuation"),
    ):
        if share > limit:
            draft.refuse(reason, f"{share:.0%} {word}")
            return


def _repetition(draft: _Draft, config: CleanConfig) -> None:
    if rules.is_surely_varied(draft.text, config.maximum_repetition):
        return
    share = rules.repetition(draft.text, draft.spans)
    if share > config.maximum_repetition:
        draft.refuse("too_repetitive", f"{share:.0%} repeated")


def _personal_data(draft: _Draft, config: CleanConfig) -> None:
    kinds = config.personal_data_kinds
    if config.personal_data == "keep" or not _may_hold_personal_data(draft, kinds):
        return
    chinese = draft.known_language().startswith("zh")
    text, found = personal_data.masked(draft.text, kinds, chinese=chinese)
    if found and config.personal_data == "drop":
        draft.refuse("personal_data", ", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))
        return
    for kind, count in found.items():
        draft.mend(f"personal_data: {kind}", text, count)


def _may_hold_personal_data(draft: _Draft, kinds: list[PersonalDataKind]) -> bool:
    return draft.counts.digit >= _FEWEST_DIGITS or "@" in draft.text or "name" in kinds


def _chinese(draft: _Draft, config: CleanConfig) -> None:
    if config.chinese == "keep" or not draft.known_language().startswith("zh"):
        return
    converted = _converter(config.chinese).convert(draft.text)
    draft.mend("chinese", converted, int(converted != draft.text))
    draft.language = "zh" if config.chinese == "simplified" else "zh-Hant"


@functools.cache
def _converter(direction: str) -> Any:
    from opencc import OpenCC

    return OpenCC("t2s" if direction == "simplified" else "s2t")


def _reference(draft: _Draft, config: CleanConfig) -> None:
    if config.reference is None:
        return
    model, limit = familiarity_with(config.reference)
    if config.maximum_bits_per_byte != "auto":
        limit = config.maximum_bits_per_byte
    bits = model.bits_per_byte(draft.text)
    if bits > limit:
        draft.refuse("unlike_reference", f"{bits:.2f} bits per byte")


_STEPS: dict[str, Callable[[_Draft, CleanConfig], None]] = {
    "unicode": _unicode,
    "language": _language,
    "boilerplate": _boilerplate,
    "forum_filler": _forum_filler,
    "advertisements": _advertisements,
    "length": _length,
    "symbols": _symbols,
    "repetition": _repetition,
    "personal_data": _personal_data,
    "chinese": _chinese,
    "reference": _reference,
}


class Steps:
    """The steps of one configuration, ready to be applied to any number of texts.

    Making one checks what the settings need: MissingExtra for a package, DataError for a reference too short.
    """

    def __init__(self, config: CleanConfig) -> None:
        self._config = config
        if config.chinese != "keep" and importlib.util.find_spec("opencc") is None:
            raise MissingExtra("opencc", f"chinese = {config.chinese}", install="'onecard[chinese]'")
        if config.reference is not None:
            familiarity_with(config.reference)

    def apply(self, text: str, language: str = "auto", screened: Screened | None = None) -> Outcome:
        """What the steps make of the text; `language` is a code, or auto to find it; `screened`: what is known."""
        draft = _Draft(text, language, screened)
        for name in self._config.steps:
            _STEPS[name](draft, self._config)
            if draft.reason is not None:
                break
        return Outcome(draft.text, draft.known_language(), draft.reason, draft.detail, draft.changes)

    def trace(self, text: str, language: str = "auto") -> Iterator[Change]:
        """Each step that changed or refused the text, and what it did."""
        draft = _Draft(text, language, None)
        for name in self._config.steps:
            before, counted = draft.text, sum(draft.changes.values())
            _STEPS[name](draft, self._config)
            count = sum(draft.changes.values()) - counted
            if count or draft.reason is not None:
                yield Change(name, before, draft.text, count, draft.reason, draft.detail)
            if draft.reason is not None:
                return
