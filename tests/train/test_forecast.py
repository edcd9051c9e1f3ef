"""The memory of an update as the planner sees it: by hand, beside many layers traced, and beside the profiler."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, Gemma2Config, GPT2Config, LlamaConfig

from onecard.plan.job import Engine, Job
from onecard.train.forecast import held_bytes, memory, trace_of

WIDTH, INNER, VOCABULARY, LAYERS, TOKENS, ROWS = 64, 160, 300, 7, 32, 2
# By hand: q and o, k and v for half the heads, three of the feed-forward; two norms a layer and one at the end.
MATRICES = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER
PARAMETERS = LAYERS * (MATRICES + 2 * WIDTH) + WIDTH + VOCABULARY * WIDTH
PLAIN = Engine(compiled=False)


def llama(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(shape | changes))


def job(config: Any = None, **settings: Any) -> Job:
    return Job(config or llama(), ROWS, TOKENS, **({"precision": "fp32", "engine": PLAIN} | settings))


def held(job: Job, kind: str) -> int:
    """The most bytes of a kind at any moment."""
    return max(moment.bytes[kind] for moment in trace_of(job).moments())


def test_weights_gradients_and_states_by_hand() -> None:
    plain = job()
    frequencies = 2 * (WIDTH // 4 // 2) * 4  # of the positions, and their originals
    assert held(plain, "parameters") == 4 * PARAMETERS + frequencies
    assert held(plain, "gradients") == 4 * PARAMETERS
    steps = 4 * (9 * LAYERS + 2)  # one counter a tensor
    assert held(plain, "optimizer") == 8 * PARAMETERS + steps
    assert held(replace(plain, optimizer="sgd"), "optimizer") == 0
    assert held(replace(plain, optimizer_states="host"), "optimizer") == steps
    # In 16 bits: matrices and the embedding; vectors stay. Each in a unit of its own.
    vectors = (2 * LAYERS + 1) * WIDTH
    assert held(replace(plain, precision="pure_bf16"), "parameters") == 2 * (PARAMETERS + vectors) + frequencies
    assert held(replace(plain, gradients="bf16"), "gradients") == 2 * PARAMETERS


def test_muon_and_8_bits_by_hand() -> None:
    """Muon: one fp32 number a weight of the layers' matrices; 8 bits: two bytes, and a scale for each 256."""
    rest = PARAMETERS - LAYERS * MATRICES
    states = held(job(optimizer="muon"), "optimizer")
    assert states == 4 * LAYERS * MATRICES + 8 * rest + 4 * (2 * LAYERS + 2)
    vectors = (2 * LAYERS + 1) * WIDTH
    in_blocks = PARAMETERS - vectors - LAYERS * 2 * (WIDTH * WIDTH // 2)
    small = vectors + LAYERS * 2 * (WIDTH * WIDTH // 2)  # below 4,096 numbers: fp32
    counters = 4 * (9 * LAYERS + 2)
    assert held(job(optimizer_states="8bit"), "optimizer") == pytest.approx(
        2 * in_blocks * (1 + 4 / 256) + 8 * small + counters, rel=1e-3
    )


def test_adapters_alone_have_gradients_and_states() -> None:
    rank = 4
    adapters = LAYERS * rank * (2 * 2 * WIDTH + 2 * (WIDTH + WIDTH // 2) + 3 * (WIDTH + INNER))
    lora = job(method="lora", lora_rank=rank)
    assert held(lora, "gradients") == 4 * adapters
    assert held(lora, "optimizer") == 8 * adapters + 4 * 2 * 7 * LAYERS
    assert held(replace(lora, method="qlora"), "parameters") < held(lora, "parameters") - 3.4 * LAYERS * MATRICES


def test_a_layer_computed_again_keeps_its_input() -> None:
    full = trace_of(job(activation_checkpointing="full"))
    kept = [m.bytes["activations"] for m in full.moments() if m.place.startswith("forward, layer")]
    assert len(kept) == LAYERS
    assert {later - earlier for earlier, later in zip(kept[1:], kept[2:])} == {ROWS * TOKENS * WIDTH * 4}


@pytest.mark.parametrize("chunked", [True, False])
def test_logits_of_a_large_vocabulary(chunked: bool) -> None:
    """151,936 x 8,192 logits in fp32 are 4.64 GiB; a chunk is 256 MiB, and with its copies less than three."""
    whole = 151_936 * 8_192 * 4
    assert whole / 2**30 == pytest.approx(4.64, abs=0.005)
    config = llama(vocab_size=151_936, num_hidden_layers=1)
    large = Job(config, 1, 8_192, precision="bf16", engine=Engine(chunked_loss=chunked, compiled=False))
    logits = held(large, "logits")
    if chunked:
        assert 0 < logits <= 3 * (256 << 20)
    else:
        assert logits >= whole


WAYS: dict[str, dict[str, Any]] = {
    "bf16 on a card": {"precision": "bf16"},
    "fp32 on a CPU": {"device": "cpu"},
    "checkpointing": {"precision": "bf16", "activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every second": {"activation_checkpointing": 2},
    "compiled": {"precision": "bf16", "engine": Engine()},
    "compiled, checkpointing": {"engine": Engine(), "activation_checkpointing": "full"},
    "whole logits": {"engine": Engine(chunked_loss=False, compiled=False, attention="sdpa"), "packed": False},
    "LoRA": {"precision": "bf16", "method": "lora", "lora_rank": 4},
    "8-bit activations": {"activation_compression": "8bit"},
    "offload": {"activation_offload": True},
    "in backward": {"optimizer_in_backward": True, "precision": "pure_bf16"},
    "Adafactor on lists": {"optimizer": "adafactor"},
    "two micro-batches": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_repeated_layers_are_as_traced_ones(way: str) -> None:
    many = job(**WAYS[way])
    made, whole = trace_of(many), trace_of(many, traced_layers=LAYERS)
    assert made.peak().place == whole.peak().place
    # Counters and norms of a tensor, of 4 bytes each, are the only thing that may be told of another layer.
    numbers = 4 * LAYERS * 2 * 9
    assert abs(made.peak().bytes - whole.peak().bytes) <= numbers
    for ours, theirs in zip(made.moments(), whole.moments(), strict=True):
        assert ours.place == theirs.place
        for kind, size in ours.bytes.items():
            slack = numbers if kind in ("optimizer", "workspace") else 0
            assert abs(size - theirs.bytes[kind]) <= slack, (ours.place, kind)


def measured(job: Job, run: Path) -> int:
    """The most bytes of an update and an evaluation on real tensors, as the profiler counts."""
    from torch.profiler import ProfilerActivity, profile

    loop, bytes_held = held_bytes(job, run)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.update(0)
        loop.evaluate()
    loop.close()
    most = now = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return bytes_held + most


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TRUTHS: dict[str, Job] = {
    "plain": job(device="cpu"),
    "bf16": job(device="cpu", precision="bf16"),
    "checkpointing, Muon": job(device="cpu", activation_checkpointing="full", optimizer="muon"),
    "whole logits": job(device="cpu", engine=Engine(chunked_loss=False, compiled=False)),
    "LoRA": job(device="cpu", method="lora", lora_rank=4),
    "capped logits": job(Gemma2Config(**SHAPE, **HEADS, head_dim=16, sliding_window=16), device="cpu"),
    "dropout": job(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4), device="cpu"),
    "encoder": job(
        BertConfig(**SHAPE, num_attention_heads=4),
        device="cpu",
        packed=False,
        engine=Engine(attention="sdpa", compiled=False),
    ),
}


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("name", TRUTHS)
def test_the_peak_is_the_profilers(name: str, tmp_path: Path) -> None:
    predicted = memory(TRUTHS[name]).peak_allocated_bytes
    assert predicted == pytest.approx(measured(TRUTHS[name], tmp_path), rel=0.01)


def test_a_deep_model_of_billions_is_not_allocated() -> None:
    config = llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=False,
    )
    made = memory(Job(config, 1, 4096, precision="bf16", engine=PLAIN))
    # 8.03 billion weights: 4 bytes each, 8 of states.
    assert made.breakdown["parameters"] == pytest.approx(4 * 8.030e9, rel=1e-3)
    assert made.breakdown["optimizer"] == pytest.approx(8 * 8.030e9, rel=1e-3)
    assert made.peak_allocated_bytes <= made.peak_reserved_bytes < 1.2 * made.peak_allocated_bytes
    assert made.context_bytes > 0
    assert sum(made.breakdown.values()) == pytest.approx(made.peak_allocated_bytes, rel=1e-3)


def test_on_a_card_attention_keeps_no_scores_and_dropout_a_byte() -> None:
    """With 512 tokens scores of 4 heads are as large as 32 hidden states; eager attention has them, fused has not."""
    long = Job(llama(num_hidden_layers=1), 1, 512, precision="bf16", engine=PLAIN)
    fused = held(long, "activations")
    eager = held(replace(long, engine=Engine(attention="eager", compiled=False)), "activations")
    scores = 4 * 512 * 512
    assert eager - fused > scores * 4
    with_dropout = llama(num_hidden_layers=1, attention_dropout=0.1)
    dropped = held(replace(long, model=with_dropout), "activations")
    assert dropped < fused + scores
    assert torch.get_default_dtype() == torch.float32
