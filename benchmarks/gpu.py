"""`make bench-gpu`: what only a CUDA card can tell, in under eight minutes, as one file that can be sent.

Correctness of attention, loss, every number format and every way of keeping activations, against fp64; then tokens a
second, share of the card's peak, memory (beside what the planner foretells) and waiting for data of pretraining and of
adapters, beside Hugging Face's Trainer and beside published figures. Each part runs in a process of its own with a time
budget: one that fails or takes too long loses nothing but itself. Writes benchmarks/gpu.json and prints it; status 3
without a card, 1 if something is not correct. `--device cpu --tiny` walks the same parts without a card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from measurement import HERE, machine, say
from onecard import artifact

TOTAL_SECONDS = 470.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative error (2-norm) against fp64. A card multiplies fp32 with the mantissa of TF32 (10 bits); bf16 has 8
# bits, fp16 11; pure_bf16 has also rounded its weights, float8 has 4 bits and a scale for each tensor.
LIMITS = {"fp32": 5e-3, "bf16": 3e-2, "fp16": 6e-3, "pure_bf16": 6e-2, "float8": 2e-1}
# Tokens a second that others published, by card: this is to be beaten.
PUBLISHED = {
    "gpt2": {"RTX 4090": 106_000},
    "qwen2.5-0.5b": {"RTX 4090": 40_000, "RTX 5090": 55_000},
    "qwen2.5-1.5b": {"RTX 4090": 14_000, "RTX 5090": 17_000},
    "qwen3-8b": {"RTX 5090": 3_800},
}


# --- correctness --------------------------------------------------------------------------------------------------


def difference(made: torch.Tensor, meant: torch.Tensor) -> float:
    """Relative difference in the 2-norm, in fp64."""
    exact = meant.detach().cpu().double()
    return float((made.detach().cpu().double() - exact).norm() / exact.norm())


def attention(device: str, tiny: bool) -> dict[str, Any]:
    """Packed attention, output and gradients, by number format and by kind of attention."""
    from onecard.model.attention import packed_attention

    tokens, width, edges = (64, 16, [0, 7, 30, 64]) if tiny else (1024, 64, [0, 7, 300, 900, 1024])
    kinds: dict[str, tuple[int, int, float]] = {  # key-value heads, window, cap
        "plain": (4, 0, 0.0),
        "shared key-value heads": (2, 0, 0.0),
        "sliding window": (2, tokens // 8, 0.0),
        "capped logits": (4, 0, 20.0),
        "capped logits in a sliding window": (2, tokens // 8, 20.0),
    }
    found: dict[str, Any] = {}
    for kind, (shared, window, cap) in kinds.items():
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads, tokens, width) for heads in (4, shared, shared)]
        exact = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
        weights = torch.randn(1, tokens, 4, width, generator=generator, dtype=torch.float64)
        wanted = plain_attention(*exact, edges, window, cap)
        (wanted * weights).sum().backward()
        for name, dtype in DTYPES.items():
            given = [t.detach().to(device, dtype).requires_grad_() for t in exact]
            boundaries = torch.tensor(edges, dtype=torch.int32, device=device)
            longest = max(b - a for a, b in zip(edges, edges[1:]))
            made, _ = packed_attention(
                torch.nn.Module(),
                *given,
                None,
                cu_seq_lens_q=boundaries,
                max_length_q=longest,
                sliding_window=window or None,
                softcap=cap or None,
            )
            (made * weights.to(device, dtype)).sum().backward()
            pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(given, exact))]
            found[f"{kind}, {name}"] = judged(max(difference(a, b) for a, b in pairs), name)
    return found


def plain_attention(q: Any, k: Any, v: Any, edges: list[int], window: int, cap: float) -> torch.Tensor:
    """As the definition says it, in the format of its inputs: (1, H, T, D) -> (1, T, H, D)."""
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if cap:
        scores = (scores / cap).tanh() * cap
    at = torch.arange(tokens)
    document = torch.bucketize(at, torch.tensor(edges[1:]), right=True)
    seen = (at[:, None] >= at) & (document[:, None] == document)
    if window:
        seen &= at[:, None] - at < window
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def loss(device: str, tiny: bool) -> dict[str, Any]:
    """The chunked loss: its value and both gradients."""
    from onecard.model.loss import chunked_cross_entropy

    positions, width, vocabulary = (32, 16, 300) if tiny else (2048, 256, 151_936 // 4)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for kind, cap, multiplier in (("plain", None, 1.0), ("capped logits", 5.0, 1.0), ("scaled logits", None, 0.25)):
        hidden = torch.randn(positions, width, generator=generator, dtype=torch.float64, requires_grad=True)
        head = (0.1 * torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)).requires_grad_()
        labels = torch.randint(0, vocabulary, (positions,), generator=generator)
        labels[::5] = -100
        logits = hidden @ head.T * multiplier
        logits = logits if cap is None else (logits / cap).tanh() * cap
        wanted = torch.nn.functional.cross_entropy(logits, labels)
        wanted.backward()
        scale = 1.0 / int((labels != -100).sum())
        for name, dtype in DTYPES.items():
            given = [t.detach().to(device, torch.float32).requires_grad_() for t in (hidden, head)]
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                made = chunked_cross_entropy(*given, labels.to(device), scale, softcap=cap, multiplier=multiplier)
            made.backward()
            errors = [
                difference(made, wanted),
                difference(given[0].grad, hidden.grad),
                difference(given[1].grad, head.grad),
            ]
            found[f"{kind}, {name}"] = judged(max(errors), name)
    return found


def judged(error: float, name: str) -> dict[str, Any]:
    """An error beside its limit."""
    return {"error": error, "limit": LIMITS[name], "correct": error < LIMITS[name]}


def tiny_model(tiny: bool) -> Any:
    """A Llama of four layers (fp32, on the processor), the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 64 if tiny else 256
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.04,
        )
    )  # fmt: skip


def gradients(
    device: str, tiny: bool, precision: str, *, compiled: bool = False, **ways: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one packed micro-batch as onecard's loop takes them."""
    from onecard.data.packing import PackedRows, gather
    from onecard.data.tokens import Encoded, write_store
    from onecard.model.attention import switch
    from onecard.train.activations import Activations
    from onecard.train.compilation import compile_layers
    from onecard.train.objectives import NextToken
    from onecard.train.precision import Precision, convert

    model = tiny_model(tiny).to(device).train()
    assert switch(model)
    chosen = Precision(precision, device, 1.0)
    convert(model, chosen)
    activations = Activations(**ways)
    activations.apply(model)
    if compiled:
        compile_layers(model, device)
    with tempfile.TemporaryDirectory() as folder:
        length = 64 if tiny else 256
        store = write_store(
            Path(folder) / "tokens", [Encoded("x", ids) for ids in documents(tiny)], vocabulary=256, tokenizer_hash=""
        )
        rows = PackedRows(store, length)
        batch = gather(rows, list(range(sum(rows.per_source))), pad_id=0)
        scale = 1024.0 if chosen.loss_scaling else 1.0
        with chosen.autocast(), activations.saving():
            made = NextToken().loss(model, batch, scale=scale / batch.labelled, device=device, row_tokens=length)
        made.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.float() / scale for name, p in model.named_parameters() if p.grad is not None}
    return float(made.detach()) / scale, found


def documents(tiny: bool) -> list[list[int]]:
    """Documents of several lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 20, 33) if tiny else (20, 100, 150, 230, 256)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


def exact_gradients(tiny: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by transformers alone in fp64 on the processor, document by document."""
    model = tiny_model(tiny).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids in documents(tiny):
        row = torch.tensor([ids])
        logits = model(input_ids=row, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum")
        count += len(ids) - 1
    (total / count).backward()  # type: ignore[no-untyped-call]
    return float(total.detach() / count), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compared(made: dict[str, torch.Tensor], meant: dict[str, torch.Tensor]) -> float:
    """Relative difference of all gradients together."""
    assert made.keys() == meant.keys()
    return difference(
        torch.cat([made[name].cpu().double().flatten() for name in meant]),
        torch.cat([meant[name].cpu().double().flatten() for name in meant]),
    )


def precisions(device: str, tiny: bool) -> dict[str, Any]:
    """Loss and gradients of a packed update in every number format, plain and compiled."""
    from onecard.train.precision import unfit

    meant_loss, meant = exact_gradients(tiny)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    found: dict[str, Any] = {}
    for name in LIMITS:
        if (reason := unfit(name, capability)) is not None:
            found[name] = {"left_out": reason}
            continue
        for compiled in (False, True) if name == "fp32" or not tiny else (False,):
            key = f"{name}, compiled" if compiled else name
            try:
                made_loss, made = gradients(device, tiny, name, compiled=compiled)
            except Exception as fault:  # noqa: BLE001 (the other formats are still told)
                found[key] = {"correct": False, "fault": repr(fault)[:500]}
                continue
            found[key] = judged(max(compared(made, meant), abs(made_loss / meant_loss - 1)), name)
    return found


def activations(device: str, tiny: bool) -> dict[str, Any]:
    """Gradients with activations computed again, kept on the host, or in 8 bits, against those of the plain run."""
    _, plain = gradients(device, tiny, "fp32")
    ways: dict[str, tuple[dict[str, Any], float]] = {
        "full": ({"checkpointing": "full"}, 1e-5),
        "selective": ({"checkpointing": "selective"}, 1e-5),
        "every second layer": ({"checkpointing": 2}, 1e-5),
        "on the host": ({"offload": True}, 1e-5),
        "full, on the host": ({"checkpointing": "full", "offload": True}, 1e-5),
        "in 8 bits": ({"compression": "8bit"}, 5e-2),
    }
    found: dict[str, Any] = {}
    for key, (way, limit) in ways.items():
        for compiled in (False, True):
            name = f"{key}, compiled" if compiled else key
            # A compiled layer sums in another order.
            allowed = max(limit, LIMITS["fp32"]) if compiled else limit
            try:
                error = compared(gradients(device, tiny, "fp32", compiled=compiled, **way)[1], plain)
            except Exception as fault:  # noqa: BLE001 (the other ways are still told)
                found[name] = {"correct": False, "fault": repr(fault)[:500]}
                continue
            found[name] = {"error": error, "limit": allowed, "correct": error < allowed}
    return found


CHECKS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "attention": attention,
    "loss": loss,
    "precisions": precisions,
    "activations": activations,
}


# --- speed --------------------------------------------------------------------------------------------------------


def speeds(tiny: bool, memory_gib: float) -> dict[str, tuple[str, float, str]]:
    """Arguments of dense.py, seconds allowed, and the published figure beside it; the most important first."""
    if tiny:
        small = "--size 4M --vocabulary 300 --length 32 --batch 2 --updates 3 --no-compile --precision fp32"
        return {
            "pretrain": (f"onecard {small}", 120, ""),
            "pretrain, Trainer": (f"trainer {small}", 120, ""),
            "LoRA": (f"onecard {small} --lora-rank 4", 120, ""),
        }
    base = "--size 125M --vocabulary 32000 --length 1024 --batch 16 --updates 12"
    large = "--size 1B --vocabulary 32000 --length 1024 --batch 4 --updates 12"
    published = "--updates 12 --published"
    less = "--checkpointing selective --states 8bit"
    qwen = "--length 1024 --batch 4 --precision pure_bf16"
    made: dict[str, tuple[str, float, str]] = {
        "pretrain 125M": (f"onecard {base}", 70, ""),
        "pretrain 125M, Trainer": (f"trainer {base}", 50, ""),
        "pretrain GPT-2 124M": (f"onecard {published} gpt2 --length 1024 --batch 16", 60, "gpt2"),
        "LoRA 1B": (f"onecard {large} --lora-rank 16", 70, ""),
        "pretrain 1B, selective, 8-bit states": (f"onecard {large} {less}", 75, ""),
        "pretrain 1B, Trainer": (f"trainer {large}", 50, ""),
        "Qwen2.5 0.5B, pure bf16": (f"onecard {published} qwen2.5-0.5b {qwen}", 60, "qwen2.5-0.5b"),
        "Qwen2.5 1.5B, pure bf16": (f"onecard {published} qwen2.5-1.5b {qwen} --states 8bit", 60, "qwen2.5-1.5b"),
    }
    if memory_gib > 30:
        eight = "--length 2048 --batch 1 --precision pure_bf16 --lora-rank 16 --checkpointing full"
        made["Qwen3 8B, LoRA"] = (f"onecard {published} qwen3-8b {eight}", 75, "qwen3-8b")
    return made


def beside_the_card(made: dict[str, Any], card: Any, published: str) -> dict[str, Any]:
    """A measurement with the share of the card's peak (MFU) and what others published for it."""
    if card is None:
        return made
    peak = {"fp32": card.tf32_tflops, "float8": None}.get(made["precision"], card.fp16_tflops)
    if peak:
        made["peak_tflops"], made["peak_is"] = peak, card.source("fp16_tflops")
        made["model_flops_utilisation"] = (
            made["share_of_product_rate"] * made["product_flops_per_second"] / (peak * 1e12)
        )
    theirs = PUBLISHED.get(published, {}).get(card.name)
    if theirs:
        made |= {"published_tokens_per_second": theirs, "times_published": made["tokens_per_second"] / theirs}
    return made


def planner_error(made: dict[str, Any]) -> dict[str, float]:
    """How far the predicted peaks are from the measured ones, as a share of these: of tensors, and of the allocator."""
    pairs = {
        "allocated": ("predicted_allocated_bytes", "training_bytes"),
        "reserved": ("predicted_reserved_bytes", "reserved_bytes"),
    }
    return {name: made[predicted] / made[measured] - 1 for name, (predicted, measured) in pairs.items()}


# --- all of it ----------------------------------------------------------------------------------------------------


def process(command: list[str], seconds: float) -> dict[str, Any]:
    """The JSON line that a process prints last; what went wrong if there is none."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"fault": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"fault": done.stderr[-1500:]}
    made: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return made


def everything(device: str, tiny: bool) -> dict[str, Any]:
    """Every part within its time and that of all; correctness first."""
    from onecard.machine.cards import find_card

    began = time.monotonic()
    name = torch.cuda.get_device_name() if device == "cuda" else "none"
    card = find_card(name)
    memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if device == "cuda" else 0.0
    found: dict[str, Any] = {"machine": machine(), "card": name, "versions": artifact.versions(), "tiny": tiny}
    found |= {"correctness": {}, "speed": {}, "seconds": {}}
    parts: list[tuple[str, str, list[str], float, str]] = [
        ("correctness", key, [str(HERE / "gpu.py"), "--only", key, "--device", device, *["--tiny"] * tiny], 75, "")
        for key in CHECKS
    ]
    for key, (words, seconds, published) in speeds(tiny, memory_gib).items():
        parts.append(("speed", key, [str(HERE / "dense.py"), *words.split()], seconds, published))
    total = TOTAL_SECONDS * (3 if tiny else 1)
    for group, key, command, seconds, published in parts:
        left = total - (time.monotonic() - began)
        if left < 15:
            found[group][key] = {"left_out": "no time was left"}
            continue
        started = time.monotonic()
        made = process(command, min(seconds * (3 if tiny else 1), left))
        found["seconds"][key] = round(time.monotonic() - started, 1)
        found[group][key] = beside_the_card(made, card, published) if "tokens_per_second" in made else made
        if "predicted_allocated_bytes" in made and "reserved_bytes" in made:
            made["planner_error"] = planner_error(made)
        say(f"{key}: {shortly(made)} ({found['seconds'][key]} s)")
    found["seconds"]["all"] = round(time.monotonic() - began, 1)
    found["correct"] = all(
        "fault" not in part and all(case.get("correct", "left_out" in case) for case in part.values())
        for part in found["correctness"].values()
    )
    return found


def shortly(made: dict[str, Any]) -> str:
    """One line of progress."""
    if "fault" in made:
        return f"FAILED: {made['fault'].strip().splitlines()[-1][:160] if made['fault'].strip() else 'no word'}"
    if "tokens_per_second" in made:
        share = made.get("model_flops_utilisation", made["share_of_product_rate"])
        said = f"{made['tokens_per_second']:,.0f} tokens/s, {share:.0%}, {made['training_bytes'] / 2**30:.2f} GiB"
        errors = made.get("planner_error", {})
        return said + "".join(f", planner {name} {error:+.1%}" for name, error in errors.items())
    wrong = [key for key, case in made.items() if not case.get("correct", True)]
    return f"wrong: {'; '.join(wrong)}" if wrong else f"{len(made)} cases correct"


def main() -> int:
    """Run everything; 3 without a card, 1 if something is not correct."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether everything runs")
    parser.add_argument("--only", choices=list(CHECKS), help="one check, its JSON on stdout")
    parser.add_argument("--output", type=Path, default=HERE / "gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("No CUDA card answers: nothing to measure here.\n")
        return 3
    if arguments.device == "cuda":
        torch.set_float32_matmul_precision("high")  # as onecard trains
    if arguments.only:
        sys.stdout.write(json.dumps(CHECKS[arguments.only](arguments.device, arguments.tiny)) + "\n")
        return 0
    found = everything(arguments.device, arguments.tiny)
    artifact.write_json_atomically(arguments.output, found)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if found["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
