"""What the card and the host feel: temperature, power, memory, load, faults; sampled once a second by a thread.

In: NVML for the card (nvidia-ml-py), psutil for the host. Out: `Sample`s, their ranges, and the energy of the card.
What cannot be read is None, which means unknown, never zero: GeForce cards often tell no junction temperature, laptops
no power limit, machines without a card nothing of one. Nothing here raises when a sensor is missing or breaks.
It does not know what is too hot: `cards` does.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

# A card tells why its clock is low as bits; these names are for people. Idle and set clocks are no fault.
THERMAL, POWER, SUPPLY = "too hot", "power limit", "power supply"
_THROTTLE_BITS = {0x4: POWER, 0x8: "slowed by hardware", 0x20: THERMAL, 0x40: THERMAL, 0x80: SUPPLY}
# Power readings further apart than this are not joined: nobody knows what was drawn between them.
LONGEST_GAP_SECONDS = 30.0
# Of a storm of faults the first ones tell.
MOST_XIDS = 16


@dataclass(frozen=True)
class Sample:
    """What could be read at one moment. Shares are 0 to 1. None: unknown."""

    card_celsius: float | None = None
    card_memory_celsius: float | None = None  # the junction of the memory
    card_utilisation: float | None = None  # share of the time in which anything ran on the card
    card_memory_bytes: int | None = None  # of every program on the card
    card_memory_total_bytes: int | None = None
    card_watts: float | None = None
    card_limit_watts: float | None = None
    card_clock_mhz: float | None = None
    card_maximum_clock_mhz: float | None = None
    card_memory_clock_mhz: float | None = None
    card_fan: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # empty: nothing holds the clock down
    ecc_uncorrected: int | None = None  # since the driver was loaded
    xids: tuple[int, ...] | None = None  # the driver's numbers of faults since the last sample
    card_lost: bool | None = None
    host_utilisation: float | None = None
    host_celsius: float | None = None
    host_memory_bytes: int | None = None
    host_available_bytes: int | None = None
    disk_free_bytes: int | None = None


class Sensors(Protocol):
    """Anything that can be sampled."""

    def sample(self) -> Sample:
        """What is known now."""
        ...


class NvmlSensors:
    """One NVIDIA card, by its `identity` ("GPU-..." as torch and nvidia-smi show it) or the first one.

    `library` is pynvml or what stands in for it. Without NVML, or after it broke, everything is unknown.
    """

    def __init__(self, identity: str | None = None, library: Any = None) -> None:
        self._lost = False
        self._handle: Any = None
        self._events: Any = None
        self.name: str | None = None
        try:
            self._nvml = library if library is not None else importlib.import_module("pynvml")
        except ImportError:
            return
        # Old drivers lack functions, and a card that falls off the bus answers anything.
        self._faults = (self._nvml.NVMLError, ctypes.ArgumentError, OSError, AttributeError, TypeError, ValueError)
        if not self._call("nvmlInit", done=True):
            return
        if identity is not None:
            self._handle = self._call("nvmlDeviceGetHandleByUUID", identity)
        else:
            self._handle = self._call("nvmlDeviceGetHandleByIndex", 0)
        if self._handle is not None:
            self.name = self._call("nvmlDeviceGetName", self._handle)
            self._listen()

    def sample(self) -> Sample:
        """What the card tells now."""
        if self._handle is None:
            return Sample()
        nvml = self._nvml
        rates, memory = self._ask("nvmlDeviceGetUtilizationRates"), self._ask("nvmlDeviceGetMemoryInfo")
        fan = self._ask("nvmlDeviceGetFanSpeed")
        sample = Sample(
            card_celsius=self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            card_memory_celsius=self._junction(),
            card_utilisation=None if rates is None else rates.gpu / 100,
            card_memory_bytes=None if memory is None else int(memory.used),
            card_memory_total_bytes=None if memory is None else int(memory.total),
            card_watts=_thousandth(self._ask("nvmlDeviceGetPowerUsage")),
            card_limit_watts=_thousandth(self._ask("nvmlDeviceGetEnforcedPowerLimit")),
            card_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            card_maximum_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            card_memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            card_fan=None if fan is None else fan / 100,
            throttle_reasons=self._throttle_reasons(),
            ecc_uncorrected=self._ask(
                "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            xids=self._xids(),
        )
        return replace(sample, card_lost=self._lost)

    def _ask(self, function: str, *arguments: Any) -> Any:
        return self._call(function, self._handle, *arguments)

    def _call(self, function: str, *arguments: Any, done: Any = None) -> Any:
        """What NVML answers; None where it does not (`done` where it answers with nothing)."""
        try:
            answer = getattr(self._nvml, function)(*arguments)
        except self._faults as fault:
            if getattr(fault, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._lost = True
            return None
        return done if answer is None else answer

    def _junction(self) -> float | None:
        values = self._ask("nvmlDeviceGetFieldValues", [self._nvml.NVML_FI_DEV_MEMORY_TEMP])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        # Cards without this sensor have been seen to answer 0.
        return float(values[0].value.uiVal) or None

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # a driver of before 2023
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        return tuple(dict.fromkeys(name for bit, name in _THROTTLE_BITS.items() if bits & bit))

    def _listen(self) -> None:
        """Ask to be told of Xids; Linux only."""
        events = self._call("nvmlEventSetCreate")
        kind = self._nvml.nvmlEventTypeXidCriticalError
        if events is not None and self._call("nvmlDeviceRegisterEvents", self._handle, kind, events, done=True):
            self._events = events

    def _xids(self) -> tuple[int, ...] | None:
        if self._events is None:
            return None
        found: list[int] = []
        while len(found) < MOST_XIDS:
            event = self._call("nvmlEventSetWait", self._events, 0)  # does not wait: without an event it raises
            if event is None:
                break
            found.append(int(event.eventData))
        return tuple(found)


class HostSensors:
    """Processor, memory, and the disk on which `directory` lies."""

    def __init__(self, directory: Path = Path()) -> None:
        self._directory = directory
        self._asked_before = False

    def sample(self) -> Sample:
        """What the host tells now."""
        import psutil

        utilisation = self._read(lambda: psutil.cpu_percent(None) / 100)
        memory = self._read(psutil.virtual_memory)
        # The first answer is about no time at all.
        asked_before, self._asked_before = self._asked_before, True
        return Sample(
            host_utilisation=utilisation if asked_before else None,
            host_celsius=self._read(_host_celsius),
            host_memory_bytes=None if memory is None else int(memory.total - memory.available),
            host_available_bytes=None if memory is None else int(memory.available),
            disk_free_bytes=self._read(lambda: shutil.disk_usage(self._directory).free),
        )

    def _read(self, read: Callable[[], Any]) -> Any:
        import psutil

        try:
            return read()
        except (psutil.Error, OSError, AttributeError, LookupError, RuntimeError, ValueError):
            return None


class AllSensors:
    """Several sensors as one; of those that know a value the first counts."""

    def __init__(self, *parts: Sensors) -> None:
        self._parts = parts

    def sample(self) -> Sample:
        """What any of them knows now."""
        known: dict[str, Any] = {}
        for part in reversed(self._parts):
            known |= _known(part.sample())
        return Sample(**known)


def open_sensors(device: str, directory: Path = Path()) -> Sensors:
    """The sensors of the host, and of the card torch computes on where `device` is cuda."""
    host = HostSensors(directory)
    return AllSensors(NvmlSensors(_identity_of_the_card()), host) if device.startswith("cuda") else host


def _identity_of_the_card() -> str | None:
    """What NVML knows torch's card as: the numbers of both differ under CUDA_VISIBLE_DEVICES."""
    import torch

    if not torch.cuda.is_available():
        return None
    identity = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if identity is None else f"GPU-{identity}"


def _known(sample: Sample) -> dict[str, Any]:
    pairs = ((field.name, getattr(sample, field.name)) for field in fields(sample))
    return {name: value for name, value in pairs if value is not None}


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


def _host_celsius() -> float | None:
    """The hottest reading of the processor."""
    import psutil

    groups = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    chips = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
    return max((reading.current for chip in chips for reading in groups.get(chip, ()) if reading.current), default=None)


# --- over time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """A value over some samples in which it was known."""

    minimum: float
    mean: float
    maximum: float


@dataclass(frozen=True)
class Span:
    """Some samples: how many, the last one, the range of each number that was ever known, the share throttled by each
    reason (of the samples that know reasons)."""

    count: int = 0
    last: Sample | None = None
    ranges: dict[str, Range] | None = None
    throttled: dict[str, float] | None = None

    def mean(self, name: str) -> float | None:
        """Mean of a field of Sample; None: unknown."""
        found = (self.ranges or {}).get(name)
        return None if found is None else found.mean

    def maximum(self, name: str) -> float | None:
        """Maximum of a field of Sample; None: unknown."""
        found = (self.ranges or {}).get(name)
        return None if found is None else found.maximum


def span_of(samples: list[Sample]) -> Span:
    """Samples, summed up."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in _known(sample).items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    told = [sample.throttle_reasons for sample in samples if sample.throttle_reasons is not None]
    reasons = sorted({reason for some in told for reason in some})
    return Span(
        len(samples),
        samples[-1] if samples else None,
        {name: Range(min(some), sum(some) / len(some), max(some)) for name, some in values.items()},
        {reason: sum(reason in some for some in told) / len(told) for reason in reasons},
    )


class Sampler:
    """Samples once every `interval_seconds` in a thread that ends with the process. Safe to ask from any thread."""

    # Nobody takes the samples of a run that stands still for so long: the oldest are then forgotten.
    MOST_KEPT = 3600

    def __init__(
        self, sensors: Sensors, *, interval_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensors, self._interval_seconds, self._clock = sensors, interval_seconds, clock
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Sample] = []
        self._latest: tuple[float, Sample] | None = None
        self._power: tuple[float, float] | None = None
        self._energy_joules: float | None = None
        self._xids: tuple[int, ...] = ()
        self._ecc_before: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to sample."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._work, name="onecard-sensors", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample a last time and end the thread; one that hangs in a broken driver is left behind."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None

    def _work(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(self._interval_seconds):
                self.sample()
                return

    def sample(self) -> Sample:
        """Take a sample now."""
        sample = self._sensors.sample()
        now = self._clock()
        with self._lock:
            self._latest = (now, sample)
            self._samples = [*self._samples[-self.MOST_KEPT + 1 :], sample]
            self._add_energy(now, sample.card_watts)
            if self._ecc_before is None:
                self._ecc_before = sample.ecc_uncorrected
            self._xids = (*self._xids, *(sample.xids or ()))[:MOST_XIDS]
        return sample

    def _add_energy(self, now: float, watts: float | None) -> None:
        if watts is None:
            return
        if self._power is None:
            self._energy_joules = self._energy_joules or 0.0
        else:
            before, watts_before = self._power
            if now - before <= LONGEST_GAP_SECONDS:
                self._energy_joules = (self._energy_joules or 0.0) + (now - before) * (watts + watts_before) / 2
        self._power = (now, watts)

    def latest(self) -> Sample | None:
        """The newest sample; None before the first one, and when it is too old to say anything about now."""
        with self._lock:
            if self._latest is None or self._clock() - self._latest[0] > LONGEST_GAP_SECONDS:
                return None
            return self._latest[1]

    @property
    def energy_joules(self) -> float | None:
        """What the card has drawn since the first sample; None while its power is unknown."""
        with self._lock:
            return self._energy_joules

    @property
    def xids(self) -> tuple[int, ...]:
        """The first faults that the driver told of."""
        with self._lock:
            return self._xids

    @property
    def ecc_before(self) -> int | None:
        """Uncorrected errors that were counted when the first sample was taken; None: unknown."""
        with self._lock:
            return self._ecc_before

    def take(self) -> Span:
        """The samples since the last call, summed up."""
        with self._lock:
            samples, self._samples = self._samples, []
        return span_of(samples)
