"""Why a card does less than it could, from recorded minutes."""

from __future__ import annotations

from typing import Any

import pytest

from onecard.machine.sensors import Sample, span_of
from onecard.train.under_use import Finding, UnderUse

BUSY: dict[str, Any] = {
    "card_utilisation": 0.97,
    "card_memory_bytes": 20 << 30,
    "card_memory_total_bytes": 24 << 30,
    "card_clock_mhz": 1800,
    "card_maximum_clock_mhz": 2000,
    "card_limit_watts": 280.0,
    "throttle_reasons": ("power limit",),
}


def minutes(count: int, wait: float = 0.0, **changes: Any) -> list[Finding]:
    """What is found in minutes of 60 samples, in spans of 20; updates wait for that share of their time."""
    made = UnderUse()
    found = []
    for _ in range(count * 3):
        made.update(wait * 20, 20.0)
        found.append(made.look(span_of([Sample(**BUSY | changes)] * 20)))
    return [one for one in found if one is not None]


def causes(*arguments: Any, **changes: Any) -> list[str]:
    return [one.cause for one in minutes(*arguments, **changes)]


def test_a_card_at_work_is_not_spoken_of_though_its_power_limit_is_reached() -> None:
    assert causes(5) == []


@pytest.mark.parametrize(
    ("cause", "wait", "changes"),
    [
        ("data", 0.35, {"card_utilisation": 0.5}),
        ("host", 0.05, {"card_utilisation": 0.5}),
        ("small_batch", 0.05, {"card_utilisation": 0.5, "card_memory_bytes": 4 << 30}),
        ("heat", 0.0, {"throttle_reasons": ("too hot",)}),
        ("power", 0.0, {"card_clock_mhz": 1400}),
    ],
)
def test_each_cause_is_named_once(cause: str, wait: float, changes: dict[str, Any]) -> None:
    assert causes(5, wait, **changes) == [cause]


def test_the_first_minute_is_start_up() -> None:
    assert causes(1, 0.9) == []
    assert causes(2, 0.9) == ["data"]


def test_the_words() -> None:
    (found,) = minutes(2, 0.35)
    assert found.what == "Updates wait 35% of their time for their rows: the disk or the processor is too slow."
    (found,) = minutes(2, card_utilisation=0.4, card_memory_bytes=6 << 30)
    assert (
        found.what == "The card has work 40% of the time and 25% of its memory is in use: its micro-batches are small."
    )
    (found,) = minutes(2, card_utilisation=0.4, host_utilisation=0.9)
    assert "does not hand it work fast enough (its processor is at 90%)." in found.what
    (found,) = minutes(2, card_clock_mhz=1000)
    assert found.what == "The power limit of 280 W holds the clock of the card at 50% of the highest."


def test_a_cause_that_comes_later_is_named_too() -> None:
    made = UnderUse(window_samples=1)
    found = []
    for utilisation, wait in ((0.9, 0.0), (0.9, 0.5), (0.2, 0.0), (0.9, 0.5)):
        made.update(wait, 1.0)
        found.append(made.look(span_of([Sample(**BUSY | {"card_utilisation": utilisation})])))
    assert [one and one.cause for one in found] == [None, "data", "host", None]


def test_unknown_is_no_cause() -> None:
    assert causes(5, **dict.fromkeys(BUSY)) == []
    # A card whose memory is not told cannot be said to hold small batches.
    assert causes(5, card_utilisation=0.2, card_memory_bytes=None) == ["host"]
    assert causes(5, card_maximum_clock_mhz=None) == []


def test_a_processor_that_waits_for_data_is_spoken_of_too() -> None:
    assert causes(2, 0.5, **dict.fromkeys(BUSY)) == ["data"]


def test_a_card_that_was_left_alone_to_cool_is_not_called_idle() -> None:
    made = UnderUse()
    found = []
    for minute in range(4):
        made.update(0.0, 60.0)
        found.append(made.look(span_of([Sample(**BUSY | {"card_utilisation": 0.4})] * 60), rested=minute < 3))
    assert found[:3] == [None] * 3
    assert found[3] is not None and found[3].cause == "host"
