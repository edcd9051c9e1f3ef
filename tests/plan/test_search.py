from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onecard.plan.candidates import all_of, approximate, formats, possible, preference, splits, ways, words
from onecard.plan.job import Job, Memory, Target
from onecard.plan.search import MOST_CALLS, best, savings
from onecard.plan.speed import speed

GB = 10**9
CARD = Target("RTX 3090", "cuda", 10 * GB, (8, 6), {"fp32": 3e13, "bf16": 7e13}, 8e11, 2e10, None, 350.0, False)
CPU = Target("EPYC", "cpu", 10 * GB, None, {"fp32": 1e11, "bf16": 1e9}, 2e10, None, 10 * GB, None, True)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig

    made: Any = LlamaConfig
    return made(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=20,
        num_attention_heads=8,
        num_key_value_heads=8,
    )


def formula(static: float, row: float) -> tuple[Callable[[Job], Memory], list[Job]]:
    """Memory of `static` GB and of `row` GB a row of a micro-batch, less what each way saves; and what was asked."""
    asked: list[Job] = []

    def memory(job: Job) -> Memory:
        asked.append(job)
        share = {"none": 1.0, "selective": 0.7, 2: 0.6, "full": 0.2}[job.activation_checkpointing]
        share *= 0.5 if job.activation_compression == "8bit" else 1.0
        share *= 0.1 if job.activation_offload else 1.0
        kept = static * {"fp32": 1.0, "8bit": 0.6, "host": 0.5}[job.optimizer_states]
        kept *= 0.7 if job.optimizer_in_backward else 1.0
        kept *= 0.6 if job.precision == "pure_bf16" else 1.0
        kept *= 0.9 if job.gradients == "bf16" else 1.0
        stays, passes = int(GB * kept), int(GB * row * share * job.batch_size)
        return Memory(stays + passes, stays + passes, 0, {"parameters": stays, "activations": passes})

    return memory, asked


def test_where_everything_fits_nothing_is_saved(model: Any) -> None:
    memory, _ = formula(1, 0.1)
    first = best(Job(model, 1, 512), CARD, memory, rows_per_update=16)[0]
    assert ways(first.job) == frozenset()
    assert first.job.batch_size * first.job.gradient_accumulation_steps == 16
    assert first.fits and first.margin_bytes == CARD.capacity_bytes - first.memory.needed_bytes


def test_the_micro_batch_is_as_large_as_fits_before_anything_is_computed_again(model: Any) -> None:
    """1 GB and 2 GB a row: 4 rows fit into 9.5 GB, 8 do not."""
    memory, asked = formula(1, 2)
    first = best(Job(model, 1, 512), CARD, memory, rows_per_update=64)[0]
    assert (first.job.batch_size, first.job.gradient_accumulation_steps) == (4, 16)
    assert ways(first.job) == frozenset()
    assert len(asked) <= MOST_CALLS + 4


def test_the_first_is_the_fastest_of_all_that_fit(model: Any) -> None:
    """By trying every one of them. A row alone takes 12 GB: something has to be saved."""
    memory, asked = formula(2, 12)
    job = Job(model, 1, 512)
    found = best(job, CARD, memory, rows_per_update=8)
    assert len(asked) <= MOST_CALLS + 4
    fitting = [
        one
        for one in all_of(job, CARD, rows_per_update=8, fixed=frozenset(), clipping=True)
        if memory(one).needed_bytes <= 0.95 * CARD.capacity_bytes
    ]
    scores = [preference(one, speed(one, CARD).seconds_per_update) for one in fitting]
    own = preference(found[0].job, found[0].speed.seconds_per_update)
    assert own == pytest.approx(min(scores))
    assert all(candidate.fits for candidate in found)


def test_alternatives_differ_in_what_they_do(model: Any) -> None:
    memory, _ = formula(2, 2)
    found = best(Job(model, 1, 512), CARD, memory, rows_per_update=16)
    assert len(found) >= 2
    assert len({ways(candidate.job) for candidate in found}) == len(found)
    ranks = [preference(candidate.job, candidate.speed.seconds_per_update) for candidate in found]
    assert ranks == sorted(ranks)


def test_what_is_exact_comes_before_what_is_not(model: Any) -> None:
    """Both host and 8-bit states would fit; on this bus the host is hardly slower."""
    memory, _ = formula(15, 0.1)
    quick = replace(CARD, host_bytes_per_second=1e13)
    first = best(Job(model, 1, 512), quick, memory, rows_per_update=4)[0]
    assert approximate(first.job) == 0
    assert first.job.optimizer_states == "host"
    slow = replace(CARD, host_bytes_per_second=1e8)
    assert best(Job(model, 1, 512), slow, memory, rows_per_update=4)[0].job.optimizer_states != "host"


def test_fixed_settings_stay(model: Any) -> None:
    memory, asked = formula(2, 2)
    job = Job(model, 2, 512, activation_checkpointing=2, optimizer_states="8bit", precision="bf16")
    fixed = frozenset({"batch_size", "activation_checkpointing", "optimizer_states", "precision"})
    for candidate in best(job, CARD, memory, rows_per_update=16, fixed=fixed):
        assert (candidate.job.batch_size, candidate.job.gradient_accumulation_steps) == (2, 8)
        assert (candidate.job.activation_checkpointing, candidate.job.optimizer_states) == (2, "8bit")
        assert candidate.job.precision == "bf16"
    assert all(one.gradient_accumulation_steps == 2 for one in asked), "more than two hold what two hold"


def test_the_margin_stays_free(model: Any) -> None:
    """1 GB and 1 GB a row: 8 rows fit into 10 GB less 5 %, and with a fifth kept free only 4."""
    memory, _ = formula(1, 1)
    only = frozenset({"activation_checkpointing", "optimizer_states", "precision", "activation_compression"}) | {
        "activation_offload"
    }
    job = Job(model, 1, 512)
    assert best(job, CARD, memory, rows_per_update=64, fixed=only)[0].job.batch_size == 8
    assert best(job, CARD, memory, rows_per_update=64, fixed=only, margin=0.2)[0].job.batch_size == 4


def test_a_step_in_backward_only_without_clipping_and_accumulation(model: Any) -> None:
    job = Job(model, 1, 512)
    clipped = list(all_of(job, CARD, rows_per_update=4, fixed=frozenset(), clipping=True))
    assert not any(one.optimizer_in_backward for one in clipped)
    free = list(all_of(job, CARD, rows_per_update=4, fixed=frozenset(), clipping=False))
    in_backward = [one for one in free if one.optimizer_in_backward]
    assert in_backward and all(one.gradient_accumulation_steps == 1 for one in in_backward)
    lora = all_of(replace(job, method="lora"), CARD, rows_per_update=4, fixed=frozenset(), clipping=False)
    assert not any(one.optimizer_in_backward or one.optimizer_states != "fp32" for one in lora)


def test_where_nothing_fits_the_nearest_come_first(model: Any) -> None:
    memory, asked = formula(100, 1)
    found = best(Job(model, 1, 512), CARD, memory, rows_per_update=4)
    assert found and not any(candidate.fits for candidate in found)
    needed = [candidate.memory.needed_bytes for candidate in found]
    assert needed == sorted(needed)
    least = found[0].job
    assert (least.batch_size, least.optimizer_states, least.precision) == (1, "host", "pure_bf16")
    assert len(asked) <= MOST_CALLS + 4


def test_savings_by_hand(model: Any) -> None:
    """10 GB and 2 x 4 GB: one row saves 4, full checkpointing 6.4, states on the host 5 and in 8 bits 4."""
    memory, _ = formula(10, 4)
    job = Job(model, 2, 512, gradient_accumulation_steps=2)
    found = savings(job, CARD, memory)
    saved = {saving.words: round(saving.saved_bytes / GB, 3) for saving in found}
    assert saved == {
        "batch_size = 1": 4.0,
        "activations on the host": 7.2,
        "full checkpointing": 6.4,
        "optimizer states on the host": 5.0,
        "8-bit optimizer states": 4.0,
        "weights in bf16": 4.0,
        "activations in 8 bits": 4.0,
        "1 layer in 2 checkpointed": 3.2,
        "selective checkpointing": 2.4,
        "gradients in bf16": 1.0,
    }
    assert [saving.saved_bytes for saving in found] == sorted((s.saved_bytes for s in found), reverse=True)
    full = next(saving for saving in found if saving.words == "full checkpointing")
    assert full.settings == {"activation_checkpointing": "full"}
    assert 1.1 < full.time_factor < 1.4


def test_a_processor_takes_small_micro_batches_of_its_own_format(model: Any) -> None:
    job = Job(model, 1, 1024)
    assert splits(job, CPU, 16, frozenset()) == [(1, 16), (2, 8), (4, 4)]
    assert formats(job, CPU) == ("fp32",)
    assert formats(job, replace(CPU, flops_per_second={"fp32": 1e11, "bf16": 3e11})) == ("bf16", "pure_bf16")
    assert formats(job, replace(CARD, capability=(7, 5))) == ("fp16",)
    made = list(all_of(job, CPU, rows_per_update=4, fixed=frozenset(), clipping=True))
    assert made and all(one.device == "cpu" and not one.activation_offload for one in made)
    assert {one.optimizer_states for one in made} == {"fp32", "8bit"}


def test_splits_by_hand(model: Any) -> None:
    job = Job(model, 3, 512, gradient_accumulation_steps=5)
    assert splits(job, CARD, 6, frozenset()) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert splits(job, CARD, 6, frozenset({"batch_size"})) == [(3, 2)]
    assert splits(job, CARD, 15, frozenset({"gradient_accumulation_steps"})) == [(3, 5)]
    assert splits(job, CARD, 99, frozenset({"batch_size", "gradient_accumulation_steps"})) == [(3, 5)]
    assert len(splits(job, CARD, 5040, frozenset())) == 12


def test_settings_that_the_engine_refuses_together(model: Any) -> None:
    job = Job(model, 1, 512, optimizer_in_backward=True)
    assert possible(job)
    for changes in ({"gradient_accumulation_steps": 2}, {"precision": "fp16"}, {"gradients": "bf16"}):
        refused: dict[str, Any] = changes
        assert not possible(replace(job, **refused))
    assert not possible(Job(model, 1, 512, optimizer="adafactor", optimizer_states="8bit"))


def test_ways_in_words(model: Any) -> None:
    job = Job(model, 1, 512, activation_checkpointing=3, optimizer_states="8bit", precision="pure_bf16")
    assert words(job) == ["weights in bf16", "1 layer in 3 checkpointed", "8-bit optimizer states"]
    assert approximate(job) == 2
    assert approximate(replace(job, method="lora")) == 1, "frozen weights lose nothing in the format they came in"
