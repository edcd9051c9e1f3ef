"""What checkpoints cost: the share of time that a run loses to one every 100 updates, on a model of 135M parameters.

A Llama of the shape of SmolLM2-135M with AdamW's state (1.6 GB a checkpoint) is saved while updates go on. Lost are the
seconds in which the loop waits for the copy, and what updates take longer while files are written beside them. The
update is timed without saving first. `--wait` measures checkpoints that the loop waits for, for comparison.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from measurement import fastest_precision, machine, say
from onecard.data.batches import RowOrder
from onecard.data.packing import StreamRows
from onecard.data.tokens import Encoded, write_store
from onecard.machine.calibrate import default_device
from onecard.model import attention
from onecard.train import optimizers, state, tensor_files
from onecard.train.loop import Loop, LoopSettings
from onecard.train.objectives import NextToken
from onecard.train.precision import Precision
from onecard.train.schedule import Schedule

EVERY = 100
SHAPES: dict[str, dict[str, int]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # To try this program.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def make_loop(folder: Path, shape: dict[str, int], *, rows: int, length: int, updates: int) -> Loop:
    """Over random ids: the cost of an update does not depend on what they say."""
    torch.manual_seed(0)
    device, precision = default_device(), fastest_precision(default_device())
    model: Any = LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=length, tie_word_embeddings=True)  # type: ignore[arg-type]
    )
    attention.switch(model)
    model.to(device).train()
    ids = np.random.default_rng(0).integers(1, shape["vocab_size"], size=rows * updates * length)
    store = write_store(
        folder / "store", [Encoded("rows", ids.tolist())], vocabulary=shape["vocab_size"], tokenizer_hash=""
    )
    packed = StreamRows(store, length)
    return Loop(
        run=folder,
        model=model,
        objective=NextToken(),
        rows=packed,
        order=RowOrder(packed.per_source, [1.0], seed=0, rows_per_update=rows),
        held_out=None,
        optimizers=optimizers.build(model, "adamw", learning_rate=1e-4, muon_learning_rate=1e-4, weight_decay=0.1),
        schedule=Schedule("wsd", 1000, 0.0, 0.5, 0.0),
        precision=Precision(precision, device, 1e12),
        settings=LoopSettings(
            max_steps=1000,
            batch_size=rows,
            max_grad_norm=1.0,
            evaluate_every=1000,
            save_every=EVERY,
            keep_last=2,
            log_every=1,
            pad_id=0,
        ),
    )


def update(loop: Loop) -> float:
    """Seconds of one update, the look at the writer with it."""
    started = time.perf_counter()
    loop.update(loop.taken)
    if loop.precision.device == "cuda":
        torch.cuda.synchronize()
    loop.step += 1
    loop.taken += 1
    loop.saver.look()
    return time.perf_counter() - started


def seconds_of(action: Callable[[], None]) -> float:
    """How long it keeps the loop."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(loop: Loop, *, saves: int, quiet_updates: int, wait: bool) -> dict[str, Any]:
    """Saves in turn, each with updates beside it until it is whole (at least one)."""
    for _ in range(2):  # caches, and the optimizer's state
        update(loop)
    quiet = statistics.median(update(loop) for _ in range(quiet_updates))
    blocked, slower, beside_counts = [], [], []
    for number in range(saves + 1):
        waited = seconds_of(lambda: loop.save(wait=wait))
        beside = [update(loop)]
        while loop.saver.writing and len(beside) < EVERY - 1:
            beside.append(update(loop))
        loop.saver.finish()
        if number:  # the first takes the memory that the others use again
            blocked.append(waited)
            slower.append(sum(beside) - quiet * len(beside))
            beside_counts.append(len(beside))
    lost = statistics.median(blocked) + max(0.0, statistics.median(slower))
    return {
        "checkpoint_bytes": tensor_files.size_bytes(state.tensors(loop)),
        "seconds_per_update": quiet,
        "blocked_seconds": statistics.median(blocked),
        "slower_seconds": statistics.median(slower),
        "updates_beside": statistics.median(beside_counts),
        "share_lost": lost / (lost + EVERY * quiet),
    }


def main() -> int:
    """One measurement; a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--rows", type=int, default=4, help="rows in an update")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4, help="updates timed without a save")
    parser.add_argument("--wait", action="store_true", help="save as if there were no thread")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are written (default: where temporary files go)"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=arguments.folder))
    try:
        loop = make_loop(folder, SHAPES[arguments.shape], rows=arguments.rows, length=arguments.length, updates=50)
        made = measure(loop, saves=arguments.saves, quiet_updates=arguments.updates, wait=arguments.wait)
        loop.close()
        loop.saver.close()
    finally:
        shutil.rmtree(folder)
    say(
        f"{machine()}\n{arguments.shape}, {arguments.rows} x {arguments.length} tokens an update, a checkpoint of "
        f"{made['checkpoint_bytes'] / 1e9:.2f} GB every {EVERY} updates of {made['seconds_per_update']:.2f} s:\n"
        f"the loop waits {made['blocked_seconds']:.3f} s, and the {made['updates_beside']:g} updates beside it take "
        f"{made['slower_seconds']:+.3f} s more: {made['share_lost']:.2%} of the time is lost."
    )
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
