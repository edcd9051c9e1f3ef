"""The named steps that a text walks through, in the order of the settings: each mends it, or refuses it with a reason.

In: one text and its language ("auto": to be found). Out: an Outcome. Pure, and the same in every process: `Steps`
holds its settings alone, so that workers can be handed one. Knows nothing of files, duplicates and other documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onecard.config import CleanConfig
from onecard.data import rules


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one text; `reason` is None for a kept one.

    `changes` counts what was mended: a step's name (and what it mended, such as "personal_data: email") -> how often.
    """

    text: str
    language: str
    reason: str | None = None
    detail: str = ""
    changes: dict[str, int] = field(default_factory=dict)


class Steps:
    """The steps of one configuration, ready to be applied to any number of texts."""

    def __init__(self, config: CleanConfig) -> None:
        self._config = config

    def apply(self, text: str, language: str = "auto") -> Outcome:
        """What the steps make of the text; `language` is a code, or auto to find it."""
        config = self._config
        tidied = rules.normalise(text)
        changes = {"unicode": 1} if tidied != text else {}
        found = rules.language_of(tidied) if language == "auto" else language
        verdict = rules.refusal(
            tidied,
            minimum_characters=config.minimum_characters,
            maximum_repetition=config.maximum_repetition,
            maximum_symbol_ratio=config.maximum_symbol_ratio,
        )
        reason, detail = verdict or (None, "")
        return Outcome(tidied, found, reason, detail, changes)
