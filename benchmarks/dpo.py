"""One measurement of DPO with adapters, in a process of its own: onecard's `align`, or TRL's DPOTrainer.

The model is SmolLM2-135M-Instruct. A pair is a question with its own answer and, as the worse one, the answer to
another question; the pairs are the same for both engines. What is counted are the tokens of question and answer, twice
for a pair, padding left out, in a second. The reference counts: onecard computes it once for each pair before the first
update, and those seconds are shared out over the pairs; TRL computes it in every update.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import _clock
from measurement import Memory, Updates, fastest_precision, finish, product_rate, say
from onecard.config import AlignConfig
from onecard.machine.calibrate import default_device
from onecard.model.load import load_model, load_tokenizer, silence_transformers
from onecard.settings import build
from onecard.tokenizer.template import encode_chat
from onecard.train import align
from sft import flops, sample, smollm2

ENGINES = ("onecard", "trl")
_REFERENCE_FLOPS = 1.5
"""Forward, backward to the adapters (4 of 6 parts of a full update), and the forward pass of the reference."""


def pairs_of(chosen: list[Any]) -> list[dict[str, Any]]:
    """Preference rows: the answer of the next row is the worse one."""
    chats = [chat for chat, _ in chosen]
    return [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": other[1:]}
        for chat, other in zip(chats, [*chats[1:], chats[0]])
    ]


def tokens_of(tokenizer: Any, row: dict[str, Any]) -> tuple[int, int]:
    """Tokens of both conversations, and of what onecard computes: the question once."""
    one, other = (encode_chat(tokenizer, row["prompt"] + row[key]).ids for key in ("chosen", "rejected"))
    shared = len(encode_chat(tokenizer, row["prompt"], add_generation_prompt=True).ids)
    return len(one) + len(other), len(one) + len(other) - shared


def by_onecard(arguments: argparse.Namespace, base: Path, rows: list[dict[str, Any]], memory: Memory) -> Updates:
    """The verb itself; seconds and tokens of the updates from its metrics."""
    tokenizer = load_tokenizer(base)
    both, computed = (sum(column) for column in zip(*(tokens_of(tokenizer, row) for row in rows)))
    made, reference = Updates(), [0.0]
    refer = align._refer

    def timed(*inputs: Any) -> None:
        begin = time.perf_counter()
        refer(*inputs)
        reference[0] += time.perf_counter() - begin

    align._refer = timed
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pairs.jsonl"
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        settings = {
            "model": str(base), "sources": [str(source)], "output": str(Path(folder) / "run"), "held_out": 0.0,
            "lora_rank": arguments.lora_rank, "max_steps": arguments.updates, "batch_size": arguments.packed_batch,
            "gradient_accumulation_steps": 1, "max_length": arguments.max_length, "precision": arguments.precision,
            "compile": not arguments.no_compile, "check_memory": False,
        }  # fmt: skip
        memory.begin()
        align.align(build(AlignConfig, settings))
        written = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    before = (0.0, 0)
    for line in map(json.loads, written):
        made.seconds.append(line["seconds"] - before[0])
        made.tokens.append(line["tokens"] - before[1])
        before = (line["seconds"], line["tokens"])
    # The reference of all pairs was computed: its seconds belong to each token of them alike.
    each = reference[0] / computed
    say(f"reference: {reference[0]:.1f} s for {len(rows)} pairs")
    made.seconds = [seconds + each * tokens for seconds, tokens in zip(made.seconds, made.tokens)]
    made.tokens = [round(tokens * both / computed) for tokens in made.tokens]
    return made


def by_trl(arguments: argparse.Namespace, base: Path, rows: list[dict[str, Any]], memory: Memory) -> Updates:
    """TRL with its defaults; of a model with adapters the reference is the model without them."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    silence_transformers()
    made = Updates()
    tokenizer = load_tokenizer(base)

    class Counting(DPOTrainer):  # type: ignore[misc, valid-type]
        """Takes note of the tokens of each batch."""

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **others: Any) -> Any:
            made.tokens.append(int(inputs["attention_mask"].sum()))
            return super().training_step(model, inputs, *rest, **others)

    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.updates,
            learning_rate=1e-5,
            max_length=arguments.max_length,
            bf16=arguments.precision == "bf16",
            use_cpu=memory.device == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        rank = arguments.lora_rank
        adapters = LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        memory.begin()
        trained: Any = Counting(
            model=load_model(base),
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=adapters,
            callbacks=[_clock(TrainerCallback, made, memory.device)],
        )
        trained.train()
    return made


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--rows", action="append", default=[], help="chats: a file, folder or package: path")
    parser.add_argument("--model", type=Path, help="a chat model's directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="pairs an update (TRL)")
    parser.add_argument("--packed-batch", type=int, default=2, help="packed rows an update (onecard)")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--count", type=int, default=40, help="pairs that are taken")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    base = arguments.model or smollm2()
    device = default_device()
    if arguments.precision == "auto":
        arguments.precision = fastest_precision(device)
    rate = product_rate(arguments.precision, device)
    chosen = sample(arguments.rows, load_tokenizer(base), arguments.count, arguments.max_length // 2)
    memory = Memory(device)
    rows = pairs_of(chosen)
    updates = (by_onecard if arguments.engine == "onecard" else by_trl)(arguments, base, rows, memory)
    finish(
        arguments.engine,
        updates,
        memory,
        precision=arguments.precision,
        flops_per_token=_REFERENCE_FLOPS * flops(arguments, base),
        rate=rate,
        warm_up=2,
    )


if __name__ == "__main__":
    main()
