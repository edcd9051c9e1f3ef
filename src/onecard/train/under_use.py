"""Why a card does less than it could, from what the sensors say over a minute, in plain words and with what to do.

In: spans of samples, and how long updates waited for their rows. Out: at most one finding of each cause in a run.
It does not know the best speed of a card, only whether something visibly keeps it from working.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.machine.sensors import POWER, THERMAL, Span

# Updates that wait for such a share of their time wait for data.
DATA_WAIT = 0.2
# A card that has work for less of the time has too little; with less of its memory in use, larger batches would fit.
BUSY, LITTLE_MEMORY = 0.7, 0.5
# Throttled in so many samples; and by power, where every card is at its limit at times, only if the clock is so low.
OFTEN, LOW_CLOCK = 0.5, 0.8


@dataclass(frozen=True)
class Finding:
    """Why the card does less than it could, and what to do; `cause` is data, host, small_batch, heat or power."""

    cause: str
    what: str
    remedy: str


class UnderUse:
    """Looks at windows of `window_samples` samples (a minute); the first one is left out, for it has the start-up."""

    def __init__(self, window_samples: int = 60) -> None:
        self._window_samples = window_samples
        self._spans: list[Span] = []
        self._waited_seconds = self._seconds = 0.0
        self._started = self._rested = False
        self._named: set[str] = set()

    def update(self, waited_seconds: float, seconds: float) -> None:
        """An update took `seconds`, of which it waited for its rows so long."""
        self._waited_seconds += waited_seconds
        self._seconds += seconds

    def look(self, span: Span, *, rested: bool = False) -> Finding | None:
        """Count the samples in; at the end of a window, what it shows that was not said before.

        `rested`: among them are some of a card that was left alone to cool.
        """
        self._spans.append(span)
        self._rested |= rested
        if sum(span.count for span in self._spans) < self._window_samples:
            return None
        found = self._cause() if self._started else None
        self._spans, self._waited_seconds, self._seconds, self._started = [], 0.0, 0.0, True
        self._rested = False
        if found is None or found.cause in self._named:
            return None
        self._named.add(found.cause)
        return found

    def _cause(self) -> Finding | None:
        wait = self._waited_seconds / self._seconds if self._seconds else 0.0
        if wait >= DATA_WAIT:
            return Finding(
                "data",
                f"Updates wait {wait:.0%} of their time for their rows: the disk or the processor is too slow.",
                "Put the run and its rows on a local SSD and close what else uses the disk and the processor.",
            )
        busy = self._mean("card_utilisation")
        if busy is not None and busy < BUSY and not self._rested:
            return self._idle(busy)
        return self._throttled()

    def _idle(self, busy: float) -> Finding:
        idle = f"The card has work {busy:.0%} of the time"
        used, total = self._mean("card_memory_bytes"), self._mean("card_memory_total_bytes")
        if used is not None and total and used / total < LITTLE_MEMORY:
            return Finding(
                "small_batch",
                f"{idle} and {used / total:.0%} of its memory is in use: its micro-batches are small.",
                "Raise batch_size and lower gradient_accumulation_steps as much: the result stays the same.",
            )
        load = self._mean("host_utilisation")
        return Finding(
            "host",
            f"{idle}: the host does not hand it work fast enough"
            + ("." if load is None else f" (its processor is at {load:.0%})."),
            "Keep compile on, try cuda_graphs = true, and close what else uses the processor.",
        )

    def _throttled(self) -> Finding | None:
        clock, most = self._mean("card_clock_mhz"), self._mean("card_maximum_clock_mhz")
        share = clock / most if clock is not None and most else None
        if self._throttled_share(THERMAL) >= OFTEN:
            return Finding(
                "heat",
                "The card slows itself down because it is too hot"
                + ("." if share is None else f": its clock is at {share:.0%} of the highest."),
                "Clean its fans, give it air, or lower its power limit a little: nvidia-smi -pl WATTS.",
            )
        if share is not None and share < LOW_CLOCK and self._throttled_share(POWER) >= OFTEN:
            limit = self._mean("card_limit_watts")
            return Finding(
                "power",
                f"The power limit{'' if limit is None else f' of {limit:.0f} W'} holds the clock of the card at "
                f"{share:.0%} of the highest.",
                "Leave it so if heat, noise or the bill matter more; else raise it: nvidia-smi -pl WATTS.",
            )
        return None

    def _mean(self, name: str) -> float | None:
        """Mean of a field of Sample over the window; None: unknown."""
        known = [(value, span.count) for span in self._spans if (value := span.mean(name)) is not None]
        return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None

    def _throttled_share(self, reason: str) -> float:
        """Share of the window in which the card was throttled for `reason`; 0 if it does not tell."""
        return sum((span.throttled or {}).get(reason, 0.0) * span.count for span in self._spans) / sum(
            span.count for span in self._spans
        )
