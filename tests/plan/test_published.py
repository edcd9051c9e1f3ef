"""Published measurements: how rows are read, and how far the planner is from them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from onecard.plan.job import Engine, Job, Memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("published")
    finally:
        sys.path.remove(str(BENCHMARKS))


def memory_of(allocated: int, reserved: int) -> Memory:
    return Memory(allocated, reserved, 0, {})


def test_every_row_is_a_job_or_says_what_it_lacks(published: ModuleType) -> None:
    rows = published.rows()
    assert len(rows) == 44
    assert {row.source for row in rows} == set(published.TOOLS)
    for row in rows:
        assert row.url.startswith("https://")
        job = published.TOOLS[row.source](row)
        assert isinstance(job, Job)
        assert job.max_length == int(row.tokens or published.USUAL_TOKENS)
        assert row.lacks() is None


@pytest.mark.parametrize(
    ("source", "label", "bytes_"),
    [
        ("torchtune README", "full bf16 adamw 2 x 4096 packed", 60 * 2**30),
        ("litgpt resource tables", "lora r8 on 2 maps bf16 adamw 1 x 1044", 4_820_000_000),
        ("HF single-GPU guide", "full fp32 adamw 4 x 512 packed", 14949 * 2**20),
    ],
)
def test_figures_are_in_the_units_of_their_source(published: ModuleType, source: str, label: str, bytes_: int) -> None:
    (row,) = [row for row in published.rows() if (row.source, row.label) == (source, label)]
    assert row.published_bytes == bytes_


def test_what_is_known_of_the_tools_decides_the_job(published: ModuleType) -> None:
    rows = published.rows()
    (lit,) = [row for row in rows if row.model == "phi-1.5" and row.base_format == "nf4-dq"]
    job = published.TOOLS[lit.source](lit)
    assert (job.method, job.lora_rank, job.lora_dropout, job.weights) == ("qlora", 8, 0.05, "bf16")
    assert job.engine.double_quantization and job.engine.keeps_quantized_inputs
    assert job.model.hidden_act == "gelu_pytorch_tanh"
    (last,) = [row for row in rows if row.source == "torchtune README" and row.optimizer == "adamw8bit"]
    job = published.TOOLS[last.source](last)
    assert (job.optimizer_states, job.optimizer_in_backward, job.activation_offload) == ("8bit", True, True)
    assert job.engine == Engine(autocast=False, keeps_logits=True, states_like_weights=True, adapters="bf16")
    (dora,) = [row for row in rows if row.method == "dora"]
    job = published.TOOLS[dora.source](dora)
    assert job.dora and job.method == "lora" and job.engine.adapters == "fp32" and not job.packed
    bert = [row for row in rows if row.model == "bert-large"][0]
    job = published.TOOLS[bert.source](bert)
    assert job.model.architectures == ["BertForSequenceClassification"]
    assert job.precision == "fp32" and job.engine.keeps_gradients


def test_each_meter_reads_its_own_part(published: ModuleType) -> None:
    memory = memory_of(3 << 30, 5 << 30)
    row = published.rows()[0]
    assert published.measured_bytes(replace(row, metric="peak active"), memory) == 3 << 30
    assert published.measured_bytes(replace(row, metric="peak reserved"), memory) == 5 << 30
    assert published.measured_bytes(replace(row, metric="device total"), memory) == (5 << 30) + 1343 * 2**20


def test_errors_are_shares_of_the_published_figure(published: ModuleType) -> None:
    chosen = [row for row in published.rows() if row.model == "llama-2-7b" and row.base_format == "bf16"]
    chosen = [replace(chosen[0], published="20"), replace(chosen[1], published="25")]
    results = list(published.compare(lambda _: memory_of(22 * 10**9, 0), chosen))
    # 22 against 20 and 25: + 10 % and - 12 %.
    assert [result.error for result in results] == [pytest.approx(0.1), pytest.approx(-0.12)]
    assert published.summary(results) == (pytest.approx(0.11), pytest.approx(0.12))
    lines = published.table(results)
    assert lines[0] == "Mean error 11.0%, worst 12.0%, of 2 rows."
    assert lines[-1].endswith("| 25.00 GB | 22.00 | -12.0% |")


def test_rows_that_say_too_little_or_cannot_be_right_are_not_predicted(published: ModuleType) -> None:
    row = next(row for row in published.rows() if row.model == "llama-2-7b" and row.method == "lora")
    silent = replace(row, tokens="")
    # 6.74e9 weights of 2 bytes alone are 13.5 GB.
    wrong = replace(row, published="12")
    unknown = replace(row, source="a blog")
    results = list(published.compare(lambda _: pytest.fail("is not asked"), [silent, wrong, unknown]))
    assert [result.error for result in results] == [None, None, None]
    assert results[0].reason == "the length of its rows is not said"
    assert results[1].reason.startswith("cannot be right: 12.00 GB is below the 14")
    assert results[2].reason == "nothing is known of the tool"


def checked(published: ModuleType, chosen: list[object]) -> None:
    from onecard.train.forecast import memory

    results = list(published.compare(memory, chosen))
    mean, worst = published.summary(results)
    assert all(result.error is not None for result in results)
    assert mean <= 0.08
    assert worst <= 0.20


def test_the_planner_is_near_a_measurement_of_each_tool(published: ModuleType) -> None:
    rows = published.rows()
    quick = ("llama-3.2-3b", "phi-1.5", "bert-large", "llama-2-7b")
    of_each = {row.source: row for row in reversed(rows) if row.model in quick and row.optimizer == "adamw"}
    assert set(of_each) == set(published.TOOLS)
    checked(published, list(of_each.values()))


@pytest.mark.slow
def test_the_planner_is_near_what_others_measured(published: ModuleType) -> None:
    checked(published, published.rows())
