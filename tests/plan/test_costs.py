from __future__ import annotations

from typing import Any

import pytest

from onecard.plan.costs import costs_of, kept_values, trained_parameters, update_tokens
from onecard.plan.job import Engine, Job
from onecard.plan.shape import Shape, shape_of


def llama(**changes: Any) -> Any:
    """Two layers of 64: 4 heads of 16 over 2, feed-forward 128, 100 words."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    made: Any = LlamaConfig
    return made(**settings | changes)


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {"model": llama(), "batch_size": 3, "max_length": 8, "precision": "fp32"}
    return Job(**settings | changes)


# q and o 64 x 64, k and v 64 x 32, three of the feed-forward 64 x 128; two layers.
MATRICES = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
HEAD = 64 * 100


def flops(made: Job) -> float:
    return sum(work.flops for work in costs_of(made, shape_of(made.model)).products)


def test_the_shape_by_hand() -> None:
    shape = shape_of(llama())
    assert (shape.layers, shape.width, shape.heads, shape.key_value_heads, shape.head_width) == (2, 64, 4, 2, 16)
    assert shape.matrix_parameters == MATRICES
    assert shape.parameters == MATRICES + HEAD + 5 * 64
    assert shape.head is not None and shape.head.weights == HEAD and shape.tied and shape.causal
    assert (shape.query_width, shape.key_value_width, shape.feed_forward_values) == (64, 64, 3 * 128)
    assert shape.windows == (None, None)
    assert not shape_of(llama(tie_word_embeddings=False)).tied


def test_maps_of_other_kinds() -> None:
    """GPT-2's transposed linear layers; BERT sees both ways; Mistral looks back by a window; experts by their share."""
    from transformers import BertConfig, GPT2Config, MistralConfig, MixtralConfig

    kinds: Any = (GPT2Config, BertConfig, MistralConfig, MixtralConfig)
    gpt2, bert, mistral, mixtral = kinds
    shape = shape_of(gpt2(n_embd=64, n_layer=2, n_head=4, vocab_size=50, n_positions=16))
    assert shape.matrix_parameters == 2 * 12 * 64 * 64
    assert shape.feed_forward_values == 2 * 256 and shape.causal
    bert_shape = shape_of(bert(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256))
    assert not bert_shape.causal
    assert bert_shape.matrix_parameters == 2 * 12 * 64 * 64
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    windowed = shape_of(mistral(**small, num_hidden_layers=2, intermediate_size=128, sliding_window=4))
    assert windowed.windows == (4, 4)
    experts = shape_of(
        mixtral(**small, num_hidden_layers=1, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    )
    assert {one.share for one in experts.maps} == {1.0, 0.5}
    active = sum(one.weights * one.share for one in experts.maps)
    assert active == 2 * 64 * 64 + 2 * 64 * 32 + 2 * 3 * 64 * 128


def test_products_are_six_operations_a_weight_and_token() -> None:
    assert flops(job()) == 6 * (MATRICES + HEAD) * 24
    assert flops(job(gradient_accumulation_steps=5)) == 6 * (MATRICES + HEAD) * 120


@pytest.mark.parametrize(
    ("way", "expected"),
    [("none", 6 * MATRICES), ("selective", 6 * MATRICES), ("full", 8 * MATRICES), (2, 7 * MATRICES)],
)
def test_layers_that_compute_again_pay_a_forward_pass(way: Any, expected: int) -> None:
    """With every 2nd of two layers, one computes again."""
    assert flops(job(activation_checkpointing=way)) == (expected + 6 * HEAD) * 24


def test_frozen_weights_need_no_gradient_and_adapters_all_three_products() -> None:
    made = job(method="lora", lora_rank=4)
    sizes = (64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3
    adapters = 2 * 4 * sizes
    assert trained_parameters(made, shape_of(made.model)) == adapters
    assert flops(made) == (4 * (MATRICES + HEAD) + 6 * adapters) * 24
    some = job(method="lora", lora_rank=4, target_modules=("q_proj", "mlp.up_proj"))
    assert trained_parameters(some, shape_of(some.model)) == 2 * 4 * (128 + 192)


def test_attention_by_hand() -> None:
    """7 products of 8 x 8 x 64, half of them masked: 2 layers x 3 rows; plain attention also computes what it masks."""
    shape = shape_of(llama())
    pairs = 8 * 8 / 2
    assert costs_of(job(), shape).attention_flops == 2 * 64 * 7 * pairs * 2 * 3
    again = job(activation_checkpointing="full")
    assert costs_of(again, shape).attention_flops == 2 * 64 * 9 * pairs * 2 * 3
    plain = job(engine=Engine(attention="eager"))
    assert costs_of(plain, shape).attention_flops == 2 * 64 * 7 * 64 * 2 * 3


def test_padding_is_computed_as_long_as_the_longest_row() -> None:
    padded = job(packed=False, longest_tokens=5)
    assert update_tokens(padded) == 15
    assert flops(padded) == 6 * (MATRICES + HEAD) * 15
    assert update_tokens(job(packed=False)) == 24


def test_known_rows_cost_less() -> None:
    """A quarter of the tokens have labels; documents of 4 in rows of 8 see half as much."""
    shape = shape_of(llama())
    known = costs_of(job(), shape, learned_share=0.25, document_tokens=4)
    assert sum(work.flops for work in known.products) == 6 * (MATRICES + HEAD / 4) * 24
    assert known.attention_flops == costs_of(job(), shape).attention_flops / 2
    whole = job(engine=Engine(chunked_loss=False, attention="sdpa"))
    same = costs_of(whole, shape, learned_share=0.25, document_tokens=4)
    assert sum(work.flops for work in same.products) == 6 * (MATRICES + HEAD) * 24
    assert same.attention_flops == costs_of(job(), shape).attention_flops


def test_windows_by_hand() -> None:
    """Of 8 positions each sees at most 4: 8 x 4 - 4 x 4 / 2 = 24 pairs instead of 32."""
    from transformers import MistralConfig

    made: Any = MistralConfig
    config = made(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    windowed, whole = (costs_of(job(model=model), shape_of(model)).attention_flops for model in (config, llama()))
    assert windowed == whole * 24 / 32


def optimizer_bytes(**changes: Any) -> float:
    made = job(**changes)
    return costs_of(made, shape_of(made.model)).optimizer_bytes / trained_parameters(made, shape_of(made.model))


def test_bytes_of_the_optimizer_by_hand() -> None:
    """fp32: norm 4, gradient 4, weight 8, two states read and written 16."""
    assert optimizer_bytes() == pytest.approx(32)
    assert optimizer_bytes(optimizer_in_backward=True) == pytest.approx(28)
    assert optimizer_bytes(optimizer_states="8bit") == pytest.approx(20.1)
    assert optimizer_bytes(optimizer="muon") == pytest.approx(24)
    # norm 4, gradient 4, weight 4, states 16, and the fp32 copy written and read
    assert optimizer_bytes(precision="pure_bf16") == pytest.approx(36)
    assert optimizer_bytes(precision="pure_bf16", gradients="bf16") == pytest.approx(32)
    assert optimizer_bytes(engine=Engine(fused_optimizer=False)) == pytest.approx(4 + 28 * 2.5)
    # norm 4, gradient 4, weight 4, states of 2 bytes 8
    assert optimizer_bytes(precision="pure_bf16", engine=Engine(states_like_weights=True)) == pytest.approx(20)


def test_states_and_activations_on_the_host_use_the_bus() -> None:
    shape = shape_of(llama())
    on_host = costs_of(job(optimizer_states="host"), shape)
    assert on_host.host_bytes == shape.parameters * 16
    assert costs_of(job(optimizer_states="host", device="cpu"), shape).host_bytes == 0
    offloaded = job(activation_offload=True)
    kept = 2 * (4 * 64 + 2 * 64 + 64 + 384)
    assert kept_values(offloaded, shape) == kept
    assert costs_of(offloaded, shape).hidden_bytes == 2 * 4 * 24 * kept
    assert kept_values(job(activation_checkpointing="full"), shape) == 2 * 64


def test_four_bits_are_widened_for_every_pass() -> None:
    shape: Shape = shape_of(llama())
    four, sixteen = (job(method=way, lora_rank=4, precision="bf16", weights="bf16") for way in ("qlora", "lora"))
    difference = costs_of(four, shape).traffic_bytes - costs_of(sixteen, shape).traffic_bytes
    assert difference == pytest.approx(MATRICES * 2.5 * 2)


def test_weights_with_a_magnitude_are_normed_in_every_forward_pass() -> None:
    shape = shape_of(llama())
    plain, normed = (
        job(method="lora", lora_rank=4, dora=way, activation_checkpointing="full") for way in (False, True)
    )
    difference = costs_of(normed, shape).traffic_bytes - costs_of(plain, shape).traffic_bytes
    assert difference == pytest.approx(MATRICES * 10 * 2)
