"""What the watchdog says of recorded courses of a run."""

from __future__ import annotations

import json
from collections import deque

import pytest

from onecard.train.watchdog import Action, Limits, Watchdog, is_spike


def calm(dog: Watchdog, updates: int = 30, loss: float = 3.0) -> None:
    """Losses and norms that move by a few percent."""
    for number in range(updates):
        assert dog.after_update(loss + 0.05 * (-1) ** number, 1.0 + 0.1 * (number % 3), skipped=False) == (
            Action.GO_ON,
            [],
        )


def kinds(found: list[object]) -> list[str]:
    return [finding.kind for finding in found]  # type: ignore[attr-defined]


def test_skips_in_a_row_roll_back_and_in_the_end_give_up() -> None:
    dog = Watchdog(Limits(skips_before_roll_back=3, most_roll_backs=2))
    actions = [dog.after_update(float("nan"), 1.0, skipped=True)[0] for _ in range(9)]
    wanted = [Action.GO_ON, Action.GO_ON, Action.ROLL_BACK] * 2 + [Action.GO_ON, Action.GO_ON, Action.GIVE_UP]
    assert actions == wanted
    # One good update between them is a new count; 64 of them, and what was wrong is over.
    dog = Watchdog(Limits(skips_before_roll_back=2, most_roll_backs=1))
    dog.after_update(float("nan"), 1.0, skipped=True)
    calm(dog, 1)
    assert dog.after_update(float("nan"), 1.0, skipped=True)[0] is Action.GO_ON
    assert dog.after_update(float("nan"), 1.0, skipped=True)[0] is Action.ROLL_BACK
    calm(dog, 64)
    assert dog.roll_backs == 0


def test_a_spike_by_hand() -> None:
    """Median 3, deviations of 0.05: sigma 0.074; 8 of them end at 3.59, and 1.3 x 3 at 3.9."""
    before = deque([2.95, 3.05] * 10)
    assert not is_spike(3.8, before, 1.3) and is_spike(3.91, before, 1.3)
    # A quiet course: the factor decides; a noisy one: the deviations.
    assert not is_spike(3.8, deque([3.0] * 20), 1.3) and is_spike(3.95, deque([3.0] * 20), 1.3)
    assert not is_spike(5.0, deque([2.0, 4.0] * 10), 1.3)
    # Too short a past says nothing.
    assert not is_spike(100.0, deque([3.0] * 19), 1.3)


@pytest.mark.parametrize(("on_spike", "action"), [("ignore", Action.GO_ON), ("warn", Action.GO_ON)])
def test_spikes_are_said_once_until_they_are_over(on_spike: str, action: Action) -> None:
    dog = Watchdog(Limits(on_spike=on_spike))
    calm(dog)
    first, second = (dog.after_update(9.0, 20.0, skipped=False) for _ in range(2))
    assert first[0] is action and second == (action, [])
    assert kinds(first[1]) == ([] if on_spike == "ignore" else ["spike"])
    if on_spike == "warn":
        assert "loss and the gradient norm" in first[1][0].text and "loss 9 (lately 3" in first[1][0].text
    calm(dog, 2)  # the spike is no part of what is usual
    assert kinds(dog.after_update(9.0, 1.0, skipped=False)[1]) == ([] if on_spike == "ignore" else ["spike"])


def test_spikes_may_roll_back() -> None:
    dog = Watchdog(Limits(on_spike="roll_back"))
    calm(dog)
    assert dog.after_update(3.0, 50.0, skipped=False)[0] is Action.GO_ON  # a norm alone is clipped
    assert dog.after_update(9.0, 1.0, skipped=False)[0] is Action.ROLL_BACK


def evaluated(dog: Watchdog, held_out: list[float], training: list[float], *, decaying: bool = False) -> list[str]:
    said = []
    for held_out_loss, loss in zip(held_out, training):
        for _ in range(64):
            dog.after_update(loss, 1.0, skipped=False)
        said += kinds(dog.after_evaluation(held_out_loss, [], decaying=decaying))
    return said


@pytest.mark.parametrize(
    ("held_out", "training", "said"),
    [
        ([5.0, 4.0, 3.5, 3.2, 3.0], [5.0, 4.0, 3.5, 3.2, 3.0], []),
        ([3.0, 3.1, 3.2, 3.3, 3.4], [3.0, 2.5, 2.0, 1.5, 1.0], ["overfitting"]),
        ([3.0, 3.1, 3.2, 3.3, 3.4], [3.0, 3.1, 3.2, 3.3, 3.4], ["divergence"]),
        ([3.0, 3.001, 2.999, 3.0, 3.0], [3.0] * 5, ["plateau"]),
        ([3.0, 3.1, 3.0, 3.1, 3.0], [3.0] * 5, ["plateau"]),
        ([3.0, 3.01, 3.02, 3.03], [3.0, 2.9, 2.8, 2.7], ["plateau"]),  # worse by a percent is no divergence yet
        ([3.0, 3.1], [3.0, 3.1], []),
    ],
)
def test_trends_of_evaluations(held_out: list[float], training: list[float], said: list[str]) -> None:
    assert evaluated(Watchdog(Limits()), held_out, training) == said


def test_a_plateau_while_the_rate_decays_is_not_said() -> None:
    assert evaluated(Watchdog(Limits()), [3.0] * 5, [3.0] * 5, decaying=True) == []


def test_repetition_in_every_sample() -> None:
    dog = Watchdog(Limits())
    looping, sound = "话说天下大势" * 20, "In the beginning God created the heaven and the earth, and it was void."
    assert dog.after_evaluation(None, [looping, sound], decaying=False) == []
    assert kinds(dog.after_evaluation(None, [looping, looping], decaying=False)) == ["repetition"]
    assert dog.after_evaluation(None, [looping, looping], decaying=False) == []


def test_early_stopping_waits_for_its_patience() -> None:
    dog = Watchdog(Limits(early_stopping=2))
    enough = []
    for loss in (3.0, 2.0, 2.5, 1.9, 2.0, 1.95):
        dog.after_evaluation(loss, [], decaying=False)
        enough.append((dog.is_best, dog.enough))
    assert enough == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert not Watchdog(Limits()).enough


def test_what_it_remembers_goes_through_a_file() -> None:
    dogs = [Watchdog(Limits(skips_before_roll_back=3)) for _ in range(2)]
    calm(dogs[0], 40)
    dogs[0].after_evaluation(3.0, [], decaying=False)
    dogs[0].after_update(float("inf"), 1.0, skipped=True)
    dogs[1].load(json.loads(json.dumps(dogs[0].state())))
    assert dogs[1].state() == dogs[0].state()
    for _ in range(2):
        first, second = (dog.after_update(float("inf"), 1.0, skipped=True) for dog in dogs)
        assert first == second
    assert first[0] is Action.ROLL_BACK
