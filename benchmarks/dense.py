"""One measurement of dense pretraining in a process of its own, by onecard or by Hugging Face's Trainer.

Both train the same Llama from the same seed on the same rows of random ids, one micro-batch an update, AdamW, and print
one JSON line: tokens a second (median over updates after the third) and peak resident bytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from onecard.machine.calibrate import default_device, fastest_training_dtype
from onecard.model.presets import llama_config, preset


def make_rows(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Random ids, rows x length: the cost of a step does not depend on what they say."""
    return np.random.default_rng(0).integers(0, vocabulary, size=(rows, length), dtype=np.int64)


def by_onecard(arguments: argparse.Namespace, folder: Path, bf16: bool) -> list[float]:
    """Seconds of each update in onecard's loop."""
    from onecard.data.batches import RowOrder
    from onecard.data.packing import StreamRows
    from onecard.data.tokens import Encoded, write_store
    from onecard.model import attention
    from onecard.train import optimizers
    from onecard.train.compilation import compile_layers
    from onecard.train.loop import Loop, LoopSettings
    from onecard.train.objectives import NextToken
    from onecard.train.precision import Precision
    from onecard.train.schedule import Schedule

    device = default_device()
    ids = make_rows(arguments.batch * arguments.updates, arguments.length, arguments.vocabulary)
    store = write_store(
        folder / "tokens",
        [Encoded("random", row.tolist()) for row in ids],
        vocabulary=arguments.vocabulary,
        tokenizer_hash="",
    )
    attention.register()
    model = _model(arguments)
    model.set_attn_implementation(attention.PACKED)
    model.to(device).train()
    compile_layers(model, device)
    rows = StreamRows(store, arguments.length)
    loop = Loop(
        run=folder,
        model=model,
        objective=NextToken(),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=arguments.batch),
        held_out=None,
        optimizers=optimizers.build(model, "adamw", learning_rate=1e-3, muon_learning_rate=0, weight_decay=0.1),
        schedule=Schedule("cosine", arguments.updates, 0.0, 0.0, 0.0),
        precision=Precision("bf16" if bf16 else "fp32", device, 0.0),
        settings=LoopSettings(arguments.updates, arguments.batch, 1.0, 10**9, 10**9, 1, 1, 0),
    )
    seconds = []
    for update in range(arguments.updates):
        started = time.perf_counter()
        loop.update(update)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def by_trainer(arguments: argparse.Namespace, folder: Path, bf16: bool) -> list[float]:
    """Seconds of each update in transformers.Trainer, as a person starts it (its defaults, eager)."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ids = make_rows(arguments.batch * arguments.updates, arguments.length, arguments.vocabulary)
    rows = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in ids]
    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.started)

    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.updates,
        learning_rate=1e-3,
        weight_decay=0.1,
        bf16=bf16,
        use_cpu=default_device() == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(_model(arguments), settings, train_dataset=rows, callbacks=[Clock()]).train()
    return seconds


def _model(arguments: argparse.Namespace) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = preset(arguments.size)
    return LlamaForCausalLM(
        llama_config(shape, vocabulary=arguments.vocabulary, max_positions=arguments.length, token_ids=ids)
    )


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["onecard", "trainer"])
    parser.add_argument("--size", default="26M")
    parser.add_argument("--vocabulary", type=int, default=6400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--updates", type=int, default=8)
    arguments = parser.parse_args()
    dtype, rates = fastest_training_dtype(default_device())
    bf16 = dtype == torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        run = by_onecard if arguments.engine == "onecard" else by_trainer
        seconds = run(arguments, Path(folder), bf16)
    tokens = arguments.batch * arguments.length
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    flops = preset(arguments.size).training_flops_per_token(arguments.vocabulary, arguments.length / 2)
    rate = tokens / statistics.median(seconds[3:])
    used = rates["bf16" if bf16 else "fp32"]
    made = {
        "engine": arguments.engine,
        "precision": "bf16" if bf16 else "fp32",
        "tokens_per_second": rate,
        "first_update_seconds": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated() if default_device() == "cuda" else peak,
        "product_flops_per_second": used,
        "share_of_product_rate": rate * flops / used,
    }
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
