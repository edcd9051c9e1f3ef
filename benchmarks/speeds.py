"""The planner's speed beside measured ones: what others published for cards, and our own rows of RESULTS.md on a CPU.

`python benchmarks/speeds.py` prints the table; it computes on no card and measures nothing. No row is tuned: the
shares in plan/speed.py are of kinds of operations. What a publisher left unsaid is assumed, and the row says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu import PUBLISHED
from onecard.model.presets import llama_config, preset
from onecard.plan.architectures import architecture
from onecard.plan.job import Job, Speed, Target
from onecard.plan.speed import speed
from onecard.plan.targets import target

# About what a large copy moves on the machine of our rows, read and written.
CPU_MEMORY_BYTES_PER_SECOND = 20e9


@dataclass(frozen=True)
class Row:
    """A measured speed: of what, by whom, on which card (None: our CPU at `product_flops_per_second`)."""

    title: str
    job: Callable[[], Job]
    tokens_per_second: float
    card: str | None = None
    product_flops_per_second: float = 0.0
    assumed: str = ""
    learned_share: float = 1.0
    document_tokens: float | None = None


def _bench(**settings: Any) -> Job:
    """The 26M Llama of `make bench`."""
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = llama_config(preset("26M"), vocabulary=6400, max_positions=512, token_ids=ids)
    return Job(config, 8, 512, precision="fp32", device="cpu", **settings)


def _smollm(batch: int, **settings: Any) -> Job:
    """The 137M Llama of `make bench`: the shape of SmolLM2-135M."""
    return Job(architecture("smollm2-135m"), batch, 1024, precision="fp32", device="cpu", **settings)


def _published(title: str, name: str, card: str, assumed: str, batch: int, length: int, **settings: Any) -> Row:
    """What `make bench-gpu` sets beside its own figures."""
    return Row(
        title, lambda: Job(architecture(name), batch, length, **settings), PUBLISHED[name][card], card, 0.0, assumed
    )


# "Full bf16": weights and gradients.
HALF: dict[str, Any] = {"precision": "pure_bf16", "gradients": "bf16"}
LESS: dict[str, Any] = {**HALF, "optimizer_states": "8bit"}
LORA: dict[str, Any] = {**HALF, "method": "lora", "lora_rank": 16, "activation_checkpointing": "full"}
# Of the rows of `make bench`: half the tokens are answers, and the mean chat (weighted by length) has 258 tokens.
CHATS: dict[str, Any] = {"learned_share": 0.505, "document_tokens": 258}
SMALL, LARGE = "Qwen2.5 0.5B, full, bf16, 1,024", "Qwen2.5 1.5B, full, bf16, 1,024"
ROWS = [
    _published("GPT-2 124M, pretraining", "gpt2", "RTX 4090", "16 rows, compiled", 16, 1024),
    _published(SMALL, "qwen2.5-0.5b", "RTX 4090", "4 rows", 4, 1024, **HALF),
    _published(LARGE, "qwen2.5-1.5b", "RTX 4090", "4 rows, 8-bit states", 4, 1024, **LESS),
    _published(SMALL, "qwen2.5-0.5b", "RTX 5090", "4 rows", 4, 1024, **HALF),
    _published(LARGE, "qwen2.5-1.5b", "RTX 5090", "4 rows, 8-bit states", 4, 1024, **LESS),
    _published("Qwen3 8B, LoRA r16, 2,048 packed", "qwen3-8b", "RTX 5090", "1 row, checkpointing", 1, 2048, **LORA),
    Row("Llama 26M, pretraining, 512", _bench, 686, product_flops_per_second=180e9),
    Row("Llama 137M, 8 x 1,024", lambda: _smollm(8), 129, product_flops_per_second=178e9),
    Row(
        "Llama 137M, 2 x 4 rows", lambda: _smollm(4, gradient_accumulation_steps=2), 137,
        product_flops_per_second=184e9,
    ),
    Row(
        "Llama 137M, 2 x 4 rows, checkpointing, 8-bit states",
        lambda: _smollm(4, gradient_accumulation_steps=2, activation_checkpointing="full", optimizer_states="8bit"),
        119, product_flops_per_second=185e9,
    ),
    Row(
        "SmolLM2-135M, LoRA r16 on chats", lambda: _smollm(2, method="lora", lora_rank=16), 238,
        product_flops_per_second=184e9, **CHATS,
    ),
    Row(
        "SmolLM2-135M, all weights on chats", lambda: _smollm(2), 155, product_flops_per_second=153e9,
        **CHATS,
    ),
]  # fmt: skip


def machine_of(row: Row) -> Target:
    """The card of a row, or our CPU as it multiplied while the row was measured."""
    if row.card is not None:
        return target(row.card)
    return Target(
        "AMD EPYC, 2 cores", "cpu", 16 << 30, None, {"fp32": row.product_flops_per_second},
        CPU_MEMORY_BYTES_PER_SECOND, None, 16 << 30, None, measured=True,
    )  # fmt: skip


def predicted(row: Row) -> Speed:
    """What the planner says."""
    return speed(row.job(), machine_of(row), learned_share=row.learned_share, document_tokens=row.document_tokens)


def table() -> list[str]:
    """The lines for RESULTS.md."""
    lines = [
        "### The planner's speed",
        "",
        "Tokens a second, predicted from the table of cards (nothing run on a card) or from the CPU's measured rate of "
        "products, beside what was measured: on cards by others, who left unsaid what is in the last column; on the "
        "CPU by us, in the sections above. The shares of rates in plan/speed.py were set once, with these rows in "
        "view, and none for a single row: other cards and models are the test of them.",
        "",
        "| | machine | measured | predicted | ratio | expected within | assumed |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    ratios = []
    for row in ROWS:
        found = predicted(row)
        ratios.append(found.tokens_per_second / row.tokens_per_second)
        lines.append(
            f"| {row.title} | {machine_of(row).name} | {row.tokens_per_second:,.0f} | {found.tokens_per_second:,.0f} "
            f"| {ratios[-1]:.2f} | x {found.uncertainty:.2f} | {row.assumed} |"
        )
    mean = math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios))
    return [*lines, "", f"Mean factor of error {mean:.2f}; largest {max(max(r, 1 / r) for r in ratios):.2f}."]


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
