"""A machine, a model and a formula for memory whose sums can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onecard.plan.job import Job, Memory, Moment, Target

GIB = 1 << 30
TOY = Target(
    name="Toy",
    device="cuda",
    capacity_bytes=24 * GIB,
    capability=(8, 6),
    flops_per_second={"fp32": 1e13, "bf16": 5e13, "fp16": 5e13},
    memory_bytes_per_second=5e11,
    host_bytes_per_second=1e10,
    host_memory_bytes=None,
    watts=300.0,
    measured=True,
)
OF_THE_TABLE = replace(TOY, name="RTX 3090", measured=False)


def formula(job: Job) -> Memory:
    """GiB: weights 4 (2 in pure_bf16, 1 in 4 bits), gradients 4, states 8 (8bit 2), a row 2 (selective 1, full 0.5)."""
    weights = {"full": 4.0, "lora": 4.0, "qlora": 1.0}[job.method]
    if job.precision == "pure_bf16" and job.method != "qlora":
        weights = 2.0
    learned = job.method == "full"
    gradients = 4.0 if learned and not job.optimizer_in_backward else 0.0
    if job.gradients == "bf16":
        gradients /= 2
    states = {"fp32": 8.0, "8bit": 2.0, "host": 0.0}[job.optimizer_states] if learned else 0.0
    if job.optimizer in ("adafactor", "sgd"):
        states = 0.0
    row = {"none": 2.0, "selective": 1.0, "full": 0.5}.get(str(job.activation_checkpointing), 1.25)
    activations = row * job.batch_size * job.max_length / 1024
    kinds = {"parameters": weights, "gradients": gradients, "optimizer": states, "activations": activations}
    held = {kind: int(size * GIB) for kind, size in kinds.items()}
    total = sum(held.values())
    start = Moment("forward, layer 0", held | {"activations": 0})
    return Memory(
        peak_allocated_bytes=total,
        peak_reserved_bytes=total,
        context_bytes=0,
        breakdown=held,
        moments=(start, Moment("backward, layer 1", held), Moment("optimizer", held | {"activations": 0})),
        largest=(("layers.1.mlp.up_proj", GIB),),
    )


def small_llama(**changes: Any) -> Any:
    """Two layers of width 64, vocabulary 256."""
    from transformers import LlamaConfig

    kind: Any = LlamaConfig
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return kind(**settings | changes)


def job(**changes: Any) -> Job:
    """4 rows of 1,024 tokens, twice an update: 32 GiB by the formula."""
    settings: dict[str, Any] = {
        "model": small_llama(),
        "batch_size": 4,
        "max_length": 1024,
        "gradient_accumulation_steps": 2,
        "optimizer": "adamw",
    }
    return Job(**settings | changes)
