"""The planner's memory against what others measured and published: memory_rows.csv, row by row, nothing tuned.

A row is turned into a `Job` by what is known of the tool that was measured (below, each with where it comes from), and
never by the row's own figure. Rows that do not say enough are listed with what they lack; a figure that cannot be right
is found by `onecard.plan.floor`. `python benchmarks/published.py` prints the table.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurement import say
from onecard.plan.architectures import architecture
from onecard.plan.floor import impossible
from onecard.plan.job import Engine, Job, Memory

ROWS = Path(__file__).parent / "memory_rows.csv"
UNITS = {"GB": 1e9, "GiB": float(1 << 30), "MiB": float(1 << 20)}
# What the guide itself shows for a process with one number on the card: CUDA 11 loaded every kernel at once.
V100_CONTEXT_BYTES = 1343 << 20


@dataclass(frozen=True)
class Row:
    """A published measurement, as written in memory_rows.csv."""

    source: str
    url: str
    model: str
    method: str
    rank: str
    targets: str
    base_format: str
    optimizer: str
    batch_size: str
    accumulation: str
    tokens: str
    checkpointing: str
    extras: str
    card: str
    metric: str
    published: str
    unit: str
    note: str

    @property
    def published_bytes(self) -> int:
        """The figure in bytes."""
        return round(float(self.published) * UNITS[self.unit])

    @property
    def label(self) -> str:
        """The configuration in a few words."""
        maps = len(self.targets.split())
        rank = f" r{self.rank} on {maps} map{'s' * (maps > 1)}" if self.rank else ""
        checkpointing = "" if self.checkpointing == "none" else "recomputed"
        extras = self.extras.replace("padded", "").replace("_", " ").strip()
        words = (f"{self.method}{rank}", self.base_format, self.optimizer, self.size, checkpointing, extras)
        return " ".join(word for word in words if word)

    @property
    def size(self) -> str:
        """Rows times tokens."""
        return f"{self.batch_size} x {self.tokens or 'short'}"

    def lacks(self) -> str | None:
        """Why no job can be made of it; None if one can."""
        if self.source not in TOOLS:
            return "nothing is known of the tool"
        # In full fine-tuning weights, gradients and states are the peak where rows are short.
        if not self.tokens and not ("padded" in self.extras and self.method == "full"):
            return "the length of its rows is not said"
        return None


def rows() -> list[Row]:
    """All rows of the file."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


# --- what is known of the tools ---------------------------------------------------------------------------------------

# Mean tokens of a row of Alpaca with its template (tutorials/prepare_dataset.md of litgpt shows the histogram): what a
# usual batch has where a row gives none.
USUAL_TOKENS = 128


def _common(row: Row) -> dict[str, Any]:
    method = "lora" if row.method == "dora" else row.method
    tokens = int(row.tokens or USUAL_TOKENS)
    return {
        "model": architecture(row.model),
        "method": method,
        "lora_rank": int(row.rank or 0),
        "target_modules": tuple(row.targets.split()),
        "dora": row.method == "dora",
        "batch_size": int(row.batch_size),
        "gradient_accumulation_steps": int(row.accumulation),
        "max_length": tokens,
        "packed": "padded" not in row.extras,
        "optimizer": "adafactor" if row.optimizer == "adafactor" else "adamw",
        "optimizer_states": "8bit" if row.optimizer.endswith("8bit") else "fp32",
        "activation_checkpointing": row.checkpointing,
        "evaluation": False,
    }


def _torchtune(row: Row) -> Job:
    """Everything in bf16: weights, gradients, states, adapters. Fused AdamW. Logits are widened to fp32 for the loss.

    Its chunked loss widens a chunk at a time, but keeps the bf16 logits of all (ce_chunked_output_loss.py).
    """
    extras, common = row.extras.split(), _common(row)
    # The head's adapter weighs less than 0.2 % of these models, and the engine has none there.
    common["target_modules"] = tuple(name for name in common["target_modules"] if name != "lm_head")
    return Job(
        **common,
        precision="pure_bf16",
        weights="bf16",
        gradients="bf16",
        optimizer_in_backward="in_backward" in extras,
        activation_offload="offload" in extras,
        engine=Engine(
            chunked_loss="chunked" in extras,
            keeps_logits="chunked" in extras,
            attention="packed" if "packed" in extras else "sdpa",
            compiled="compile" in extras,
            autocast=False,
            states_like_weights=True,
            adapters="bf16",
        ),
    )


def _litgpt(row: Row) -> Job:
    """bf16-true: weights, adapters and states in bf16; a dropout of 0.05 before adapters (finetune/lora.py).

    The adapted projection is one of queries, keys and values; attention is PyTorch's; logits become fp32 on their way
    out of Fabric's module. bnb.nf4 has no double quantization, and bitsandbytes 0.41 keeps the inputs of its products.
    """
    common = _common(row)
    if getattr(common["model"], "hidden_act", "") == "gelu_new":
        common["model"].hidden_act = "gelu_pytorch_tanh"  # the same function as one kernel, which litgpt calls
    return Job(
        **common,
        precision="pure_bf16",
        weights="bf16",
        gradients="bf16",
        lora_dropout=0.05,
        engine=Engine(
            chunked_loss=False,
            attention="sdpa",
            compiled=False,
            fused_optimizer=False,
            autocast=False,
            states_like_weights=True,
            adapters="bf16",
            double_quantization=row.base_format == "nf4-dq",
            keeps_quantized_inputs=row.method == "qlora",
        ),
    )


def _peft(row: Row) -> Job:
    """transformers' model in bf16 without autocast, PEFT's adapters in fp32, torch.optim.AdamW by lists of tensors."""
    return Job(
        **_common(row),
        precision="pure_bf16",
        weights="bf16",
        gradients="bf16" if row.method == "full" else "fp32",
        engine=Engine(
            chunked_loss=False,
            attention="sdpa",
            compiled=False,
            fused_optimizer=False,
            autocast=False,
            states_like_weights=True,
        ),
    )


def _trainer(row: Row) -> Job:
    """transformers 4.1x on torch 1.1x: eager attention, optimizers from tensor to tensor, gradients zeroed, not freed.

    torch kept the inputs of softmax until pull request 65242, in 1.11, which came a month after the guide.
    fp16 is autocast over fp32 weights. AutoModelForSequenceClassification, two classes.
    """
    common = _common(row)
    common["model"].architectures = ["BertForSequenceClassification"]
    return Job(
        **common,
        precision="fp16" if row.base_format == "fp16 amp" else "fp32",
        engine=Engine(
            chunked_loss=False,
            attention="eager",
            compiled=False,
            keeps_gradients=True,
            keeps_softmax_inputs=True,
            tensor_by_tensor=True,
        ),
    )


TOOLS: dict[str, Callable[[Row], Job]] = {
    "torchtune README": _torchtune,
    "torchtune tutorial": _torchtune,
    "litgpt resource tables": _litgpt,
    "PEFT method comparison": _peft,
    "HF single-GPU guide": _trainer,
}


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A row's prediction; without one, why not."""

    row: Row
    predicted_bytes: int | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1."""
        return None if self.predicted_bytes is None else self.predicted_bytes / self.row.published_bytes - 1


def measured_bytes(row: Row, memory: Memory) -> int:
    """What the source's own meter would have read."""
    if row.metric == "device total":
        return memory.peak_reserved_bytes + V100_CONTEXT_BYTES
    return memory.peak_reserved_bytes if row.metric == "peak reserved" else memory.peak_allocated_bytes


def compare(memory: Callable[[Job], Memory], chosen: list[Row] | None = None) -> Iterator[Result]:
    """Predict each row by `memory`."""
    for row in rows() if chosen is None else chosen:
        lacking = row.lacks()
        if lacking is not None:
            yield Result(row, None, lacking)
            continue
        job = TOOLS[row.source](row)
        context = V100_CONTEXT_BYTES if row.metric == "device total" else 0
        fault = impossible(job, row.published_bytes - context)
        if fault is not None:
            yield Result(row, None, f"cannot be right: {fault}")
            continue
        yield Result(row, measured_bytes(row, memory(job)))


def summary(results: list[Result]) -> tuple[float, float]:
    """Mean and worst of the errors without their signs."""
    errors = [abs(result.error) for result in results if result.error is not None]
    return statistics.fmean(errors), max(errors)


def table(results: list[Result]) -> list[str]:
    """The results as lines of Markdown."""
    mean, worst = summary(results)
    lines = [
        f"Mean error {mean:.1%}, worst {worst:.1%}, of {sum(r.error is not None for r in results)} rows.",
        "",
        "| source | model | configuration | meter | published | predicted | error |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for result in results:
        row, unit = result.row, UNITS[result.row.unit]
        if result.predicted_bytes is None or result.error is None:
            shown, error = result.reason, ""
        else:
            shown, error = f"{result.predicted_bytes / unit:,.2f}", f"{result.error:+.1%}"
        lines.append(
            f"| {row.source} | {row.model} | {row.label} | {row.metric} | {float(row.published):,.2f} {row.unit} | "
            f"{shown} | {error} |"
        )
    return lines


def main() -> int:
    """Print the table."""
    from onecard.train.forecast import memory

    begin, results = time.perf_counter(), []
    for result in compare(memory):
        results.append(result)
        shown = result.reason if result.error is None else f"{result.error:+.1%}"
        say(f"{result.row.source:24} {result.row.model:14} {result.row.label:66} {shown}")
    say("\n".join(table(results)))
    say(f"in {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
