"""What other tools' updates keep and take, on small models whose bytes are counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from onecard.plan.job import Engine, Job
from onecard.plan.trace import Trace
from onecard.train import forecast, four_bit
from onecard.train.forecast import memory, trace_of

# Maps of a layer: 4 x 64 x 64 + 3 x 64 x 128 = 40,960 weights; norms 2 x 64; tables 2 x 512 x 64; the last norm 64.
MAPS, TABLES, NORMS = 2 * 40_960, 2 * 512 * 64, 2 * 2 * 64 + 64
PARAMETERS = MAPS + TABLES + NORMS


@pytest.fixture
def job() -> Job:
    from transformers import LlamaConfig

    model = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return Job(model, batch_size=2, max_length=128, evaluation=False, engine=Engine(compiled=False))


def held(job: Job, kind: str) -> int:
    """Bytes of a kind that are there before the update."""
    trace: Trace = trace_of(job)
    return sum(record.bytes for record in trace.records if record.segment == 0 and record.kind == kind)


def bf16(job: Job, **engine: Any) -> Job:
    made = Engine(compiled=False, autocast=False, states_like_weights=True, adapters="bf16", **engine)
    return replace(job, precision="pure_bf16", weights="bf16", gradients="bf16", engine=made)


def test_without_autocast_norms_have_the_weights_format_too(job: Job) -> None:
    # The angles of positions are 16 fp32 numbers, kept twice.
    angles = 2 * 16 * 4
    assert held(bf16(job), "parameters") == 2 * PARAMETERS + angles
    assert held(replace(bf16(job), engine=Engine(compiled=False)), "parameters") == (
        2 * PARAMETERS + 2 * NORMS + angles
    )


def test_states_follow_the_weights(job: Job) -> None:
    # Two numbers a parameter, and a counter of 4 bytes for each of the 2 x 9 + 3 parameters.
    for fused in (True, False):
        assert held(bf16(job, fused_optimizer=fused), "optimizer") == 2 * 2 * PARAMETERS + 21 * 4
    assert held(replace(bf16(job), engine=Engine(compiled=False)), "optimizer") == 2 * 4 * PARAMETERS + 21 * 4


def test_states_follow_the_weights_inside_backward_too(job: Job) -> None:
    inside = replace(bf16(job), optimizer_in_backward=True)
    assert held(inside, "optimizer") == 2 * 2 * PARAMETERS + 21 * 4
    assert memory(inside).breakdown["gradients"] < 2 * PARAMETERS


def test_states_of_steps_inside_backward_are_held_from_the_first_update_on(job: Job) -> None:
    # Weights and two numbers each, all in 16 bits.
    assert memory(replace(bf16(job), optimizer_in_backward=True)).peak_allocated_bytes > 3 * 2 * PARAMETERS


def test_counters_do_not_keep_layers_from_being_repeated(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    original = forecast.run_step
    monkeypatch.setattr(forecast, "run_step", lambda job, layers: traced.append(layers) or original(job, layers))
    deep = replace(bf16(job), optimizer_in_backward=True, optimizer_states="8bit")
    deep.model.num_hidden_layers = 12
    trace_of(deep)
    # States in 8 bits count their steps on the host, in another tensor each time.
    assert max(traced) < 12


def test_gradients_that_are_kept_are_there_in_the_forward_pass(job: Job) -> None:
    fp32 = replace(job, precision="fp32")
    kept = replace(fp32, engine=Engine(compiled=False, keeps_gradients=True))
    assert held(fp32, "gradients") == 0
    assert held(kept, "gradients") == 4 * PARAMETERS
    # They are not made a second time.
    assert memory(kept).breakdown["gradients"] == 4 * PARAMETERS


def test_kept_logits_are_all_there_at_once(job: Job) -> None:
    # 256 tokens x 512 entries x 2 bytes, in 8 chunks of 32 tokens.
    wide = replace(bf16(job, keeps_logits=True), max_length=128)
    trace = trace_of(wide)
    logits = [record.bytes for record in trace.records if record.kind == "logits"]
    assert logits.count(32 * 512 * 2) >= 8
    most = total = 0
    for _, number in trace.happenings:
        record = trace.records[number if number >= 0 else ~number]
        if record.kind == "logits":
            total += record.bytes if number >= 0 else -record.bytes
            most = max(most, total)
    assert 256 * 512 * 2 <= most <= 256 * 512 * 2 + 2 * 32 * 512 * 4 + 2 * 32 * 512 * 2


def test_adapters_in_16_bits_and_dropout_before_them(job: Job) -> None:
    lora = replace(bf16(job), method="lora", lora_rank=4, target_modules=("q_proj",))
    # A and B: 2 layers x 4 x (64 + 64).
    fp32 = replace(lora, engine=replace(lora.engine, adapters="fp32"))
    assert held(fp32, "parameters") - held(lora, "parameters") == 2 * 4 * 128 * 2
    dropped = replace(lora, lora_dropout=0.05)
    masks = [r.bytes for r in trace_of(dropped).records if "native_dropout" in r.name and "bool" in r.name]
    # A byte for each of 256 tokens x 64, in both layers.
    assert masks == [256 * 64] * 2


@pytest.mark.parametrize(("double", "bits"), [(True, 4 + 8 / 64 + 32 / (64 * 256)), (False, 4 + 32 / 64)])
def test_weights_in_4_bits_hold_what_nf4_holds(job: Job, double: bool, bits: float) -> None:
    lora = replace(bf16(job), method="lora", lora_rank=4, target_modules=("q_proj",))
    qlora = replace(lora, method="qlora", engine=replace(lora.engine, double_quantization=double))
    made, plain = held(qlora, "parameters"), held(lora, "parameters")
    # Scales of scales are whole numbers of 4 bytes: 64 x 64 weights have 64 scales and one above them, not a quarter.
    assert plain - made == pytest.approx(MAPS * (16 - bits) / 8, abs=14 * 4)


def test_4_bit_products_can_keep_their_inputs(job: Job) -> None:
    qlora = replace(bf16(job), method="qlora", lora_rank=4, target_modules=("q_proj",))
    keeping = replace(qlora, engine=replace(qlora.engine, keeps_quantized_inputs=True))
    more = memory(keeping).breakdown["activations"] - memory(qlora).breakdown["activations"]
    # Of each layer at least the input of down_proj: 256 tokens x 128 x 2 bytes.
    assert more >= 2 * 256 * 128 * 2


def test_a_4_bit_product_takes_the_whole_matrix_and_gives_it_back() -> None:
    layer = nn.Linear(64, 32, bias=False)
    layer.weight.requires_grad_(False)
    model = nn.ModuleDict({"only": layer})
    four_bit.quantize(model, ["only"], double=True, keeps_inputs=False)
    # 2,048 weights: 1,024 bytes of codes, 32 scales, one above them.
    assert layer.weight.numel() == 1024
    buffers = dict(layer.named_buffers())
    assert [buffers[name].numel() for name in ("scales", "scales_of_scales")] == [32, 1]
    inputs = torch.randn(3, 64, requires_grad=True)
    out = model["only"](inputs)
    assert out.shape == (3, 32)
    out.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == (3, 64)
