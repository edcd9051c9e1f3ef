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
from onecard.model import lora
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


def published_model(name: str, length: int) -> tuple[Any, float]:
    """A random model of the shape of a known one, and its training FLOP a token: 6 a weight in products, attention."""
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

    ids = {"bos_token_id": None, "eos_token_id": None}
    qwen: dict[str, Any] = {"max_position_embeddings": length, "rope_theta": 1e6, **ids}
    shapes = {
        # Without the dropout that its configuration asks for, as its trainers do today; vocabulary filled up.
        "gpt2": lambda: GPT2Config(
            vocab_size=50304, n_positions=length, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **ids
        ),
        "qwen2.5-0.5b": lambda: Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True, **qwen,
        ),
        "qwen2.5-1.5b": lambda: Qwen2Config(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, tie_word_embeddings=True, **qwen,
        ),
        "qwen3-8b": lambda: Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **qwen,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    shape = shapes[name]()
    # On the card at once, and in 16 bits where nothing else would fit: 8 billion weights take minutes on a processor.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if name == "qwen3-8b" else before)
    try:
        with torch.device(default_device()):
            model = AutoModelForCausalLM.from_config(shape)
    finally:
        torch.set_default_dtype(before)
    head = shape.vocab_size * shape.hidden_size
    tables = head * (1 if shape.tie_word_embeddings else 2)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2) - tables + head
    if name == "gpt2":
        weights -= length * shape.hidden_size  # positions are looked up
    attention = 12.0 * shape.num_hidden_layers * shape.hidden_size * length / 2
    return model, 6.0 * weights + attention


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
    parser.add_argument("--lora-rank", type=int, default=0, help="onecard: adapters over frozen weights")
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
            model = build()
            if arguments.lora_rank:
                lora.add(model, arguments.lora_rank, 2.0 * arguments.lora_rank)
                # Frozen weights need no gradient of their own: 4 products' worth of 6.
                flops_per_token *= 4 / 6
            updates = engines.onecard(
                model,
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
        arguments.engine,
        updates,
        memory,
        precision=name,
        flops_per_token=flops_per_token,
        rate=rate,
        warm_up=warm_up,
        more=foretold(arguments, model.config, name, device) if arguments.engine == "onecard" else None,
    )


def foretold(arguments: argparse.Namespace, config: Any, precision: str, device: str) -> dict[str, Any]:
    """What the planner says of the same updates: the peak that tensors take, and the peak that the allocator holds."""
    from onecard.plan.job import Engine, Job
    from onecard.train import forecast

    checkpointing = arguments.checkpointing
    job = Job(
        model=config,
        batch_size=arguments.batch,
        max_length=arguments.length,
        gradient_accumulation_steps=arguments.accumulation,
        method="lora" if arguments.lora_rank else "full",
        lora_rank=arguments.lora_rank,
        precision=precision,  # type: ignore[arg-type]
        optimizer_states=arguments.states,
        activation_checkpointing=int(checkpointing) if checkpointing.isdigit() else checkpointing,
        evaluation=False,
        device=device,  # type: ignore[arg-type]
        engine=Engine(compiled=not arguments.no_compile),
    )
    try:
        found = forecast.memory(job)
    except Exception as fault:  # noqa: BLE001 (a measurement that was made is not lost for a prediction)
        return {"prediction_fault": repr(fault)[:300]}
    return {
        "predicted_allocated_bytes": found.peak_allocated_bytes,
        "predicted_reserved_bytes": found.peak_reserved_bytes,
    }


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="26M")
    parser.add_argument("--vocabulary", type=int, default=6400)
    parser.add_argument("--published", choices=["gpt2", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-8b"])
    arguments = arguments_of(parser, batch=8, length=512, updates=6)
    if arguments.published:
        model, flops = published_model(arguments.published, arguments.length)
        rows = int(model.get_input_embeddings().weight.shape[0])
        run(arguments, lambda: model, vocabulary=rows, flops_per_token=flops, warm_up=2)
        return
    run(
        arguments,
        lambda: model_of(arguments.size, arguments.vocabulary, arguments.length),
        vocabulary=arguments.vocabulary,
        flops_per_token=preset(arguments.size).training_flops_per_token(arguments.vocabulary, arguments.length / 2),
        warm_up=2,
    )


if __name__ == "__main__":
    main()
