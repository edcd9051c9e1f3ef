from __future__ import annotations

from typing import Any

import pytest

from onecard.model.presets import PRESETS, Preset
from onecard.plan import speed


def chosen(**changes: Any) -> Preset:
    settings: dict[str, Any] = {
        "seconds": 600.0,
        "flops_per_second": 1e11,
        "device": "cpu",
        "vocabulary": 6000,
        "tokens": 10**8,
        "context_tokens": 256,
    }
    return speed.choose_size(**settings | changes)


def test_more_time_or_a_faster_machine_gives_a_larger_model() -> None:
    order = list(PRESETS)
    by_time = [order.index(chosen(seconds=10.0**k).name) for k in range(8)]
    by_rate = [order.index(chosen(flops_per_second=10.0**k).name) for k in range(9, 15)]
    assert by_time == sorted(by_time) and by_time[0] < by_time[-1]
    assert by_rate == sorted(by_rate) and by_rate[0] < by_rate[-1]


def test_little_text_keeps_the_model_small() -> None:
    assert chosen(seconds=1e9, tokens=1000).name == next(iter(PRESETS))
    assert chosen(seconds=1e9, tokens=10**12).name == list(PRESETS)[-1]


def test_the_choice_is_the_largest_that_sees_enough() -> None:
    shape = chosen()
    enough = [
        preset
        for preset in PRESETS.values()
        if min(
            600.0 * 1e11 * speed.UTILISATION["cpu"] / preset.training_flops_per_token(6000, 128),
            speed.MOST_EPOCHS * 10**8,
        )
        >= speed.LEAST_TOKENS_PER_PARAMETER * preset.layer_parameters()
    ]
    assert shape == enough[-1]


def test_an_update_by_hand() -> None:
    """6 x 1M parameters x 1,000 tokens at 65 % of 10 GFLOP/s."""
    found = speed.update_seconds(parameters=10**6, tokens=1000, flops_per_second=1e10, device="cpu")
    assert found == pytest.approx(6e9 / 6.5e9)


def test_updates_in_time_by_hand() -> None:
    assert speed.updates_in_time(100, 2.0, evaluation_share=0.05) == 47
    assert speed.updates_in_time(1, 2.0, evaluation_share=0.05) == 1
