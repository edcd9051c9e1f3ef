"""The verb `bench memory`: what each way of saving memory saves and costs on this machine, as one table.

In: a size and micro-batches. Out: a directory with memory.json (a row for each way and micro-batch: peak bytes, tokens
a second, both beside the first row) and report.html. Every row is a few updates of the loop that all training goes
through, in a process of its own, which settings make and not this file. Rows that this machine cannot have, or would
take hours for, stand in the table with the reason.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import MemoryBenchConfig, PretrainConfig
from onecard.errors import ConfigError
from onecard.machine.calibrate import default_device, matrix_rate
from onecard.report import Page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Below this share of the rate of fp32, products in 16 bits are emulated: a row would take hours and say nothing.
SLOW_PRODUCTS = 0.5


@dataclass(frozen=True)
class Measure:
    """A way of saving memory: its name, the settings it changes beside those of `on`, and what it needs."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    only_on_cuda: bool = False


FORMATS = [
    Measure("fp32", {"precision": "fp32"}),
    Measure("bf16", {"precision": "bf16"}),
    Measure("pure bf16", {"precision": "pure_bf16"}),
]
# Each alone, in the format that is fast here.
ALONE = [
    Measure("+ selective checkpointing", {"activation_checkpointing": "selective"}),
    Measure("+ every 2nd layer checkpointed", {"activation_checkpointing": 2}),
    Measure("+ full checkpointing", {"activation_checkpointing": "full"}),
    Measure("+ activations in 8 bits", {"activation_compression": "8bit"}),
    Measure("+ activations on the host", {"activation_offload": True}, only_on_cuda=True),
    Measure("+ 8-bit AdamW", {"optimizer_states": "8bit"}),
    Measure("+ states on the host", {"optimizer_states": "host"}, only_on_cuda=True),
    Measure("+ Adafactor", {"optimizer": "adafactor"}),
    Measure("+ optimizer in backward", {"optimizer_in_backward": True, "max_grad_norm": 0.0}),
    Measure("+ bf16 gradients", {"gradients": "bf16"}),
]
TOGETHER = [
    Measure("full checkpointing + 8-bit AdamW", {"activation_checkpointing": "full", "optimizer_states": "8bit"}),
    Measure(
        "full checkpointing + 8-bit AdamW in backward",
        {
            "activation_checkpointing": "full",
            "optimizer_states": "8bit",
            "optimizer_in_backward": True,
            "max_grad_norm": 0.0,
        },
    ),
    Measure(
        "full checkpointing + 8-bit activations + Adafactor in backward",
        {
            "activation_checkpointing": "full",
            "activation_compression": "8bit",
            "optimizer": "adafactor",
            "optimizer_in_backward": True,
            "max_grad_norm": 0.0,
        },
    ),
]


def memory(config: MemoryBenchConfig) -> dict[str, Any]:
    """Measure every way asked for; returns the table."""
    from onecard.model.presets import preset

    shape = preset(config.size)
    device = default_device()
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[])
    ways = _ways(config, device)
    rows: list[dict[str, Any]] = []
    work = [(batch, measure, reason) for batch in config.batch_size for measure, reason in ways]
    with console.progress("bench memory", len(work), "measurements") as bar:
        for batch, measure, reason in work:
            row: dict[str, Any] = {"batch_size": batch, "name": measure.name, "settings": measure.changes}
            rows.append(row | ({"skipped": reason} if reason else _in_a_process(config, batch, measure.changes)))
            bar.advance(1, measure.name)
    _relate(rows)
    result = {
        "size": config.size,
        "parameters": shape.parameters(config.vocabulary_size),
        "vocabulary_size": config.vocabulary_size,
        "max_length": config.max_length,
        "updates": config.updates,
        "device": device,
        "versions": artifact.versions(),
        "rows": rows,
    }
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[]) as directory:
        artifact.write_json_atomically(directory / "memory.json", result)
        _page(result).save(directory / "report.html")
        artifact.write_manifest(directory, "memory", settings=config.plain())
    console.table(f"Memory of an update: {config.output}", *_table(rows))
    return result | {"output": str(config.output)}


def _ways(config: MemoryBenchConfig, device: str) -> list[tuple[Measure, str]]:
    """What to measure, each with the reason for leaving it out (or none)."""
    import torch

    slow = ""
    if device == "cpu":
        # The best of many: on a busy machine a single one may see nothing but waiting.
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        rates = {name: max(matrix_rate(dtype, device) for _ in range(10)) for name, dtype in dtypes.items()}
        if rates["bf16"] < SLOW_PRODUCTS * rates["fp32"]:
            slow = f"bf16 products run at {rates['bf16'] / 1e9:,.0f} GFLOP/s here, fp32 at {rates['fp32'] / 1e9:,.0f}"
    base = "fp32" if slow else "bf16"
    ways: list[tuple[Measure, str]] = [
        (measure, slow if measure.changes["precision"] != "fp32" else "") for measure in FORMATS
    ]
    for measure in (*ALONE, *TOGETHER):
        reason = "on a CPU it lies on the host already" if measure.only_on_cuda and device == "cpu" else ""
        name = f"{base} {measure.name}" if measure.name.startswith("+") else f"{base} + {measure.name}"
        ways.append((Measure(name, {"precision": base, **measure.changes}), reason))
    if not config.only:
        return ways
    chosen = [way for way in ways if any(word.lower() in way[0].name.lower() for word in config.only)]
    if not chosen:
        raise ConfigError(
            f"No measurement has {' or '.join(config.only)} in its name.",
            f"They are: {'; '.join(measure.name for measure, _ in ways)}.",
        )
    return chosen


def _in_a_process(config: MemoryBenchConfig, batch: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The row of one measurement; where its process died, why."""
    asked = {
        "settings": {
            "size": config.size,
            "max_length": config.max_length,
            "batch_size": batch,
            "gradient_accumulation_steps": 1,
            "max_steps": config.updates,
            "compile": config.compile,
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "activation_checkpointing": "none",
            "optimizer_states": "fp32",
            **changes,
        },
        "vocabulary_size": config.vocabulary_size,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "onecard.train.memory_bench", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return {"skipped": "killed: not enough memory" if done.returncode == -9 else last[-300:]}


# --- one measurement, in its own process --------------------------------------------------------------------------


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """A few updates under the settings asked for: peak bytes beyond what lay there before, tokens a second."""
    import statistics
    import tempfile
    import time

    import numpy as np
    import torch

    from onecard.data.packing import StreamRows
    from onecard.data.tokens import Encoded, write_store
    from onecard.train import activations, optimizers
    from onecard.train.peak_memory import PeakMemory
    from onecard.train.precision import choose

    config = PretrainConfig.model_validate(asked["settings"])
    activations.check(config)
    optimizers.check(config)
    assert isinstance(config.max_steps, int) and isinstance(config.batch_size, int)
    assert isinstance(config.max_length, int)
    precision = choose(config.precision)
    _load_the_compiler(compiled=config.compile)
    ids = np.random.default_rng(0).integers(
        0, asked["vocabulary_size"], size=(config.max_steps * config.batch_size, config.max_length)
    )
    with tempfile.TemporaryDirectory() as folder:
        documents = [Encoded("random", row.tolist()) for row in ids]
        store = write_store(Path(folder) / "tokens", documents, vocabulary=asked["vocabulary_size"], tokenizer_hash="")
        rows = StreamRows(store, config.max_length)
        peak = PeakMemory(precision.device)
        loop = _loop(config, precision, rows, Path(folder), asked["vocabulary_size"])
        seconds = []
        for number in range(config.max_steps):
            started = time.perf_counter()
            loop.update(number)
            if precision.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        loop.close()
        if loop.settings.batch_size != config.batch_size:
            return {"skipped": "not enough memory"}
    tokens = config.batch_size * config.max_length
    return {
        "peak_bytes": peak.bytes(),
        # The first update compiles.
        "tokens_per_second": tokens / statistics.median(seconds[1:] or seconds),
        "seconds": [round(value, 3) for value in seconds],
    }


def _loop(config: PretrainConfig, precision: Any, rows: Any, folder: Path, vocabulary: int) -> Any:
    """The loop of a run with these settings, on a model of random weights."""
    import torch
    from transformers import LlamaForCausalLM

    from onecard.data.batches import RowOrder
    from onecard.model import attention
    from onecard.model.presets import llama_config, preset
    from onecard.train import activations, optimizers
    from onecard.train.compilation import compile_layers
    from onecard.train.loop import Loop, LoopSettings
    from onecard.train.objectives import NextToken
    from onecard.train.precision import convert
    from onecard.train.schedule import Schedule

    assert isinstance(config.max_steps, int) and isinstance(config.batch_size, int)
    assert isinstance(config.max_length, int)
    assert not isinstance(config.learning_rate, str)
    torch.manual_seed(0)
    no_ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = llama_config(preset(config.size), vocabulary=vocabulary, max_positions=config.max_length, token_ids=no_ids)
    model: Any = LlamaForCausalLM(shape).to(precision.device).train()
    attention.switch(model)
    convert(model, precision)
    assert config.activation_checkpointing != "auto"
    ways = activations.Activations(
        checkpointing=config.activation_checkpointing,
        offload=config.activation_offload,
        compression=config.activation_compression,
    )
    ways.apply(model)
    if config.compile:
        compile_layers(model, precision.device, cuda_graphs=config.cuda_graphs)
    return Loop(
        run=folder,
        model=model,
        objective=NextToken(),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=config.batch_size),
        held_out=None,
        optimizers=optimizers.build(
            model,
            config.optimizer,
            learning_rate=config.learning_rate,
            muon_learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            states=config.optimizer_states,
            in_backward=config.optimizer_in_backward,
            gradients=config.gradients,
        ),
        schedule=Schedule("cosine", config.max_steps, 0.0, 0.0, 0.0),
        precision=precision,
        settings=LoopSettings(config.max_steps, config.batch_size, config.max_grad_norm, 10**9, 10**9, 1, 1, 0),
        saving=ways.saving,
    )


def _load_the_compiler(*, compiled: bool) -> None:
    """Bring the programs themselves into memory before it is measured: they weigh the same for every row."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from onecard.train.compilation import FAILURES

    if not compiled:
        return
    try:
        torch.compile(lambda x: (x.sin() @ x).sum())(torch.ones(8, 8, requires_grad=True)).backward()
    except FAILURES:
        return  # said by whoever compiles the layers
    torch._dynamo.reset()


# --- the table ----------------------------------------------------------------------------------------------------


def _relate(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it is beside the first measured one of its batch size."""
    for row in rows:
        first = next((r for r in rows if r["batch_size"] == row["batch_size"] and "peak_bytes" in r), None)
        if "peak_bytes" in row and first is not None:
            row["memory_ratio"] = row["peak_bytes"] / first["peak_bytes"]
            row["speed_ratio"] = row["tokens_per_second"] / first["tokens_per_second"]


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    columns = ["batch size", "settings", "peak memory", "tokens/s", "memory", "speed"]
    made: list[list[Any]] = []
    for row in rows:
        if "peak_bytes" not in row:
            made.append([str(row["batch_size"]), row["name"], row["skipped"], "", "", ""])
            continue
        made.append(
            [
                str(row["batch_size"]),
                row["name"],
                console.format_bytes(row["peak_bytes"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['memory_ratio']:.2f}",
                f"{row['speed_ratio']:.2f}",
            ]
        )
    return columns, made


def _page(result: dict[str, Any]) -> Page:
    page = Page(
        "Memory of an update",
        f"A Llama of {result['parameters'] / 1e6:,.0f}M parameters, vocabulary {result['vocabulary_size']:,}, rows of "
        f"{result['max_length']:,} tokens, on this {result['device']}.",
    )
    for batch in dict.fromkeys(row["batch_size"] for row in result["rows"]):
        measured = [row for row in result["rows"] if row["batch_size"] == batch and "peak_bytes" in row]
        if not measured:
            continue
        page.heading(f"{batch} x {result['max_length']:,} tokens")
        for key, label, unit in (("peak_bytes", "peak memory, GB", 1e9), ("tokens_per_second", "tokens a second", 1)):
            page.figure(
                functools.partial(_bars, rows=measured, key=key, label=label, unit=unit),
                f"{label}, {batch} rows at a time",
                height=0.6 + 0.28 * len(measured),
            )
    page.heading("The table")
    page.table(
        *_table(result["rows"]),
        caption="Peak memory is what is held beyond the programs themselves; memory and speed are beside the first row "
        "of the same batch size. Speed is the median of the updates after the first.",
    )
    page.details("Versions and settings", json.dumps(result, indent=2, ensure_ascii=False))
    return page


def _bars(axes: Axes, rows: list[dict[str, Any]], key: str, label: str, unit: float) -> None:
    values = [row[key] / unit for row in rows]
    bars = axes.barh([row["name"] for row in rows], values, color="#2f5fd0", height=0.6)
    axes.bar_label(bars, [f"{value:,.2f}" if unit > 1 else f"{value:,.0f}" for value in values], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label)


if __name__ == "__main__":
    console.configure(json_output=True, quiet=True)
    console.document(measure(json.loads(sys.argv[1])))
