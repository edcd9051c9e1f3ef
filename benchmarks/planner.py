"""The planner beside the truth: predicted peaks of an update and what PyTorch's profiler counts on this CPU.

Small models of many kinds, each a few times under other settings. The prediction runs the update on tensors without
content, layers repeated; the measurement runs it on real ones, all layers, and adds up the allocations and releases
that the profiler saw, to the byte. Prints one JSON line last; `run.py --parts planner` writes the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measurement import say

# Sizes that every kind of model has by the same names; enough layers that most of them are repeated, not traced.
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDE = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 4000}
DEEP = {"num_hidden_layers": 14}
BERT = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 6}


@dataclass(frozen=True)
class Case:
    """A model kind with its shape, and the settings of the job that differ from plain fp32 training."""

    name: str
    kind: str
    shape: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    tokens: int = 128


LORA = {"method": "lora", "lora_rank": 8}
FULL = {"activation_checkpointing": "full"}
WHOLE = {"chunked_loss": False}
WINDOWS = {"head_dim": 32, "sliding_window": 64}
CASES = [
    Case("plain", "llama"),
    Case("wide, 4,000 entries", "llama", WIDE),
    Case("deep", "llama", DEEP),
    Case("long rows", "llama", rows=1, tokens=512),
    Case("3 micro-batches", "llama", job={"gradient_accumulation_steps": 3}),
    Case("bf16", "llama", job={"precision": "bf16"}, tokens=64),
    Case("fp16", "llama", job={"precision": "fp16"}, tokens=64),
    Case("pure bf16", "llama", job={"precision": "pure_bf16"}, tokens=64),
    Case("float8", "llama", job={"precision": "float8"}, tokens=64),
    Case("Muon", "llama", DEEP, {"optimizer": "muon"}),
    Case("Adafactor", "llama", job={"optimizer": "adafactor"}),
    Case("SGD", "llama", job={"optimizer": "sgd"}),
    Case("8-bit AdamW", "llama", WIDE, {"optimizer_states": "8bit"}),
    Case("optimizer in backward", "llama", job={"optimizer_in_backward": True}),
    Case("bf16 gradients", "llama", job={"gradients": "bf16"}),
    Case("AdamW on lists", "llama", WIDE, engine={"fused_optimizer": False}, rows=1, tokens=32),
    Case("full checkpointing", "llama", DEEP, FULL),
    Case("every 2nd layer checkpointed", "llama", job={"activation_checkpointing": 2}),
    Case("selective checkpointing", "llama", job={"activation_checkpointing": "selective"}),
    Case("activations in 8 bits", "llama", WIDE, {"activation_compression": "8bit"}),
    Case("whole logits", "llama", WIDE, engine=WHOLE),
    Case("padded, sdpa", "llama", job={"packed": False, "longest_tokens": 100}),
    Case("eager attention", "llama", engine={"attention": "eager"}),
    Case("LoRA", "llama", job=LORA),
    Case("LoRA, bf16 weights", "llama", job=LORA | {"weights": "bf16", "precision": "bf16"}, tokens=64),
    Case("DoRA", "llama", job=LORA | {"dora": True}),
    Case("QLoRA", "llama", WIDE, LORA | {"method": "qlora", "precision": "bf16"}, tokens=64),
    Case("QLoRA, checkpointing", "qwen2", WIDE, LORA | FULL | {"method": "qlora", "precision": "bf16"}, tokens=64),
    Case("LoRA q and v, checkpointing", "qwen2", WIDE, LORA | FULL | {"target_modules": ("q_proj", "v_proj")}),
    Case("plain", "qwen2"),
    Case("whole logits, checkpointing", "qwen2", job=FULL, engine=WHOLE),
    Case("plain", "qwen3"),
    Case("Muon, bf16", "qwen3", job={"optimizer": "muon", "precision": "bf16"}, tokens=64),
    Case("capped logits, windows", "gemma2", WINDOWS),
    Case("five windows and one whole", "gemma3_text", WINDOWS | DEEP),
    Case("checkpointing", "gemma3_text", WINDOWS | DEEP, FULL),
    Case("windows", "mistral", {"sliding_window": 48}),
    Case("plain", "phi"),
    Case("plain", "phi3", {"pad_token_id": 0}),
    Case("padded", "stablelm", job={"packed": False}),
    Case("plain", "gpt_neox"),
    Case("dropout", "gpt2"),
    Case("padded, whole logits", "gpt2", job={"packed": False}, engine=WHOLE | {"attention": "sdpa"}),
    Case("checkpointing, Adafactor", "gpt2", job=FULL | {"optimizer": "adafactor"}),
    Case("classification, padded", "bert", BERT, {"packed": False}, {"attention": "sdpa"}),
    Case("classification, checkpointing", "bert", BERT, FULL | {"packed": False}, {"attention": "eager"}),
]


def job_of(case: Case) -> Any:
    """The planner's job of a case, on a CPU, layers not compiled."""
    from transformers import AutoConfig

    from onecard.plan.job import Engine, Job

    make: Any = AutoConfig
    config = make.for_model(case.kind, **(SHAPE | case.shape))
    settings = {"precision": "fp32", **case.job}
    engine = Engine(**{"compiled": False, **case.engine})
    return Job(config, case.rows, case.tokens, device="cpu", engine=engine, **settings)


def measured_peak(job: Any) -> int:
    """The most bytes that an update and an evaluation held, as the profiler counts."""
    from torch.profiler import ProfilerActivity, profile

    from onecard.train.forecast import held_bytes

    with tempfile.TemporaryDirectory() as folder:
        loop, held = held_bytes(job, Path(folder))
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loop.update(0)
            if job.evaluation:
                loop.evaluate()
        loop.close()
    most = now = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return held + most


def compare(case: Case) -> dict[str, Any]:
    """A row: predicted and measured peak in bytes, the error, and how long the prediction took."""
    from onecard.train.forecast import memory

    job = job_of(case)
    started = time.perf_counter()
    predicted = memory(job).peak_allocated_bytes
    seconds = time.perf_counter() - started
    measured = measured_peak(job)
    return {
        "name": case.name,
        "kind": case.kind,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error": predicted / measured - 1,
        "seconds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The section of RESULTS.md."""
    errors = [abs(row["error"]) for row in rows]
    mebi = 2**20
    return [
        "### The planner's memory",
        "",
        f"Peak of an update and an evaluation: predicted on tensors without content, and counted by PyTorch's profiler "
        f"on this CPU. {len(rows)} configurations, {len({row['kind'] for row in rows})} kinds of models: mean error "
        f"{sum(errors) / len(errors):.2%}, largest {max(errors):.2%}. Layers are not compiled here.",
        "",
        "| model | settings | predicted | counted | error |",
        "| --- | --- | ---: | ---: | ---: |",
        *(
            f"| {row['kind']} | {row['name']} | {row['predicted_bytes'] / mebi:,.2f} MiB "
            f"| {row['measured_bytes'] / mebi:,.2f} MiB | {row['error']:+.2%} |"
            for row in rows
        ),
    ]


def main() -> int:
    """Compare all cases, or those with a word in their name or kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.only not in f"{case.kind} {case.name}":
            continue
        try:
            row = compare(case)
        except Exception:  # noqa: BLE001 (one case that fails does not lose the others)
            say(f"{case.kind} {case.name} failed:\n{traceback.format_exc()}")
            continue
        rows.append(row)
        say(
            f"{row['kind']:12} {row['name']:40} {row['predicted_bytes']:>12,} {row['measured_bytes']:>12,} "
            f"{row['error']:+.2%}  {row['seconds']:.1f} s"
        )
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
