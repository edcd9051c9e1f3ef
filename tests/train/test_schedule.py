from __future__ import annotations

import pytest

from onecard.train.schedule import Schedule


def factors(schedule: Schedule) -> list[float]:
    return [schedule.factor(update) for update in range(schedule.max_steps)]


def test_cosine_by_hand() -> None:
    """Warm-up 2 of 6; then (1 + cos(pi k / 4)) / 2 for k = 0..3, down to a tenth."""
    made = factors(Schedule("cosine", 6, 1 / 3, 0.0, 0.1))
    shape = [1.0, 0.8535534, 0.5, 0.1464466]
    assert made == pytest.approx([1 / 3, 2 / 3, *(0.1 + 0.9 * value for value in shape)])


def test_wsd_by_hand() -> None:
    """Warm-up 2, stable, linear decay over the last 4 of 10; `final_ratio` is reached just after the last."""
    made = factors(Schedule("wsd", 10, 0.2, 0.4, 0.0))
    assert made == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.4, 1.0])
def test_factors_rise_then_fall_and_are_never_0(kind: str, max_steps: int, warmup: float, decay: float) -> None:
    made = factors(Schedule(kind, max_steps, warmup, decay, 0.0))
    assert all(0 < factor <= 1 for factor in made)
    top = round(warmup * max_steps)
    assert made[:top] == sorted(made[:top])
    assert made[top:] == sorted(made[top:], reverse=True)
    # The peak follows the warm-up without a jump, however long the decay is.
    assert top == max_steps or made[top] == 1.0
