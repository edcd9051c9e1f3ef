"""Judging a run while nobody looks: updates that are not finite, spikes, divergence, a plateau, repetition in samples.

In: the loss and gradient norm of each update, the loss of each evaluation, and what was sampled. Out: what the loop
should do (go on, roll back, give up) and findings in plain words, each said once until it is over.
It changes nothing itself. What it remembers is saved with the run, so a resumed run judges as an undisturbed one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onecard.data.rules import repetition

# The running estimate: so many updates back, and from how many on it is trusted.
WINDOW, TRUSTED = 64, 20
# A spike stands so many robust standard deviations above the median, and by so much more than it.
DEVIATIONS, LOSS_FACTOR, NORM_FACTOR = 8.0, 1.3, 5.0
# The median absolute deviation of a normal distribution times this is its standard deviation.
TO_SIGMA = 1.4826
# Evaluations that must agree before a trend is said.
TREND = 3
# Less than this share better over TREND evaluations is a plateau; this much worse than the best is divergence.
PLATEAU_SHARE, WORSE_SHARE = 0.002, 0.03
# More than this share of a sample repeats itself.
REPEATING = 0.6


class Action(Enum):
    """What the loop does next."""

    GO_ON = "go on"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Limits:
    """The settings of the same names."""

    skips_before_roll_back: int = 5
    most_roll_backs: int = 3
    on_spike: str = "warn"
    early_stopping: int | None = None


@dataclass(frozen=True)
class Finding:
    """Something worth saying: a short `kind` for machines, and a sentence or two for people."""

    kind: str
    text: str


class Watchdog:
    """Asked after every update and every evaluation."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.skips_in_a_row = self.roll_backs = self._good = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._held_out: list[float] = []
        self._training: list[float] = []
        self._said: set[str] = set()

    # --- updates --------------------------------------------------------------------------------------------------

    def after_update(self, loss: float, grad_norm: float, *, skipped: bool) -> tuple[Action, list[Finding]]:
        """What to do after an update, and what is new about it."""
        if skipped:
            self.skips_in_a_row += 1
            if self.skips_in_a_row < self.limits.skips_before_roll_back:
                return Action.GO_ON, []
            return self._back(f"{self.skips_in_a_row} updates in a row had no finite loss or gradient.")
        self.skips_in_a_row = 0
        self._good += 1
        if self._good == WINDOW:
            self.roll_backs = 0  # what was wrong is over
        spikes = [
            what
            for what, value, before, factor in (
                ("loss", loss, self._losses, LOSS_FACTOR),
                ("gradient norm", grad_norm, self._norms, NORM_FACTOR),
            )
            if is_spike(value, before, factor)
        ]
        if not spikes:
            # A spike is no part of the estimate that it was measured by.
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self._said.discard("spike")
            return Action.GO_ON, []
        if self.limits.on_spike == "ignore":
            return Action.GO_ON, []
        usual = statistics.median(self._losses), statistics.median(self._norms)
        text = (
            f"The {' and the '.join(spikes)} jumped: loss {loss:.3g} (lately {usual[0]:.3g}), "
            f"gradient norm {grad_norm:.3g} (lately {usual[1]:.3g})."
        )
        if self.limits.on_spike == "roll_back" and "loss" in spikes:
            return self._back(text)
        cause = " A row unlike the others, or a learning rate that is a little too high."
        return Action.GO_ON, self._once("spike", text + cause)

    def _back(self, reason: str) -> tuple[Action, list[Finding]]:
        self.skips_in_a_row = self._good = 0
        if self.roll_backs >= self.limits.most_roll_backs:
            return Action.GIVE_UP, [Finding("give_up", reason)]
        self.roll_backs += 1
        return Action.ROLL_BACK, [Finding("roll_back", reason)]

    # --- evaluations ----------------------------------------------------------------------------------------------

    def after_evaluation(self, held_out_loss: float | None, samples: list[str], *, decaying: bool) -> list[Finding]:
        """What the evaluations so far say; `decaying`: the learning rate is on its way down, as planned."""
        found = self._repetition(samples)
        if held_out_loss is None:
            return found
        self._held_out.append(held_out_loss)
        self._training.append(statistics.fmean(self._losses) if self._losses else math.nan)
        recent = self._held_out[-TREND - 1 :]
        if len(recent) <= TREND:
            return found
        best = min(self._held_out)
        rising = all(after > before for before, after in zip(recent, recent[1:]))
        if rising and recent[-1] > best * (1 + WORSE_SHARE):
            learning = self._training[-1] < self._training[-TREND - 1]
            if learning:
                text = (
                    f"The loss on held-out rows has risen {TREND} times in a row (best {best:.3f}, now "
                    f"{recent[-1]:.3f}) while the training loss falls: the model learns its rows by heart. "
                    "Fewer epochs, more text or early_stopping help."
                )
                return found + self._once("overfitting", text)
            text = (
                f"The loss rises, on held-out rows {TREND} times in a row (best {best:.3f}, now {recent[-1]:.3f}): the "
                "run diverges. The usual cause is a learning rate that is too high."
            )
            return found + self._once("divergence", text)
        self._said -= {"overfitting", "divergence"}
        if recent[0] - min(recent[1:]) < PLATEAU_SHARE * recent[0] and not decaying:
            text = (
                f"The loss on held-out rows has stood at {recent[-1]:.3f} for {TREND} evaluations: a plateau. A "
                "decaying learning rate (schedule, decay_ratio) or other data would move it; more of the same will not."
            )
            return found + self._once("plateau", text)
        self._said.discard("plateau")
        return found

    def _repetition(self, samples: list[str]) -> list[Finding]:
        shares = [repetition(sample) for sample in samples if len(sample) >= 40]
        if not shares or min(shares) < REPEATING:
            self._said.discard("repetition")
            return []
        text = (
            f"Every sample repeats itself ({min(shares):.0%} and more). Early in a run that passes; later it means too "
            "few different rows, or a learning rate that is too high."
        )
        return self._once("repetition", text)

    def _once(self, kind: str, text: str) -> list[Finding]:
        if kind in self._said:
            return []
        self._said.add(kind)
        return [Finding(kind, text)]

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was the best so far."""
        return bool(self._held_out) and self._held_out[-1] == min(self._held_out)

    @property
    def enough(self) -> bool:
        """Whether early stopping ends the run here."""
        patience = self.limits.early_stopping
        if patience is None or not self._held_out:
            return False
        return len(self._held_out) - 1 - self._held_out.index(min(self._held_out)) >= patience

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "skips_in_a_row": self.skips_in_a_row,
            "roll_backs": self.roll_backs,
            "good": self._good,
            "losses": list(self._losses),
            "norms": list(self._norms),
            "held_out": self._held_out,
            "training": self._training,
            "said": sorted(self._said),
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.skips_in_a_row, self.roll_backs = state["skips_in_a_row"], state["roll_backs"]
        self._good = state["good"]
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._held_out, self._training = list(state["held_out"]), list(state["training"])
        self._said = set(state["said"])


def is_spike(value: float, before: deque[float], factor: float) -> bool:
    """Whether a value is far above what came before: by robust deviations, and by a factor of the median."""
    if len(before) < TRUSTED:
        return False
    median = statistics.median(before)
    sigma = TO_SIGMA * statistics.median(abs(value - median) for value in before)
    return value > median + DEVIATIONS * sigma and value > factor * median
