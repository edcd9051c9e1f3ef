"""Waits between updates while the card is too hot.

In: the newest sample. Out: waiting, events `thermal` (begin, end), a warning. An unknown temperature is never too hot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from onecard import console
from onecard.machine.cards import Guards
from onecard.machine.sensors import Sample
from onecard.settings import Auto

# A card that was too hot goes on when it is so much cooler: it would be too hot again at once otherwise.
COOLER_BY_CELSIUS = 5.0
# How soon a signal or a pause is obeyed while the card cools.
LOOK_EVERY_SECONDS = 0.2


def guards_with(guards: Guards, pause_above_celsius: float | Auto | None) -> Guards:
    """The guards of a card under the setting: a number is for the core; None never pauses, but still warns."""
    if pause_above_celsius is None:
        return replace(guards, core_pause_celsius=float("inf"), junction_pause_celsius=float("inf"))
    if isinstance(pause_above_celsius, str):
        return guards
    warn = min(guards.core_warn_celsius, pause_above_celsius - COOLER_BY_CELSIUS)
    return replace(guards, core_pause_celsius=pause_above_celsius, core_warn_celsius=warn)


class HeatGuard:
    """Warns once a run above the warn temperatures; waits above the pause temperatures until the card is cooler.

    `latest` gives the newest sample, `event` writes one into the diary of the run.
    """

    def __init__(
        self,
        guards: Guards,
        latest: Callable[[], Sample | None],
        event: Callable[..., None],
        *,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guards, self._latest, self._event = guards, latest, event
        self._wait, self._clock = wait, clock
        self._warned = False
        # How long the run has waited for the card to cool.
        self.seconds = 0.0

    def between_updates(self, step: int, stop_wanted: Callable[[], bool]) -> None:
        """Return at once while the card is cool enough; else when it is, is unknown, or `stop_wanted` says so."""
        sample = self._latest()
        place = self._above(sample, self.guards.core_pause_celsius, self.guards.junction_pause_celsius)
        if place is not None:
            self._cool(step, place, stop_wanted)
        elif not self._warned:
            place = self._above(sample, self.guards.core_warn_celsius, self.guards.junction_warn_celsius)
            if place is not None:
                self._warned = True
                console.warn(f"The card is hot: {place}. {self._plans()} Look at its fans and the air around it.")

    def _plans(self) -> str:
        if self.guards.core_pause_celsius == float("inf"):
            return "The run does not wait for it to cool (pause_above_celsius = none)."
        return (
            f"The run waits when it is above {self.guards.core_pause_celsius:.0f} °C (core) or "
            f"{self.guards.junction_pause_celsius:.0f} °C (memory)."
        )

    def _cool(self, step: int, place: str, stop_wanted: Callable[[], bool]) -> None:
        started = self._clock()
        self._event("thermal", step=step, state="begin", **_temperatures(self._latest()))
        console.warn(
            f"The card is too hot ({place}): the run waits until it is {COOLER_BY_CELSIUS:.0f} degrees cooler."
        )
        core = self.guards.core_pause_celsius - COOLER_BY_CELSIUS
        junction = self.guards.junction_pause_celsius - COOLER_BY_CELSIUS
        while not stop_wanted() and self._above(self._latest(), core, junction) is not None:
            self._wait(LOOK_EVERY_SECONDS)
        seconds = self._clock() - started
        self.seconds += seconds
        now = _temperatures(self._latest())
        self._event("thermal", step=step, state="end", seconds=round(seconds, 1), **now)
        reached = f"{now['card_celsius']:.0f} °C" if "card_celsius" in now else "temperature unknown"
        console.note(f"  the run goes on after {console.format_duration(seconds)} of cooling ({reached})")

    @staticmethod
    def _above(sample: Sample | None, core: float, junction: float) -> str | None:
        """Which temperature is above its limit, and how hot it is."""
        if sample is None:
            return None
        if sample.card_celsius is not None and sample.card_celsius > core:
            return f"{sample.card_celsius:.0f} °C"
        if sample.card_memory_celsius is not None and sample.card_memory_celsius > junction:
            return f"its memory is at {sample.card_memory_celsius:.0f} °C"
        return None


def _temperatures(sample: Sample | None) -> dict[str, float]:
    known = {} if sample is None else {name: getattr(sample, name) for name in ("card_celsius", "card_memory_celsius")}
    return {name: value for name, value in known.items() if value is not None}
