"""Sensors: what a card tells, what it does not tell is unknown, and nothing that breaks raises."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_nvml import FakeNvml, NVMLError, desktop_card

from onecard.machine import sensors
from onecard.machine.sensors import AllSensors, HostSensors, NvmlSensors, Sample, Sampler


class Played:
    """Gives recorded samples one after the other; the last one stays."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)

    def sample(self) -> Sample:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def known(sample: Sample) -> dict[str, object]:
    return {f.name: value for f in fields(sample) if (value := getattr(sample, f.name)) is not None}


def test_a_desktop_card_tells_all_it_has() -> None:
    assert known(NvmlSensors(library=desktop_card()).sample()) == {
        "card_celsius": 71,
        "card_memory_celsius": 92.0,
        "card_utilisation": 0.98,
        "card_memory_bytes": 20 << 30,
        "card_memory_total_bytes": 24 << 30,
        "card_watts": 347.5,
        "card_limit_watts": 350.0,
        "card_clock_mhz": 1700,
        "card_maximum_clock_mhz": 2100,
        "card_memory_clock_mhz": 9501,
        "card_fan": 0.65,
        "throttle_reasons": ("power limit",),
        "xids": (),
        "card_lost": False,
    }


@pytest.mark.parametrize(
    "answer",
    [
        NVMLError(3),
        [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))],
        [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
        [],
    ],
)
def test_a_junction_that_is_not_told_is_unknown_and_not_zero(answer: object) -> None:
    card = desktop_card(nvmlDeviceGetFieldValues=answer)
    sample = NvmlSensors(library=card).sample()
    assert sample.card_memory_celsius is None
    assert sample.card_celsius == 71


def test_a_laptop_without_limit_fan_and_events() -> None:
    card = FakeNvml(nvmlDeviceGetTemperature=64, nvmlDeviceGetPowerUsage=80_000)
    assert known(NvmlSensors(library=card).sample()) == {"card_celsius": 64, "card_watts": 80.0, "card_lost": False}


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2, ()),  # clocks set by the owner
        (0x20 | 0x40, ("too hot",)),
        (0x4 | 0x80, ("power limit", "power supply")),
    ],
)
def test_throttle_reasons_are_words(bits: int, words: tuple[str, ...]) -> None:
    assert NvmlSensors(library=desktop_card(nvmlDeviceGetCurrentClocksEventReasons=bits)).sample().throttle_reasons == (
        words
    )


def test_an_older_driver_knows_reasons_by_their_older_name() -> None:
    card = desktop_card(
        nvmlDeviceGetCurrentClocksEventReasons=NVMLError(13), nvmlDeviceGetCurrentClocksThrottleReasons=0x40
    )
    assert NvmlSensors(library=card).sample().throttle_reasons == ("too hot",)


@pytest.mark.parametrize(
    "card",
    [
        FakeNvml(nvmlInit=NVMLError(9)),
        FakeNvml(nvmlInit=OSError("libnvidia-ml.so.1")),
        FakeNvml(nvmlDeviceGetHandleByIndex=NVMLError(6)),
    ],
)
def test_without_driver_or_card_all_is_unknown(card: FakeNvml) -> None:
    assert NvmlSensors(library=card).sample() == Sample()


def test_without_the_package_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlSensors().sample() == Sample()


def test_a_card_that_throws_at_everything_is_unknown_but_there() -> None:
    card = desktop_card()
    made = NvmlSensors(library=card)
    for name in list(card.answers):
        card.answers[name] = [NVMLError(999), OSError("gone"), ValueError("bad text"), AttributeError("old")][
            len(name) % 4
        ]
    assert known(made.sample()) == {"xids": (), "card_lost": False}


def test_a_card_that_falls_off_the_bus_is_lost() -> None:
    card = desktop_card()
    made = NvmlSensors(library=card)
    assert made.sample().card_lost is False
    card.lost = True
    assert known(made.sample()) == {"card_lost": True, "xids": ()}


def test_every_xid_since_the_last_sample_is_told_once() -> None:
    card = desktop_card()
    made = NvmlSensors(library=card)
    card.xids = [13, 79]
    assert made.sample().xids == (13, 79)
    assert made.sample().xids == ()


def test_a_card_is_found_by_its_identity() -> None:
    card = desktop_card(nvmlDeviceGetHandleByUUID=lambda identity: {"GPU-2": "second"}[identity])
    assert NvmlSensors("GPU-2", card).sample().card_celsius == 71
    assert NvmlSensors("GPU-2", card).name == "NVIDIA GeForce RTX 3090"


def test_the_host_tells_memory_and_disk_and_at_first_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda _: 25.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=600))
    monkeypatch.setattr(sensors.shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    reading = SimpleNamespace(current=61.0)
    temperatures = {"k10temp": [reading, SimpleNamespace(current=55.0)], "nvme": [SimpleNamespace(current=90.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: temperatures, raising=False)
    host = HostSensors(tmp_path)
    first = {"host_memory_bytes": 400, "host_available_bytes": 600, "disk_free_bytes": 7, "host_celsius": 61.0}
    assert known(host.sample()) == first
    assert known(host.sample()) == first | {"host_utilisation": 0.25}


def test_a_host_that_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise PermissionError("no")

    for name in ("cpu_percent", "virtual_memory", "sensors_temperatures"):
        monkeypatch.setattr(psutil, name, refuse, raising=False)
    assert HostSensors(Path("/no/such/place")).sample() == Sample()


def test_the_first_sensor_that_knows_a_value_counts() -> None:
    both = AllSensors(Played(Sample(card_celsius=50)), Played(Sample(card_celsius=1, host_celsius=40)))
    assert both.sample() == Sample(card_celsius=50, host_celsius=40)


def test_without_a_card_only_the_host_is_asked() -> None:
    assert isinstance(sensors.open_sensors("cpu"), HostSensors)


# --- over time ----------------------------------------------------------------------------------------------------


def play(*watts: float | None, seconds: float = 1.0) -> Sampler:
    clock = Clock()
    sampler = Sampler(Played(*[Sample(card_watts=value) for value in watts]), clock=clock)
    for _ in watts:
        sampler.sample()
        clock.now += seconds
    return sampler


def test_energy_is_the_area_under_the_power() -> None:
    # 1 s from 100 to 300 W is 200 J, then 1 s at 300 W.
    assert play(100.0, 300.0, 300.0).energy_joules == 500.0
    assert play(100.0, 300.0, seconds=2.0).energy_joules == 400.0


def test_energy_is_unknown_without_power_and_joined_over_a_missing_reading() -> None:
    assert play(None, None).energy_joules is None
    assert play(100.0).energy_joules == 0.0
    assert play(100.0, None, 200.0).energy_joules == 300.0


def test_what_was_drawn_in_a_long_silence_is_not_invented() -> None:
    assert play(100.0, 100.0, seconds=31.0).energy_joules == 0.0


def test_a_span_has_the_ranges_of_what_was_known() -> None:
    sampler = Sampler(
        Played(
            Sample(card_celsius=70, card_fan=0.5, throttle_reasons=()),
            Sample(card_celsius=80, throttle_reasons=("too hot",)),
            Sample(card_celsius=81),
        )
    )
    for _ in range(3):
        sampler.sample()
    span = sampler.take()
    assert (span.count, span.last) == (3, Sample(card_celsius=81))
    assert span.ranges == {"card_celsius": sensors.Range(70, 77, 81), "card_fan": sensors.Range(0.5, 0.5, 0.5)}
    assert span.throttled == {"too hot": 0.5}
    assert span.mean("card_watts") is None
    assert sampler.take() == sensors.Span(0, None, {}, {})


def test_an_old_sample_says_nothing_about_now() -> None:
    clock = Clock()
    sampler = Sampler(Played(Sample(card_celsius=70)), clock=clock)
    assert sampler.latest() is None
    sampler.sample()
    clock.now += 30
    assert sampler.latest() == Sample(card_celsius=70)
    clock.now += 1
    assert sampler.latest() is None


def test_faults_are_kept_until_somebody_looks() -> None:
    sampler = Sampler(Played(Sample(xids=(31,)), Sample(xids=(79,)), Sample(xids=())))
    for _ in range(3):
        sampler.sample()
    assert sampler.xids == (31, 79)


def test_errors_of_the_memory_count_from_the_first_sample_on() -> None:
    sampler = Sampler(Played(Sample(), Sample(ecc_uncorrected=2), Sample(ecc_uncorrected=5)))
    assert sampler.ecc_before is None
    for _ in range(3):
        sampler.sample()
    assert sampler.ecc_before == 2


def test_the_thread_samples_at_once_and_a_last_time_and_can_begin_anew() -> None:
    sampler = Sampler(Played(Sample(card_celsius=70)), interval_seconds=3600)
    for _ in range(2):
        with sampler:
            pass
        assert sampler.take().count == 2


def test_a_run_that_nobody_watches_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "MOST_KEPT", 3)
    sampler = Sampler(Played(*[Sample(card_celsius=i) for i in range(5)]))
    for _ in range(5):
        sampler.sample()
    assert sampler.take().ranges == {"card_celsius": sensors.Range(2, 3, 4)}
