"""Why answers go round in circles: what the measured numbers of a model mean, in words.

In: `Measures` of a model's answers, of the answers it learned from, and of the same questions under other sampling.
Out: causes, each with what to do, and the sampling to recommend. It measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onecard.evaluate.repetition import measure, units
from onecard.serve.sampling import SamplingParameters

# A block that is repeated over so many units is a loop to anybody; a short answer loops when half of it is one.
_LOOP_UNITS = 24
_SHORTEST_LOOP_UNITS = 8
# An answer most of whose n-grams stood in it before says nothing new, though it repeats no block exactly.
_MOST_REPEATED = 0.5
# Fewer looping answers than this are accidents of sampling, not a fault to look for.
RARE = 0.05
# Answers whose likeness to the references differs by less are as good.
_AS_GOOD = 0.01


@dataclass(frozen=True)
class Setting:
    """A way of sampling, by name; None is the one that the model's directory gives."""

    name: str
    sampling: SamplingParameters | None


NOW = Setting("as it is now", None)
# From what changes an answer least to what changes it most: of two that are as good, the first is recommended. A
# penalty of 1.1 is usual; from 1.2 on it forbids ordinary words of a long answer.
SETTINGS = (
    NOW,
    Setting("greedy", SamplingParameters(temperature=0)),
    Setting("temperature 0.7, top_p 0.9", SamplingParameters(temperature=0.7, top_p=0.9)),
    Setting("temperature 0.7, min_p 0.05", SamplingParameters(temperature=0.7, min_p=0.05)),
    Setting("greedy, repetition_penalty 1.1", SamplingParameters(temperature=0, repetition_penalty=1.1)),
    Setting(
        "temperature 0.7, top_p 0.9, repetition_penalty 1.1",
        SamplingParameters(temperature=0.7, top_p=0.9, repetition_penalty=1.1),
    ),
    Setting("greedy, repetition_penalty 1.2", SamplingParameters(temperature=0, repetition_penalty=1.2)),
)


@dataclass(frozen=True)
class Answered:
    """What all questions were answered under one setting: shares 0 to 1, and the mean F1 with the references."""

    setting: str
    looping: float
    ended: float
    repeated: float
    likeness: float


@dataclass
class Measures:
    """Everything that was measured. Shares are 0 to 1. `held_out` is None where nobody knows what the model learned.

    `end_probability` is the median of what the model gives to the end of the turn after each whole reference answer,
    `end_is_first` the share of those after which nothing is likelier. `most_common` is the share of the learned rows
    that have the most common answer.
    """

    questions: int
    held_out: bool | None
    settings: list[Answered] = field(default_factory=list)
    references_looping: float = 0.0
    most_common: float = 0.0
    most_common_answer: str = ""
    end_token: str = ""
    end_probability: float = 1.0
    end_is_first: float = 1.0
    end_is_written: bool = True
    truncated: float = 0.0

    @property
    def now(self) -> Answered:
        """The answers under the settings that the model's directory gives."""
        return self.settings[0]


@dataclass(frozen=True)
class Cause:
    """One cause of loops, by a short name, in a sentence, and what to do."""

    name: str
    what: str
    remedy: str


def loops(text: str) -> bool:
    """Whether an answer goes round in circles."""
    found, length = measure(text), len(units(text))
    enough = max(_SHORTEST_LOOP_UNITS, min(_LOOP_UNITS, length / 2))
    return found.longest_loop >= enough or found.repeated_share >= _MOST_REPEATED


def recommended(found: Measures) -> Answered:
    """The first of the settings with the fewest loops, give or take one answer, that are as like the references."""
    fewest = min(one.looping for one in found.settings)
    few = [one for one in found.settings if one.looping <= fewest + 1.5 / found.questions]
    best = max(one.likeness for one in few)
    return next(one for one in few if one.likeness >= best - _AS_GOOD)


def causes(found: Measures) -> list[Cause]:
    """What makes answers loop, the surest first; none where they hardly do."""
    made = []
    if not found.end_is_written:
        made.append(
            Cause(
                "stop tokens",
                f"The model ends its turn with {found.end_token}, which generation_config.json does not name: other "
                "servers go on after it.",
                "Run again with --write, which adds it.",
            )
        )
    if found.now.looping < RARE:
        return made
    if found.references_looping >= max(RARE / 2, found.now.looping / 2):
        made.append(
            Cause(
                "the training data",
                f"{found.references_looping:.0%} of the answers that it learned from go round in circles themselves.",
                "Take those rows out (`onecard clean` drops repetition in text), and train again.",
            )
        )
    if found.most_common >= 0.2:
        made.append(
            Cause(
                "the training data",
                f"{found.most_common:.0%} of the answers that it learned from are the same: "
                f"{found.most_common_answer[:60]!r}.",
                "Keep a few of those rows, and train again.",
            )
        )
    if found.end_is_first < 0.5:
        cut = f" {found.truncated:.0%} of its rows were cut before their end." if found.truncated >= RARE else ""
        remedy = (
            "Train with a larger max_length." if cut else "See with `onecard preview` that ends are learned; train on."
        )
        made.append(
            Cause(
                "the end of answers",
                f"After a whole answer it goes on: {found.end_token} is the likeliest next token after "
                f"{found.end_is_first:.0%} of them only (probability {found.end_probability:.2g} in the median).{cut}",
                remedy,
            )
        )
    best = recommended(found)
    if best.looping <= found.now.looping / 2:
        made.append(
            Cause(
                "sampling",
                f"{found.now.looping:.0%} of the answers loop as it samples now, {best.looping:.0%} with "
                f"{best.setting}.",
                "Serve it with those settings; --write puts them into generation_config.json.",
            )
        )
    if not made:
        made.append(
            Cause(
                "the model",
                f"{found.now.looping:.0%} of the answers loop, {best.looping:.0%} with the best of the settings tried: "
                "the data ends its answers, and so does the model after them.",
                "It has learned too little to go on sensibly: train longer, on more rows, or a larger model.",
            )
        )
    return made


def verdict(found: Measures) -> str:
    """One sentence."""
    kind = {None: "", True: "held-out ", False: "learned "}[found.held_out]
    asked = f"{found.questions} {kind}questions"
    named = list(dict.fromkeys(cause.name for cause in causes(found)))
    if found.now.looping < RARE:
        return f"Answers do not loop: {found.now.looping:.0%} of {asked}."
    return f"{found.now.looping:.0%} of the answers to {asked} loop. The cause: {', and '.join(named)}."


def rows(settings: Sequence[Answered]) -> list[list[Any]]:
    """A table: setting, answers that loop, that end by themselves, repeated n-grams, likeness to the references."""
    return [
        [one.setting, f"{one.looping:.0%}", f"{one.ended:.0%}", f"{one.repeated:.1%}", f"{one.likeness:.3f}"]
        for one in settings
    ]
