from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onecard.errors import ConfigError
from onecard.model.presets import PRESETS, Preset
from onecard.plan import speed
from onecard.plan.costs import Costs, Work
from onecard.plan.job import Engine, Job, Target
from onecard.plan.targets import target

CARD = Target("RTX 3090", "cuda", 24 << 30, (8, 6), {"fp32": 5e13, "bf16": 1e14}, 1e12, 2e10, None, 350.0, False)
CPU = Target("EPYC", "cpu", 16 << 30, None, {"fp32": 1e11}, 2e10, None, 16 << 30, None, True)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    made: Any = LlamaConfig
    return made(**settings | changes)


def test_a_product_by_hand() -> None:
    """4096 x 1024 x 2048: 512 tiles of 128 x 128, 32 lost; an inner dimension of 1024 as if of 1088."""
    work = Work(4096, 1024, 2048, 3, "bf16")
    reached = 1e14 * 1024 / 1088 * 512 / 544
    assert speed.product_seconds(work, CARD) == pytest.approx(3 * 2 * 4096 * 1024 * 2048 / reached)


def test_a_narrow_product_waits_for_its_bytes() -> None:
    work = Work(4096, 4096, 1, 1, "bf16")
    slow = replace(CARD, flops_per_second={"bf16": 1e30})
    assert speed.product_seconds(work, slow) == pytest.approx((4096 * 4096 + 4096 + 4096) * 2 / 1e12)


def test_a_long_inner_dimension_is_cut_so_that_few_tiles_fill_a_card() -> None:
    """A weight's gradient, 256 x 65536 x 256: 4 tiles, in 64 pieces each."""
    work = Work(256, 65536, 256, 1, "bf16")
    reached = 1e14 * 65536 / (65536 + 64) * 256 / 288
    assert speed.product_seconds(work, CARD) == pytest.approx(2 * 256 * 65536 * 256 / reached)


def test_a_processor_reaches_a_share_of_its_rate() -> None:
    work = Work(1000, 496, 1000, 1, "fp32")
    assert speed.product_seconds(work, CPU) == pytest.approx(2 * 1000 * 496 * 1000 / (1e11 * 0.85 * 496 / 512))


def test_the_parts_by_hand() -> None:
    costs = Costs(attention_flops=65e12, traffic_bytes=0.95e12, optimizer_bytes=1.9e12, host_bytes=2e10, launches=1e5)
    assert speed.seconds_of(costs, CARD) == pytest.approx(
        {"products": 0, "attention": 1, "memory traffic": 1, "optimizer": 2, "launches": 0, "transfers": 1}
    )


def test_a_card_waits_only_for_launches_that_take_longer_than_its_work() -> None:
    costs = Costs(traffic_bytes=0.95e12, launches=2e5)
    assert speed.seconds_of(costs, CARD)["launches"] == pytest.approx(1.4 - 1.0)
    on_cpu = Costs(traffic_bytes=1e10, attention_format="fp32", launches=1e5)
    assert speed.seconds_of(on_cpu, CPU)["launches"] == pytest.approx(0.7)


def test_kept_activations_travel_beside_the_work() -> None:
    """A second of work is a third forward and two back, at 20 GB/s: 10 GB fit beside it, of 50 GB a second and a half
    is left."""
    hidden = Costs(traffic_bytes=0.95e12, hidden_bytes=1e10)
    assert speed.seconds_of(hidden, CARD)["transfers"] == 0
    outward = Costs(traffic_bytes=0.95e12, hidden_bytes=2e10)
    assert speed.seconds_of(outward, CARD)["transfers"] == pytest.approx(0.5 - 1 / 3)
    seen = Costs(traffic_bytes=0.95e12, hidden_bytes=5e10)
    assert speed.seconds_of(seen, CARD)["transfers"] == pytest.approx(1.5)


def test_a_speed_adds_up_its_parts() -> None:
    job = Job(llama(), 4, 128, gradient_accumulation_steps=2)
    found = speed.speed(job, CARD)
    assert found.seconds_per_update == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(1024 / found.seconds_per_update)
    assert found.watts == pytest.approx(350 * 0.86)
    assert (found.measured, found.uncertainty) == (False, 1.4)
    assert speed.speed(replace(job, precision="fp32"), CPU).uncertainty == 1.25
    assert speed.uncertainty(target("RTX 4080")) == 1.6


@pytest.mark.parametrize(
    "slower",
    [
        {"activation_checkpointing": "full"},
        {"activation_compression": "8bit"},
        {"optimizer_states": "host"},
        {"engine": Engine(compiled=False)},
        {"engine": Engine(attention="eager")},
        {"engine": Engine(chunked_loss=False)},
        {"engine": Engine(fused_optimizer=False)},
        {"precision": "fp32"},
        {"batch_size": 2, "gradient_accumulation_steps": 32},
    ],
)
def test_what_costs_time(slower: dict[str, Any]) -> None:
    job = Job(llama(hidden_size=1024, num_attention_heads=16, num_key_value_heads=16), 64, 512)
    assert speed.speed(replace(job, **slower), CARD).seconds_per_update > speed.speed(job, CARD).seconds_per_update


@pytest.mark.parametrize("faster", [{"optimizer_states": "8bit"}, {"precision": "pure_bf16"}, {"method": "lora"}])
def test_what_saves_time(faster: dict[str, Any]) -> None:
    job = Job(llama(hidden_size=1024, num_attention_heads=16, num_key_value_heads=16), 64, 512, lora_rank=8)
    assert speed.speed(replace(job, **faster), CARD).seconds_per_update < speed.speed(job, CARD).seconds_per_update


def test_float8_is_faster_where_it_exists_and_refused_where_not() -> None:
    wide = llama(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    job = Job(wide, 8, 2048)
    card = target("RTX 4090")
    float8 = replace(job, precision="float8")
    assert speed.speed(float8, card).seconds_per_update < speed.speed(job, card).seconds_per_update
    with pytest.raises(ConfigError, match="float8 cannot be had on RTX 3090"):
        speed.speed(float8, CARD)


def test_energy_by_hand() -> None:
    """301 W for two hours at 0.30 a kWh."""
    found = speed.speed(Job(llama(), 4, 128), CARD)
    used = speed.energy(found, 7200, 0.30)
    assert used.kwh == pytest.approx(0.602)
    assert used.cost == pytest.approx(0.1806)
    assert speed.energy(found, 7200).cost is None
    assert speed.energy(replace(found, watts=None), 7200, 0.30) == speed.Energy(None, None)


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
