"""`make bench`: what onecard does beside what its peers do, in one run on this machine; writes benchmarks/RESULTS.md.

Only ratios from one run mean much: engines alternate, medians over the pairs are shown, and the machine's rate of
matrix products is measured beside every figure. Each part replaces its own section of RESULTS.md and nothing else, so
that one can be measured again alone. A peer that is not installed is left out, and that is said.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measurement import machine, measure, median, say
from onecard import artifact

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
PEERS = ("accelerate", "trl", "peft", "datasets", "datatrove")
GIB = 2**30
Rows = dict[str, list[dict[str, Any]]]


def alternating(pairs: int, engines: dict[str, tuple[str, list[str]]]) -> Rows:
    """`pairs` measurements of each engine (its script and arguments), turn by turn; those that fail are left out."""
    found: Rows = {}
    for number in range(pairs):
        for name, (script, arguments) in list(engines.items()):
            try:
                made = measure(script, arguments)
            except RuntimeError as fault:
                say(f"{name} is left out: {fault}")
                del engines[name]
                found.pop(name, None)
                continue
            found.setdefault(name, []).append(made)
            say(
                f"{script} {number + 1}/{pairs} {name}: {made['tokens_per_second']:,.0f} tokens/s, "
                f"{made['training_bytes'] / GIB:.2f} GiB"
            )
    return found


def table(found: Rows, *, counted: str = "tokens/s") -> list[str]:
    """One line an engine; ratios are to each peer: medians of the pairs' own ratios."""
    lines = [
        f"| engine | {counted} | range | share of the product rate | memory of training | process in all | products |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for engine, rows in found.items():
        rates = [row["tokens_per_second"] for row in rows]
        lines.append(
            f"| {engine} | {median(rows, 'tokens_per_second'):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {median(rows, 'share_of_product_rate'):.0%} | {median(rows, 'training_bytes') / GIB:.2f} GiB "
            f"| {median(rows, 'peak_bytes') / GIB:.2f} GiB "
            f"| {median(rows, 'product_flops_per_second') / 1e9:,.0f} GFLOP/s |"
        )
    return lines


def ratios(found: Rows, ours: str, theirs: str) -> str:
    """How the one compares with the other, pair by pair."""
    if ours not in found or theirs not in found:
        return f"{theirs if ours in found else ours} is left out."
    pairs = list(zip(found[ours], found[theirs]))
    speed = median([{"x": a["tokens_per_second"] / b["tokens_per_second"]} for a, b in pairs], "x")
    memory = median([{"x": a["training_bytes"] / b["training_bytes"]} for a, b in pairs], "x")
    return f"{ours} / {theirs}: {speed:.2f} times the speed, {memory:.2f} times the memory of training."


def has(*packages: str) -> bool:
    """Whether all of them are installed."""
    return all(importlib.util.find_spec(package) for package in packages)


MISSING = "Peers are left out that are not installed: pip install -e '.[bench]'."


def dense(arguments: argparse.Namespace) -> list[str]:
    """26M Llama, vocabulary 6,400, 8 x 512 tokens an update: onecard and Hugging Face's Trainer, alternating."""
    size = (
        []
        if not arguments.tiny
        else [*["--size", "4M", "--vocabulary", "500", "--length", "64", "--batch", "2", "--updates", "3"]]
    )
    engines = {"onecard": ("dense.py", ["onecard", *size])}
    if has("accelerate"):
        engines["Trainer"] = ("dense.py", ["trainer", *size])
    found = alternating(arguments.pairs or 5, engines)
    return [
        "### Dense pretraining",
        "",
        f"Llama 26M, vocabulary 6,400, 8 x 512 tokens an update, AdamW, {precision_of(found)}; medians of "
        f"{pairs_of(found)} alternating pairs, each over 4 updates after 2. Trainer has its defaults.",
        "",
        *table(found),
        "",
        ratios(found, "onecard", "Trainer") if has("accelerate") else MISSING,
    ]


def sft(arguments: argparse.Namespace) -> list[str]:
    """Chats of natural lengths on SmolLM2-135M: onecard packed, TRL padded, TRL packed; LoRA, then all weights."""
    common = [word for path in arguments.rows for word in ("--rows", path)]
    if arguments.model_to_tune is not None:
        common += ["--model", str(arguments.model_to_tune)]
    if arguments.tiny:
        common += [*["--updates", "3", "--count", "60", "--batch", "4", "--no-compile"]]
    pairs = arguments.pairs or 3
    lines = [
        "### Fine-tuning on chats of natural lengths",
        "",
        f"SmolLM2-135M-Instruct, rows {', '.join(Path(row).name for row in arguments.rows) or 'of chatterbot-corpus'} "
        "up to 1,024 tokens, the same for all, answers learned; content tokens (padding left out) a second, medians "
        "over updates after the first two. TRL as people start it: batch 8, padded, gradient checkpointing (its "
        "default) and AdamW; with packing = True 2 rows an update, which hold as many tokens; onecard the same 2 rows.",
    ]
    for title, rank, count in (("LoRA, rank 16, all linear layers", "16", pairs), ("All weights", "0", -(-pairs // 2))):
        own = ["--lora-rank", rank, *common]
        engines = {"onecard": ("sft.py", ["onecard", *own])}
        if has("trl", "datasets", "peft"):
            engines |= {"TRL padded": ("sft.py", ["trl", *own]), "TRL packed": ("sft.py", ["trl-packed", *own])}
        found = alternating(count, engines)
        lines += [
            "",
            f"**{title}** ({precision_of(found)}, {pairs_of(found)} rounds)",
            "",
            *table(found, counted="content tokens/s"),
            "",
            *(
                [f"- {ratios(found, 'onecard', peer)}" for peer in ("TRL padded", "TRL packed")]
                if has("trl")
                else [MISSING]
            ),
        ]
    return lines


def dpo(arguments: argparse.Namespace) -> list[str]:
    """DPO with adapters on SmolLM2-135M: onecard and TRL's DPOTrainer, alternating."""
    own = [word for path in arguments.rows for word in ("--rows", path)]
    if arguments.model_to_tune is not None:
        own += ["--model", str(arguments.model_to_tune)]
    if arguments.tiny:
        own += [*["--updates", "3", "--count", "8", "--batch", "2", "--no-compile"]]
    engines = {"onecard": ("dpo.py", ["onecard", *own])}
    if has("trl", "datasets", "peft"):
        engines["TRL"] = ("dpo.py", ["trl", *own])
    found = alternating(arguments.pairs or 3, engines)
    return [
        "### Preferences",
        "",
        f"DPO, LoRA of rank 16 on SmolLM2-135M-Instruct, {precision_of(found)}; pairs of natural lengths up to 1,024 "
        f"tokens, the same for both; tokens of both conversations of a pair, padding left out, a second; medians of "
        f"{pairs_of(found)} rounds, over the updates after the first two. The reference counts in both. TRL as people "
        "start it: 4 pairs an update, padded, gradient checkpointing (its default).",
        "",
        *table(found, counted="content tokens/s"),
        "",
        ratios(found, "onecard", "TRL") if has("trl") else MISSING,
    ]


def memory(arguments: argparse.Namespace) -> list[str]:
    """137M Llama, 8 x 1,024 tokens an update: Trainer and several ways of onecard."""
    size = [] if not arguments.tiny else [*["--layers", "2", "--vocabulary", "500", "--length", "64", "--no-compile"]]
    small = ["--batch", "4", "--accumulation", "2"]
    engines = {"Trainer": ("memory.py", ["trainer", *size])} if has("accelerate") else {}
    engines |= {
        "onecard, 8 rows": ("memory.py", ["onecard", *size]),
        "onecard, 2 x 4 rows (auto)": ("memory.py", ["onecard", *small, *size]),
        "onecard, 2 x 4 rows, checkpointing, 8-bit AdamW": (
            "memory.py",
            ["onecard", *small, "--checkpointing", "full", "--states", "8bit", *size],
        ),
    }
    ours = [name for name in engines if name != "Trainer"]
    found = alternating(arguments.pairs or 1, engines)
    return [
        "### Memory of pretraining",
        "",
        f"Llama 137M (30 layers of 576, vocabulary 49,152, tied), 8 x 1,024 tokens an update, AdamW, "
        f"{precision_of(found)}; the update after the first. Memory of training is the peak beyond what the process "
        "held before its model was built.",
        "",
        *table(found),
        "",
        *([f"- {ratios(found, name, 'Trainer')}" for name in ours] if has("accelerate") else [MISSING]),
    ]


def start(arguments: argparse.Namespace) -> list[str]:
    """From the start of the process to the first finished update of the 26M model, by the command line."""
    words = [*["--size", "4M", "--vocabulary", "1000", "--length", "64", "--batch", "2"]] if arguments.tiny else []
    made = measure("start.py", [*words, "--pairs", str(arguments.pairs or 3)])
    stages = [f"| {name} | {seconds:.2f} |" for name, seconds in made["stages"].items()]
    return [
        "### The first update",
        "",
        f"`onecard pretrain`, 26M, 8 x 512 tokens an update, a corpus of 0.5 MB: **{made['full_cache']:.1f} s** from "
        f"the start of the process to the first finished update with a full compiler cache, {made['empty_cache']:.1f} "
        "s with an empty one. Where the time goes, in one more start:",
        "",
        "| stage | seconds |",
        "| --- | ---: |",
        *stages,
    ]


def precision_of(found: Rows) -> str:
    """The number format of the measurements."""
    return ", ".join(sorted({row["precision"] for rows in found.values() for row in rows})) or "nothing measured"


def pairs_of(found: Rows) -> int:
    """How many measurements each engine has."""
    return min((len(rows) for rows in found.values()), default=0)


def clean(arguments: argparse.Namespace) -> list[str]:
    """Cleaning with one worker and two, beside datatrove."""
    import clean as cleaning

    return cleaning.part(arguments.tiny)


def serve(arguments: argparse.Namespace) -> list[str]:
    """Tokens a second of one answer at a time and of eight at once."""
    import serve as serving

    model = arguments.model
    if not model.exists():
        raise FileNotFoundError(f"{model} (make quickstart makes it)")
    llama = (arguments.llama, arguments.gguf.resolve()) if arguments.llama and arguments.gguf else None
    return serving.part(model, arguments.pairs or 3, llama)


def speeds(_: argparse.Namespace) -> list[str]:
    """The planner's speed beside measured ones; nothing is measured."""
    import speeds as planned

    return planned.table()


def planner(_: argparse.Namespace) -> list[str]:
    """The planner's memory beside what the profiler counts."""
    from planner import table as compared

    return compared(measure("planner.py", [])["rows"])


def published(_: argparse.Namespace) -> list[str]:
    """The planner's memory beside what others measured on cards; nothing is measured."""
    import published as others
    from onecard.train.forecast import memory as forecast

    results = list(others.compare(forecast))
    return ["### Memory of the planner beside published measurements", "", *others.table(results)]


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "dense": dense,
    "sft": sft,
    "dpo": dpo,
    "memory": memory,
    "start": start,
    "clean": clean,
    "serve": serve,
    "speeds": speeds,
    "published": published,
    "planner": planner,
}


def replaced(text: str, part: str, lines: list[str]) -> str:
    """RESULTS.md with the section of a part replaced, or put before the end of the measurements if it is new."""
    begin, end, last = f"<!-- {part} begin -->", f"<!-- {part} end -->", "<!-- make bench end -->"
    section = "\n".join([begin, *lines, end])
    if begin in text:
        before, _, rest = text.partition(begin)
        return before + section + rest.partition(end)[2]
    if last not in text:
        text = text.rstrip("\n") + f"\n\n<!-- make bench begin -->\n{last}\n"
    before, _, after = text.partition(last)
    return f"{before}{section}\n\n{last}{after}"


def versions() -> str:
    """Of onecard, its engine, and the peers that are here."""
    found = dict(artifact.versions())
    found |= {name: importlib.metadata.version(name) for name in PEERS if has(name)}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def publish(part: str, lines: list[str], results: Path | None, started: float) -> None:
    """Print a section with the machine and the time it took, and put it in its place in the file of results."""
    spent = time.perf_counter() - started
    where = f"{machine()}; {platform.system()}; {versions()}; measured in {spent / 60:.1f} min."
    lines = [*lines, "", f"<sub>{where}</sub>"]
    if results is not None:
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        artifact.write_text_atomically(results, replaced(text, part, lines))
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def main() -> int:
    """Run the parts asked for; each replaces its section of RESULTS.md as soon as it is measured. 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, default=0, help="rounds of a part (0: its own number)")
    parser.add_argument("--rows", action="append", default=[], help="chats to fine-tune on: a file or folder")
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/finetune"), help="what is served")
    parser.add_argument("--llama", type=Path, help="a folder with node-llama-cpp (npm), to be served beside")
    parser.add_argument("--gguf", type=Path, help="the file that it reads")
    parser.add_argument("--model-to-tune", type=Path, help="a chat model's directory, instead of SmolLM2-135M")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: whether everything runs, not how fast")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file whose sections are replaced")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    failed = False
    for part in arguments.parts.split(","):
        started = time.perf_counter()
        try:
            lines = PARTS[part](arguments)
        except Exception:  # noqa: BLE001 (one part that fails does not lose the others)
            say(f"{part} failed:\n{traceback.format_exc()}")
            failed = True
            continue
        publish(part, lines, arguments.results, started)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
