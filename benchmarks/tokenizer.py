"""Tokenising a mixed corpus into a store beside the tokenizers library's own encode_batch on the same texts.

Both take the same documents (Chinese and English, of natural lengths, from what is installed or given) with the same
tokenizer, in turn, in one process: the library encodes a list of texts in memory to ids; onecard encodes the documents
as they come and writes the store. Also says what one line of 100 MB needs. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import say

LINE = """
import resource, sys, time
from pathlib import Path
import numpy as np
from onecard.model.load import load_tokenizer
from onecard.tokenizer.stream import encode_arrays
tokenizer = load_tokenizer(Path(sys.argv[1]))
seed = Path(sys.argv[2]).read_text(encoding="utf-8").replace("\\n", "")
text = (seed * (int(sys.argv[3]) // len(seed.encode()) + 1))
started = time.perf_counter()
ids = encode_arrays(tokenizer, [text])[0]
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print("FOUND", len(text.encode()), len(ids), peak, round(time.perf_counter() - started, 1))
"""


def texts(files: list[Path], most_bytes: int) -> list[str]:
    """Documents of about 2,000 characters from the files in turn, repeated in shifted cuts until there are enough."""
    whole = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    made: list[str] = []
    size = turn = 0
    while size < most_bytes:
        for text in whole:
            for start in range(turn * 37 % 2000, len(text), 2000):
                made.append(text[start : start + 2000])
                size += len(made[-1].encode())
                if size >= most_bytes:
                    return made
        turn += 1
    return made


def ours(tokenizer: Any, documents: list[str], folder: Path) -> tuple[float, int]:
    """Seconds from documents to a finished store, and its tokens."""
    from onecard.data.tokens import write_store
    from onecard.model.load import vocabulary_rows
    from onecard.tokenizer.stream import encode_stream

    started = time.perf_counter()
    pairs: Iterator[tuple[str, str]] = (("mixed", text) for text in documents)
    encoded = encode_stream(tokenizer, pairs)
    store = write_store(folder / "store", encoded, vocabulary=vocabulary_rows(tokenizer), tokenizer_hash="")
    return time.perf_counter() - started, store.count


def library(tokenizer: Any, documents: list[str]) -> tuple[float, int]:
    """Seconds that encode_batch takes for the list, ids read, and their number with a beginning and an end each."""
    backend = tokenizer.backend_tokenizer
    started = time.perf_counter()
    count = sum(len(found.ids) for found in backend.encode_batch(documents, add_special_tokens=False))
    return time.perf_counter() - started, count + 2 * len(documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("runs/quickstart/tokenizer"))
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files, Chinese and English")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--line-megabytes", type=int, default=100, help="0: leave the long line out")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from onecard.model.load import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    documents = texts(arguments.text, arguments.megabytes * 10**6)
    size = sum(len(text.encode()) for text in documents)
    say(f"{len(documents):,} documents, {size / 1e6:.1f} MB")
    rates: dict[str, list[float]] = {"onecard": [], "tokenizers": []}
    with tempfile.TemporaryDirectory() as folder:
        library(tokenizer, documents[:200])  # caches of both are full from here on
        for pair in range(arguments.pairs):
            seconds_theirs, count_theirs = library(tokenizer, documents)
            seconds_ours, count_ours = ours(tokenizer, documents, Path(folder) / str(pair))
            assert count_ours == count_theirs, "both give the same ids"
            rates["tokenizers"].append(size / seconds_theirs)
            rates["onecard"].append(size / seconds_ours)
            say(f"tokenizers {size / seconds_theirs / 1e6:.2f} MB/s, onecard {size / seconds_ours / 1e6:.2f} MB/s")
    found: dict[str, Any] = {name: round(statistics.median(values)) for name, values in rates.items()}
    ratios = [a / b for a, b in zip(rates["onecard"], rates["tokenizers"])]
    found |= {"ratio": round(statistics.median(ratios), 3), "bytes": size, "tokens": count_ours}
    if arguments.line_megabytes:
        words = [str(arguments.tokenizer), str(arguments.text[0]), str(arguments.line_megabytes * 10**6)]
        ran = subprocess.run([sys.executable, "-c", LINE, *words], capture_output=True, text=True, check=True)
        line_bytes, tokens, kibibytes, seconds = ran.stdout.split("FOUND")[1].split()
        found["line"] = {
            "bytes": int(line_bytes),
            "tokens": int(tokens),
            "peak_bytes": int(kibibytes) * 1024,
            "seconds": float(seconds),
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
