"""Graphs of compiled layers that forecasts share: what was asked before changes nothing, and little is traced twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from onecard.plan.job import Job, Memory, Target
from onecard.plan.search import Asked, best
from onecard.train import fake_compiled, forecast
from onecard.train.forecast import memory

MIB = 1 << 20
CARD = Target("a card", "cuda", 700 * MIB, (8, 6), {"fp32": 3e13, "bf16": 7e13}, 8e11, 2e10, None, 350.0, False)


def llama(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**(shape | changes))


PLAIN = Job(llama(), 2, 32)
LORA = replace(PLAIN, method="lora", lora_rank=4)
OTHERS: dict[str, Job] = {
    "the same, computed again": replace(PLAIN, activation_checkpointing="full"),
    "in part": replace(PLAIN, activation_checkpointing="selective"),
    "every second layer": replace(PLAIN, activation_checkpointing=2),
    "weights in bf16": replace(PLAIN, precision="pure_bf16"),
    "without autocast": replace(PLAIN, precision="fp32"),
    "on the host": replace(PLAIN, activation_offload=True),
    "in 8 bits": replace(PLAIN, activation_compression="8bit"),
    "in backward": replace(PLAIN, optimizer_in_backward=True),
    "more rows": replace(PLAIN, batch_size=4),
    "on a CPU": replace(PLAIN, device="cpu"),
    "deeper": replace(PLAIN, model=llama(num_hidden_layers=9)),
    "of other heads": replace(PLAIN, model=llama(num_key_value_heads=4)),
    "of another activation": replace(PLAIN, model=llama(hidden_act="relu")),
    "LoRA": LORA,
    "LoRA with dropout": replace(LORA, lora_dropout=0.1),
    "QLoRA": replace(LORA, method="qlora"),
}


def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each layer that is traced from now on."""
    found: list[None] = []
    traced = fake_compiled._Layer._compiled

    def counted(*args: Any) -> Any:
        found.append(None)
        return traced(*args)

    monkeypatch.setattr(fake_compiled._Layer, "_compiled", counted)
    return found


@pytest.fixture(scope="module")
def alone() -> Memory:
    fake_compiled.forget()
    return memory(PLAIN)


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_asked_before_changes_nothing(name: str, alone: Memory) -> None:
    fake_compiled.forget()
    first = memory(OTHERS[name])
    assert memory(PLAIN) == alone
    assert memory(OTHERS[name]) == first


def test_asked_again_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiled.forget()
    found = captures(monkeypatch)
    first = memory(PLAIN)
    kinds = len(found)
    assert 1 <= kinds <= 2  # training, evaluation
    # Deeper ones have the same layers; and an optimizer sees gradients, not layers.
    for job in (PLAIN, replace(PLAIN, model=llama(num_hidden_layers=9)), replace(PLAIN, optimizer_states="8bit")):
        memory(job)
    assert len(found) == kinds
    assert memory(PLAIN) == first
    # Computed again are the same layers, cut elsewhere; their evaluation is the same one.
    memory(replace(PLAIN, activation_checkpointing="full"))
    assert len(found) == kinds + 1


def test_a_search_traces_each_kind_of_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiled.forget()
    found = captures(monkeypatch)
    job = Job(llama(hidden_size=256, intermediate_size=704), 1, 256)
    steps: list[int] = []
    run = forecast.run_step

    def counted(job: Job, layers: int) -> Any:
        steps.append(layers)
        return run(job, layers)

    monkeypatch.setattr(forecast, "run_step", counted)
    asked: list[Job] = []

    def of(job: Job) -> Memory:
        asked.append(job)
        return memory(job)

    best(job, CARD, of, rows_per_update=16)
    assert len(asked) > 3
    assert len(steps) == len(asked)  # each with the first number of layers that was tried
    kinds = {(one.batch_size, one.precision, one.activation_checkpointing) for one in asked}
    assert len(found) <= 2 * len(kinds) < 2 * len(asked)


def test_what_cannot_fit_is_not_traced() -> None:
    asked: list[Job] = []

    def of(job: Job) -> Memory:
        asked.append(job)
        return memory(job)

    # 16 bytes a weight of 77M weights are 1.2 GB.
    large = Job(llama(vocab_size=600_000), 1, 32, precision="fp32")
    assert not Asked(of, CARD, 0.0).fits(large)
    assert not asked
    assert Asked(of, CARD, 0.0).fits(PLAIN)
    assert len(asked) == 1
