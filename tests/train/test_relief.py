"""The ladder of measures, against a formula whose sums are done by hand."""

from __future__ import annotations

from typing import Any

import pytest
from plan_toys import GIB, formula, job

from onecard.plan.job import Job
from onecard.train import relief


def fitting(capacity: float) -> Any:
    return lambda one: formula(one).needed_bytes <= capacity * GIB


@pytest.mark.parametrize(
    ("capacity", "changes"),
    [
        # 8 rows: 4 + 4 + 8 + 2 a row = 24 with 4, 20 with 2, 18 with 1; less only by computing again.
        (20, {"batch_size": 2, "gradient_accumulation_steps": 4}),
        (18, {"batch_size": 1, "gradient_accumulation_steps": 8}),
        (17, {"batch_size": 1, "gradient_accumulation_steps": 8, "activation_checkpointing": "selective"}),
        (16.5, {"batch_size": 1, "gradient_accumulation_steps": 8, "activation_checkpointing": "full"}),
    ],
)
def test_what_changes_no_result_comes_first(capacity: float, changes: dict[str, Any]) -> None:
    found = relief.relieved(job(), fitting(capacity))
    assert found is not None and relief.differing(job(), found) == changes


@pytest.mark.parametrize(
    ("capacity", "last"),
    [
        (10.5, ("optimizer_states", "8bit")),  # 4 + 4 + 2 + 0.5
        (8.5, ("gradients", "bf16")),  # 4 + 2 + 2 + 0.5
        (6.5, ("optimizer_in_backward", True)),  # 4 + 0 + 2 + 0.5
        (4.5, ("precision", "pure_bf16")),  # 2 + 0 + 2 + 0.5
        (2.5, ("optimizer", "adafactor")),  # 2 + 0 + 0 + 0.5
        (1.5, ("method", "qlora")),  # 1 + 0.5
        (1.25, ("max_length", 512)),
        (1.125, ("max_length", 256)),
    ],
)
def test_each_measure_stands_on_those_before(capacity: float, last: tuple[str, Any]) -> None:
    found = relief.relieved(job(), fitting(capacity))
    assert found is not None and getattr(found, last[0]) == last[1]
    walked = list(relief.steps(job()))
    assert not any(fitting(capacity)(one) for one in walked[: walked.index(found)])


def test_what_cannot_fit_is_none_and_only_allowed_measures_are_taken() -> None:
    assert relief.relieved(job(), fitting(1.0)) is None
    assert relief.relieved(job(), fitting(17.9), ["batch_size"]) is None
    assert relief.relieved(job(), fitting(18), ["batch_size"]) is not None


def test_measures_fit_together() -> None:
    """A step inside backward keeps no gradient and has one micro-batch; adapters need nothing of what came before."""
    walked = list(relief.steps(job()))
    for one in walked:
        assert not (one.optimizer_in_backward and (one.gradients == "bf16" or one.gradient_accumulation_steps > 1))
        assert not (one.optimizer == "adafactor" and one.optimizer_states != "fp32")
        assert not (one.method != "full" and (one.optimizer_in_backward or not one.lora_rank))
    assert [one.method for one in walked if one.method != "full"] == ["lora", "qlora", "qlora", "qlora"]


def test_rows_of_an_update_stay() -> None:
    def rows(one: Job) -> int:
        return one.batch_size * one.gradient_accumulation_steps

    assert {rows(one) for one in relief.steps(job(), ["batch_size"])} == {8}
    # Packed activations leave nothing for selective to keep where layers run plainly; and every 2nd layer becomes all.
    from onecard.plan.job import Engine

    plain = job(activation_compression="8bit", engine=Engine(compiled=False))
    assert [one.activation_checkpointing for one in relief.steps(plain, ["activation_checkpointing"])] == ["full"]
    second = job(activation_checkpointing=2)
    assert [one.activation_checkpointing for one in relief.steps(second, ["activation_checkpointing"])] == ["full"]
