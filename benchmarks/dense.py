"""One measurement of dense pretraining in a process of its own, by onecard or by Hugging Face's Trainer.

Both train the same Llama from the same seed on the same rows of random ids, AdamW, and print one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import engines
from measurement import Memory, fastest_precision, finish, product_rate
from onecard.data.packing import StreamRows
from onecard.data.tokens import Encoded, write_store
from onecard.machine.calibrate import default_device
from onecard.model.presets import llama_config, preset
from onecard.train.precision import Precision


def make_rows(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Random ids, rows x length: the cost of a step does not depend on what they say."""
    return np.random.default_rng(0).integers(0, vocabulary, size=(rows, length), dtype=np.int64)


def model_of(size: str, vocabulary: int, length: int) -> Any:
    """The Llama of a preset, random from a fixed seed."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(llama_config(preset(size), vocabulary=vocabulary, max_positions=length, token_ids=ids))


def arguments_of(parser: argparse.ArgumentParser, *, batch: int, length: int, updates: int) -> argparse.Namespace:
    """The arguments that every measurement of pretraining has."""
    parser.add_argument("engine", choices=["onecard", "trainer"])
    parser.add_argument("--batch", type=int, default=batch, help="rows in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches an update (onecard)")
    parser.add_argument("--length", type=int, default=length)
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--checkpointing", default="none", help="onecard: none, selective, full or a number")
    parser.add_argument("--states", default="fp32", help="onecard: fp32, 8bit or host")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def run(
    arguments: argparse.Namespace,
    build: Callable[[], Any],
    *,
    vocabulary: int,
    flops_per_token: float,
    warm_up: int,
) -> None:
    """Train what `build` makes on random rows by the engine asked for, and print the JSON line."""
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401 (loaded before memory is counted, by both)

    device = default_device()
    name = fastest_precision(device) if arguments.precision == "auto" else arguments.precision
    rate = product_rate(name, device)
    memory = Memory(device)
    ids = make_rows(arguments.batch * arguments.accumulation * arguments.updates, arguments.length, vocabulary)
    common: dict[str, Any] = {
        "precision": Precision(name, device, rate),
        "batch": arguments.batch,
        "updates": arguments.updates,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if arguments.engine == "onecard":
            documents = [Encoded("random", row.tolist()) for row in ids]
            store = write_store(place / "tokens", documents, vocabulary=vocabulary, tokenizer_hash="")
            rows = StreamRows(store, arguments.length)
            memory.begin()
            updates = engines.onecard(
                build(),
                rows,
                place,
                accumulation=arguments.accumulation,
                compiled=not arguments.no_compile,
                checkpointing=int(arguments.checkpointing)
                if arguments.checkpointing.isdigit()
                else arguments.checkpointing,
                states=arguments.states,
                **common,
            )
        else:
            made = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in ids]
            memory.begin()
            updates = engines.trainer(build(), made, place, **common)
    finish(
        arguments.engine, updates, memory, precision=name, flops_per_token=flops_per_token, rate=rate, warm_up=warm_up
    )


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="26M")
    parser.add_argument("--vocabulary", type=int, default=6400)
    arguments = arguments_of(parser, batch=8, length=512, updates=6)
    run(
        arguments,
        lambda: model_of(arguments.size, arguments.vocabulary, arguments.length),
        vocabulary=arguments.vocabulary,
        flops_per_token=preset(arguments.size).training_flops_per_token(arguments.vocabulary, arguments.length / 2),
        warm_up=2,
    )


if __name__ == "__main__":
    main()
