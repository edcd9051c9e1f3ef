"""The senses of a run: the loop asks here before an update, tells here what it took, and writes down what is known.

Samples are taken by a thread; the loop only reads the newest. Without sensors everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from onecard import console
from onecard.config import TrainingConfig
from onecard.machine.cards import guards_of
from onecard.machine.faults import HardwareFault, find_fault
from onecard.machine.sensors import Sampler, Sensors, Span, open_sensors
from onecard.train.heat import HeatGuard, guards_with
from onecard.train.metrics import RunLog
from onecard.train.under_use import UnderUse

JOULES_A_KWH = 3.6e6


class Vitals:
    """`earlier_kwh` was drawn by the processes of this run before this one (None: unknown, or none), which waited for
    the card to cool for `earlier_cooling_seconds`."""

    def __init__(
        self,
        log: RunLog,
        sampler: Sampler | None = None,
        heat: HeatGuard | None = None,
        *,
        electricity_price: float | None = None,
        currency: str = "",
        earlier_kwh: float | None = None,
        earlier_cooling_seconds: float = 0.0,
    ) -> None:
        self._log, self._sampler, self._heat = log, sampler, heat
        self._electricity_price, self._currency, self._earlier_kwh = electricity_price, currency, earlier_kwh
        self._earlier_cooling_seconds = earlier_cooling_seconds
        self._under_use = UnderUse()
        self._cooled_before = 0.0

    def __enter__(self) -> Self:
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def before_update(self, step: int, stop_wanted: Callable[[], bool]) -> HardwareFault | None:
        """Wait while the card is too hot; the fault of a broken card, for which the run must stop."""
        if self._sampler is None:
            return None
        fault = self._find_fault()
        if fault is None and self._heat is not None:
            self._heat.between_updates(step, stop_wanted)
            fault = self._find_fault()
        if fault is not None:
            self._log.event("fault", step=step, what=fault.what)
        return fault

    def _find_fault(self) -> HardwareFault | None:
        assert self._sampler is not None
        return find_fault(self._sampler.latest(), self._sampler.xids, self._sampler.ecc_before)

    def explain(self, step: int) -> HardwareFault | None:
        """The fault of the card, asked just now: after an update failed in a way that a program does not."""
        if self._sampler is None:
            return None
        self._sampler.sample()
        fault = self._find_fault()
        if fault is not None:
            self._log.event("fault", step=step, what=fault.what)
        return fault

    def after_update(self, waited_seconds: float, seconds: float) -> None:
        """An update took `seconds`, of which it waited for its rows so long."""
        self._under_use.update(waited_seconds, seconds)

    def row(self, step: int) -> dict[str, Any]:
        """For a line of metrics.jsonl: what was sampled since the last one (nothing if it was not), and the energy.

        Also how long the run has waited for the card to cool, if it has.
        """
        if self._sampler is None:
            return {}
        cooled = self.cooling_seconds
        cooling = {"cooling_seconds": round(cooled, 3)} if cooled else {}
        span = self._sampler.take()
        if span.count == 0:
            return cooling
        finding = self._under_use.look(span, rested=cooled > self._cooled_before)
        self._cooled_before = cooled
        if finding is not None:
            self._log.event("under_use", step=step, cause=finding.cause, what=finding.what)
            console.warn(f"{finding.what} {finding.remedy}")
        energy = self.energy_kwh
        return _known(span) | cooling | ({} if energy is None else {"energy_kwh": round(energy, 9)})

    @property
    def cooling_seconds(self) -> float:
        """How long the run, in all its processes, has waited for the card to cool: no part of `seconds`."""
        return self._earlier_cooling_seconds + (0.0 if self._heat is None else self._heat.seconds)

    @property
    def energy_kwh(self) -> float | None:
        """What the card drew for this run, of all its processes; None: unknown."""
        joules = None if self._sampler is None else self._sampler.energy_joules
        if joules is None:
            return self._earlier_kwh
        return (self._earlier_kwh or 0.0) + joules / JOULES_A_KWH

    def result(self) -> dict[str, Any]:
        """For the result document: energy_kwh, its cost in `currency`, seconds of cooling; None: unknown."""
        energy, price = self.energy_kwh, self._electricity_price
        return {
            "energy_kwh": energy,
            "energy_cost": None if energy is None or price is None else energy * price,
            "currency": self._currency,
            "cooling_seconds": self.cooling_seconds,
        }


def open_vitals(
    config: TrainingConfig, run: Path, device: str, *, sensors: Sensors | None = None, card: str | None = None
) -> Vitals:
    """The senses of the run in `run` on `device`; call before lines of its metrics are cut.

    `sensors` and the name of the `card` are asked of the machine where they are not given.
    """
    log = RunLog(run)
    if card is None and device == "cuda":
        import torch

        card = torch.cuda.get_device_name()
    sampler = Sampler(sensors or open_sensors(device, run))
    heat = HeatGuard(
        guards_with(guards_of(card), config.pause_above_celsius),
        sampler.latest,
        log.event,
        slow=config.when_hot == "slow",
    )
    rows = log.metrics()
    return Vitals(
        log,
        sampler,
        heat,
        electricity_price=config.electricity_price,
        currency=config.currency,
        earlier_kwh=max((row["energy_kwh"] for row in rows if "energy_kwh" in row), default=None),
        earlier_cooling_seconds=max((row.get("cooling_seconds", 0.0) for row in rows), default=0.0),
    )


def _known(span: Span) -> dict[str, Any]:
    """What the samples since the last line of metrics.jsonl say: temperatures and memory are the highest, shares and
    watts the mean. What is unknown is left out."""
    values = {
        "card_celsius": span.maximum("card_celsius"),
        "card_memory_celsius": span.maximum("card_memory_celsius"),
        "card_utilisation": span.mean("card_utilisation"),
        "card_memory_bytes": span.maximum("card_memory_bytes"),
        "card_watts": span.mean("card_watts"),
        "card_clock_mhz": span.mean("card_clock_mhz"),
        "card_fan": span.mean("card_fan"),
        "ecc_uncorrected": span.maximum("ecc_uncorrected"),
        "host_utilisation": span.mean("host_utilisation"),
        "host_celsius": span.maximum("host_celsius"),
        "host_memory_bytes": span.maximum("host_memory_bytes"),
        "disk_free_bytes": None if span.last is None else span.last.disk_free_bytes,
    }
    known: dict[str, Any] = {name: round(value, 3) for name, value in values.items() if value is not None}
    if span.throttled:
        known["throttle_reasons"] = {reason: round(share, 3) for reason, share in span.throttled.items()}
    return known


def energy_text(result: dict[str, Any]) -> str:
    """Energy and its cost for a person: "0.42 kWh, 0.13 EUR"; "unknown"."""
    energy, cost = result.get("energy_kwh"), result.get("energy_cost")
    if energy is None:
        return "unknown"
    text = f"{energy:.3g} kWh" if energy >= 0.1 else f"{1000 * energy:.3g} Wh"
    if cost is None:
        return text
    amount = f"{cost:.2f}" if cost >= 0.01 else "less than 0.01"
    return f"{text}, {amount} {result.get('currency', '')}".rstrip()


# How a reading is shown: its label, and the number with its unit.
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "card_celsius": ("card", "{:.0f} °C".format),
    "card_memory_celsius": ("memory of the card", "{:.0f} °C".format),
    "card_utilisation": ("card at work", "{:.0%}".format),
    "card_watts": ("power of the card", "{:.0f} W".format),
    "card_memory_bytes": ("used on the card", console.format_bytes),
    "host_celsius": ("processor", "{:.0f} °C".format),
    "host_utilisation": ("processor at work", "{:.0%}".format),
    "host_memory_bytes": ("memory used", console.format_bytes),
    "disk_free_bytes": ("free on the disk", console.format_bytes),
}


def readings(row: dict[str, Any]) -> list[list[str]]:
    """What a line of metrics.jsonl says of card and host, for a person: [label, text]; what is unknown is left out."""
    shown = [[label, text(row[name])] for name, (label, text) in _SHOWN.items() if name in row]
    if "cooling_seconds" in row:
        shown.append(["waited for the card to cool", console.format_duration(row["cooling_seconds"])])
    if "energy_kwh" in row:
        shown.append(["energy of the card", energy_text(row)])
    return shown
