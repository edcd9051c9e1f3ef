"""Waits between updates while the card is too hot, or rests after each of them for as long as it takes to stay cool.

In: the newest sample. Out: waiting, events `thermal` (begin, end, duty), a warning. An unknown temperature is never too
hot. It does not know what an update is: all it changes is when the next one begins.
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
# By so much of its time the card rests more when it is too hot, or less when it is cooler than it must be; at most so
# much; and a card needs so long until it shows what another share does to it.
MORE_REST, LESS_REST, MOST_REST = 0.1, 0.05, 0.8
SETTLE_SECONDS = 10.0


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

    With `slow` it rests after each update instead, for a share of the time that grows until the card holds below the
    pause temperatures; only where the largest share does not do it, it waits after all.
    `latest` gives the newest sample, `event` writes one into the diary of the run.
    """

    def __init__(
        self,
        guards: Guards,
        latest: Callable[[], Sample | None],
        event: Callable[..., None],
        *,
        slow: bool = False,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guards, self._latest, self._event = guards, latest, event
        self._slow, self._wait, self._clock = slow, wait, clock
        self._warned = False
        # The share of the time in which the card rests, and since when; when it was last let go to work.
        self._rest, self._rested_since, self._worked_since = 0.0, -SETTLE_SECONDS, clock()
        # How long the run has waited for the card to cool.
        self.seconds = 0.0

    def between_updates(self, step: int, stop_wanted: Callable[[], bool]) -> None:
        """Return at once while the card is cool enough; else when it is, is unknown, or `stop_wanted` says so."""
        sample = self._latest()
        place = self._above(sample, self.guards.core_pause_celsius, self.guards.junction_pause_celsius)
        if self._slow and (place is None or self._rest < MOST_REST or not self._settled):
            self._adjust(step, place)
            self._rest_a_while(stop_wanted)
        elif place is not None:
            self._cool(step, place, stop_wanted)
        if place is None and not self._warned:
            place = self._above(sample, self.guards.core_warn_celsius, self.guards.junction_warn_celsius)
            if place is not None:
                self._warned = True
                console.warn(f"The card is hot: {place}. {self._plans()} Look at its fans and the air around it.")
        self._worked_since = self._clock()

    def _plans(self) -> str:
        if self.guards.core_pause_celsius == float("inf"):
            return "The run does not wait for it to cool (pause_above_celsius = none)."
        return (
            f"The run {'slows down' if self._slow else 'waits'} when it is above "
            f"{self.guards.core_pause_celsius:.0f} °C (core) or {self.guards.junction_pause_celsius:.0f} °C (memory)."
        )

    @property
    def _settled(self) -> bool:
        """Whether the card has had the time to show what its present rest does."""
        return self._clock() - self._rested_since >= SETTLE_SECONDS

    def _adjust(self, step: int, place: str | None) -> None:
        """Let the card rest more if it is too hot, less if it is cooler than it must be."""
        if not self._settled:
            return
        if place is not None:
            rest = min(MOST_REST, self._rest + MORE_REST)
        elif self._above(self._latest(), *self._cooler()) is None:
            rest = max(0.0, self._rest - LESS_REST)
        else:
            return
        rest = round(rest, 2)
        if rest == self._rest:
            return
        if self._rest == 0.0:
            console.warn(f"The card is too hot ({place}): the run slows down until it holds below the limit.")
        self._rest, self._rested_since = rest, self._clock()
        self._event("thermal", step=step, state="duty", duty=round(1 - rest, 2), **_temperatures(self._latest()))
        console.note(
            "  the card is cool enough: the run goes on at full speed"
            if rest == 0.0
            else f"  the card now works {1 - rest:.0%} of the time"
        )

    def _rest_a_while(self, stop_wanted: Callable[[], bool]) -> None:
        """As long as the time since the last rest asks for, by the share."""
        if self._rest == 0.0:
            return
        started = self._clock()
        until = started + (started - self._worked_since) * self._rest / (1 - self._rest)
        while not stop_wanted() and (left := until - self._clock()) > 1e-6:
            self._wait(min(LOOK_EVERY_SECONDS, left))
        self.seconds += self._clock() - started

    def _cooler(self) -> tuple[float, float]:
        """Below these temperatures (core, junction) a card that was too hot is cool again."""
        return (
            self.guards.core_pause_celsius - COOLER_BY_CELSIUS,
            self.guards.junction_pause_celsius - COOLER_BY_CELSIUS,
        )

    def _cool(self, step: int, place: str, stop_wanted: Callable[[], bool]) -> None:
        started = self._clock()
        self._event("thermal", step=step, state="begin", **_temperatures(self._latest()))
        console.warn(
            f"The card is too hot ({place}): the run waits until it is {COOLER_BY_CELSIUS:.0f} degrees cooler."
        )
        while not stop_wanted() and self._above(self._latest(), *self._cooler()) is not None:
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
