"""The least memory an update can take, counted by hand on a model of a few numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onecard.plan.architectures import architecture
from onecard.plan.floor import (
    EIGHT_BIT_STATE_BYTES,
    NF4_BITS,
    Floor,
    adapter_parameters,
    floor,
    impossible,
    trained_parameters,
    weight_bytes,
)
from onecard.plan.job import Engine, Job
from onecard.plan.shape import shape_of


@pytest.fixture(scope="module")
def model() -> Any:
    """2 layers of 16, 2 heads, feed-forward of 32, vocabulary 64, tied.

    Maps of a layer: 4 x 16 x 16 + 3 x 16 x 32 = 2,560; norms 2 x 16. All: 64 x 16 + 2 x 2,592 + 16 = 6,224.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )


def test_full_training_in_fp32_takes_16_bytes_a_parameter(model: Any) -> None:
    job = Job(model, batch_size=2, max_length=8, precision="fp32")
    # The input of the second layer: 16 tokens x 16 x 4 bytes.
    assert floor(job) == Floor(4 * 6224, 4 * 6224, 8 * 6224, 1024, together=False)
    assert floor(job).total_bytes == 16 * 6224


def test_autocast_keeps_fp32_weights_and_16_bit_activations(model: Any) -> None:
    assert floor(Job(model, batch_size=2, max_length=8, precision="bf16")) == Floor(
        4 * 6224, 4 * 6224, 8 * 6224, 512, together=False
    )


def test_activations_come_on_top_of_gradients_that_are_kept(model: Any) -> None:
    job = Job(model, batch_size=2, max_length=8, precision="fp32", gradient_accumulation_steps=2)
    assert floor(job).total_bytes == 16 * 6224 + 1024
    kept = Job(model, batch_size=2, max_length=8, precision="fp32", engine=Engine(keeps_gradients=True))
    assert floor(kept).total_bytes == 16 * 6224 + 1024


def test_pure_bf16_with_states_like_weights_takes_8_bytes_a_parameter(model: Any) -> None:
    job = Job(model, 2, 8, precision="pure_bf16", gradients="bf16", engine=Engine(states_like_weights=True))
    assert floor(job).total_bytes == 8 * 6224
    # onecard's own states are fp32.
    assert floor(replace(job, engine=Engine())).total_bytes == 12 * 6224


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ({"optimizer_states": "8bit"}, int(6224 * (2 + 8 / 256))),
        ({"optimizer_states": "host"}, 0),
        ({"optimizer": "adafactor"}, 0),
        ({"optimizer": "sgd"}, 0),
        ({"optimizer": "muon"}, 4 * 6224),
    ],
)
def test_optimizers_remember_what_they_must(model: Any, settings: dict[str, Any], states: int) -> None:
    assert floor(Job(model, 2, 8, **settings)).optimizer == states


def test_a_step_inside_backward_keeps_no_gradients(model: Any) -> None:
    least = floor(Job(model, 2, 8, precision="fp32", optimizer_in_backward=True))
    assert least.gradients == 0
    assert least.total_bytes == 12 * 6224 + 1024


def test_activations_can_leave_the_card_or_be_bytes(model: Any) -> None:
    assert floor(Job(model, 2, 8, activation_offload=True)).activations == 0
    assert floor(Job(model, 2, 8, activation_compression="8bit")).activations == 256
    # Rows that are padded to 4 tokens.
    assert floor(Job(model, 2, 8, packed=False, longest_tokens=4, precision="fp32")).activations == 512


def test_adapters_are_counted_on_the_maps_they_stand_beside(model: Any) -> None:
    shape = shape_of(model)
    every = Job(model, 2, 8, method="lora", lora_rank=2)
    # 4 of 16 -> 16 and 3 between 16 and 32: 2 x (4 x 32 + 3 x 48) a layer.
    assert adapter_parameters(every, shape) == 2 * 2 * (4 * 32 + 3 * 48)
    two = replace(every, target_modules=("q_proj", "self_attn.v_proj"))
    assert adapter_parameters(two, shape) == trained_parameters(two, shape) == 2 * 2 * 2 * 32
    # DoRA: a magnitude for each output.
    assert adapter_parameters(replace(two, dora=True), shape) == 2 * 2 * 2 * 32 + 2 * 2 * 16


def test_lora_and_qlora_weights(model: Any) -> None:
    shape = shape_of(model)
    lora = Job(model, 2, 8, method="lora", lora_rank=2, target_modules=("q_proj",), weights="bf16")
    assert weight_bytes(lora, shape) == 2 * 6224 + 4 * 128
    # 5,120 weights of the maps in NF4, the other 1,104 in 16 bits.
    qlora = replace(lora, method="qlora", weights=None)
    assert weight_bytes(qlora, shape) == int(5120 * (4 + 1 / 8 + 32 / 16384) / 8 + 2 * 1104) + 4 * 128
    assert weight_bytes(replace(qlora, engine=Engine(adapters="bf16")), shape) == weight_bytes(qlora, shape) - 2 * 128


def test_bits_of_packed_numbers() -> None:
    # 4 bits, a byte for 64, four bytes for 64 x 256.
    assert pytest.approx(4.126953125) == NF4_BITS
    # Two bytes, and two scales of four bytes for 256.
    assert pytest.approx(2.03125) == EIGHT_BIT_STATE_BYTES


def test_a_figure_below_the_floor_is_found() -> None:
    # 6.74e9 parameters x 16 bytes are 107.8 GB: AdamW in fp32 does not fit 80 GB.
    job = Job(architecture("llama-2-7b"), batch_size=1, max_length=2048, precision="fp32")
    fault = impossible(job, 80 * 10**9)
    assert fault is not None
    assert fault.startswith(
        "80.00 GB is below the 107.81 GB that weights (26.95), optimizer (53.91), gradients (26.95)"
    )
    assert impossible(job, 120 * 10**9) is None
