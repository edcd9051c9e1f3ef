"""The heat guard on recorded samples: when it warns, waits or slows down, for how long, and what it never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onecard.machine.cards import Guards
from onecard.machine.sensors import Sample
from onecard.train.heat import LOOK_EVERY_SECONDS, HeatGuard, guards_with

GUARDS = Guards(core_warn_celsius=83, core_pause_celsius=88, junction_warn_celsius=100, junction_pause_celsius=105)


class Card:
    """A card that is at the next recorded temperature whenever the run has waited a little; waiting moves its clock."""

    def __init__(self, *samples: Sample | None, guards: Guards = GUARDS, slow: bool = False) -> None:
        self.samples = list(samples)
        self.now = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.guard = HeatGuard(guards, self.latest, self.event, slow=slow, wait=self.wait, clock=lambda: self.now)

    def latest(self) -> Sample | None:
        return self.samples[0]

    def event(self, kind: str, **values: Any) -> None:
        self.events.append((kind, values))

    def wait(self, seconds: float) -> None:
        assert seconds == LOOK_EVERY_SECONDS
        self.now += seconds
        self.next()

    def next(self) -> None:
        assert len(self.samples) > 1, "the recorded samples are at an end: the guard waits for ever"
        self.samples.pop(0)

    def update(self, step: int = 7, stop_wanted: Callable[[], bool] = lambda: False) -> None:
        self.guard.between_updates(step, stop_wanted)


def core(*celsius: float) -> list[Sample]:
    return [Sample(card_celsius=value) for value in celsius]


def test_a_3090_heats_up_and_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(*core(70, 83, 84, 86, 88, 82, 85))
    for _ in range(6):
        card.update()
        card.next()
    card.update()
    warnings = capsys.readouterr().err
    assert warnings.count("warning: ") == 1
    assert "The card is hot: 84 °C. The run waits when it is above 88 °C (core) or 105 °C (memory)." in warnings
    assert (card.events, card.now) == ([], 0.0)


def test_above_the_pause_temperature_it_waits_until_five_degrees_cooler(capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(*core(89, 88, 87, 84, 83, 60))
    card.update()
    assert card.events == [
        ("thermal", {"step": 7, "state": "begin", "card_celsius": 89}),
        ("thermal", {"step": 7, "state": "end", "seconds": 0.8, "card_celsius": 83}),
    ]
    assert card.guard.seconds == pytest.approx(0.8)
    said = capsys.readouterr().err
    assert "The card is too hot (89 °C): the run waits until it is 5 degrees cooler." in said
    assert "the run goes on after" in said
    card.update()  # at 83 it is not too hot
    assert len(card.events) == 2


def test_the_junction_counts_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(*[Sample(card_celsius=70, card_memory_celsius=value) for value in (106, 104, 101, 100)])
    card.update()
    assert card.now == pytest.approx(0.6)
    assert "its memory is at 106 °C" in capsys.readouterr().err


def test_both_must_be_cooler() -> None:
    card = Card(
        Sample(card_celsius=90, card_memory_celsius=106),
        Sample(card_celsius=80, card_memory_celsius=102),
        Sample(card_celsius=86, card_memory_celsius=98),
        Sample(card_celsius=83, card_memory_celsius=98),
    )
    card.update()
    assert card.now == pytest.approx(0.6)


def test_a_5090_without_junction_reading_is_guarded_by_its_core() -> None:
    cool, hot = Card(Sample(card_celsius=80)), Card(*core(91, 80))
    cool.update()
    hot.update()
    assert (cool.now, hot.now) == (0.0, 0.2)


@pytest.mark.parametrize("sample", [None, Sample(), Sample(card_watts=300.0)])
def test_an_unknown_temperature_is_never_too_hot(sample: Sample | None, capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(sample)
    card.update()
    assert card.events == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("gone", [None, Sample(), Sample(card_lost=True)])
def test_a_card_that_goes_silent_while_it_cools_is_not_waited_for(gone: Sample | None) -> None:
    card = Card(*core(90, 90), gone)
    card.update()
    assert card.events[-1] == ("thermal", {"step": 7, "state": "end", "seconds": 0.4})


def test_whoever_wants_to_stop_does_not_wait() -> None:
    card = Card(*core(90, 90, 90, 90))
    card.update(stop_wanted=lambda: card.now > 0.3)
    assert card.now == pytest.approx(0.4)
    card.update(stop_wanted=lambda: True)
    assert card.now == pytest.approx(0.4)


def test_another_pause_temperature_moves_the_warning_below_it() -> None:
    assert guards_with(GUARDS, "auto") == GUARDS
    assert guards_with(GUARDS, 75.0) == Guards(70, 75, 100, 105)
    assert guards_with(GUARDS, 95.0) == Guards(83, 95, 100, 105)
    card = Card(*core(76, 71, 70), guards=guards_with(GUARDS, 75.0))
    card.update()
    assert card.now == pytest.approx(0.4)


def test_without_a_pause_temperature_it_only_warns(capsys: pytest.CaptureFixture[str]) -> None:
    card = Card(Sample(card_celsius=99, card_memory_celsius=120), guards=guards_with(GUARDS, None))
    card.update()
    assert card.events == []
    assert "The run does not wait for it to cool" in capsys.readouterr().err


# --- slower instead of waiting ------------------------------------------------------------------------------------


class Oven(Card):
    """A card that settles at once at 40 °C and another `heat` for the share of the time in which it works."""

    def __init__(self, heat: float) -> None:
        super().__init__(Sample(card_celsius=60), slow=True)
        self.heat, self.rested = heat, 0.0

    def wait(self, seconds: float) -> None:
        assert 0 < seconds <= LOOK_EVERY_SECONDS
        self.now += seconds
        self.rested += seconds

    def work(self, seconds: float) -> float:
        """An update of so many seconds and what follows it; the share of that time in which the card worked."""
        self.now += seconds
        before = self.rested
        self.update()
        duty = seconds / (seconds + self.rested - before)
        self.samples = [Sample(card_celsius=40 + self.heat * duty)]
        return duty

    @property
    def duties(self) -> list[float]:
        return [values["duty"] for kind, values in self.events if kind == "thermal" and values["state"] == "duty"]


def test_slower_it_finds_the_share_at_which_the_card_holds_below_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """At full work 98 °C, at a share of 0.9 92.2, at 0.8 86.4: below 88, and above 83, from which on it works more."""
    card = Oven(58)
    shares = [card.work(5.0) for _ in range(200)]
    assert card.duties == [0.9, 0.8]
    assert [values["card_celsius"] for _, values in card.events] == pytest.approx([98, 92.2])
    assert shares[-100:] == pytest.approx([0.8] * 100)
    assert card.guard.seconds == pytest.approx(card.rested)
    said = capsys.readouterr().err
    assert said.count("the run slows down until it holds below the limit") == 1
    assert "the card now works 80% of the time" in said


def test_cool_again_it_comes_back_to_full_speed(capsys: pytest.CaptureFixture[str]) -> None:
    card = Oven(58)
    for _ in range(40):
        card.work(5.0)
    card.heat = 20  # somebody opened a window
    shares = [card.work(5.0) for _ in range(40)]
    assert shares[-1] == 1.0 and card.duties == [0.9, 0.8, 0.85, 0.9, 0.95, 1.0]
    assert "at full speed" in capsys.readouterr().err
    events = len(card.events)
    card.work(5.0)
    assert len(card.events) == events


def test_each_share_gets_the_time_to_show_what_it_does() -> None:
    card = Oven(100)
    changed = []
    for _ in range(30):
        card.work(1.0)
        if len(card.duties) > len(changed):
            changed.append(card.now)
    assert card.duties == [0.9, 0.8, 0.7, 0.6]
    # 10 s, and what is left of an update with its longer rest.
    assert all(10 <= after - before < 12.5 for before, after in zip(changed, changed[1:]))


def test_where_no_share_is_enough_it_waits_after_all() -> None:
    card = Oven(1000)
    for _ in range(100):
        card.work(10.0)
        if card.duties[-1:] == [0.2]:
            break
    assert card.duties == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    card.now += 10.0
    card.samples = [*core(90, 88, 84, 83)]
    waited = []
    card.guard._wait = lambda seconds: (waited.append(seconds), card.next())  # type: ignore[assignment, return-value]
    card.update()
    assert waited == [LOOK_EVERY_SECONDS] * 3
    assert [values["state"] for _, values in card.events[-2:]] == ["begin", "end"]


def test_a_signal_ends_a_rest() -> None:
    card = Oven(60)
    card.samples = core(95)
    card.now += 100.0  # a long update: at a tenth it would rest 11 s
    card.update(stop_wanted=lambda: card.rested > 0.5)
    assert card.rested == pytest.approx(0.6)


def test_slow_changes_nothing_while_the_card_is_cool_or_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for sample in (Sample(card_celsius=85), Sample(), None):
        card = Oven(0)
        card.samples = [sample]
        card.now += 50.0
        card.update()
        assert (card.events, card.rested) == ([], 0.0)
    assert "The run slows down when it is above 88 °C" in capsys.readouterr().err
