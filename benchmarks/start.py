"""From the start of the process to the first finished update of the 26M model, through the real command line.

`measure` starts `onecard pretrain` and waits for the first line of metrics.jsonl: once with an empty compiler cache,
then with a full one. `--probe` is what it starts once more to see where the time goes: the same verb in a process whose
stages are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measurement import say

PATIENCE_SECONDS = 600.0


def inputs(vocabulary: int) -> Path:
    """A folder with a small corpus (the help texts that come with Python) and its tokenizer, made once."""
    place = Path(tempfile.gettempdir()) / "onecard-benchmarks" / f"start-{vocabulary}"
    if (place / "tokenizer" / "tokenizer.json").exists():
        return place
    from pydoc_data.topics import topics

    from onecard import console
    from onecard.config import TokenizerTrainConfig
    from onecard.data.corpus import Document, write_corpus
    from onecard.tokenizer.train import train

    say("making a corpus and a tokenizer (once)")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    console.configure(json_output=True, quiet=True)
    documents = [
        Document(id=name, text=text, source="python", language="en", split="held_out" if i % 20 == 0 else "train")
        for i, (name, text) in enumerate(sorted(topics.items()))
    ]
    write_corpus(place / "corpus", documents)
    settings = TokenizerTrainConfig(corpus=place / "corpus", output=place / "tokenizer", vocabulary_size=vocabulary)
    train(settings)
    return place


def words(arguments: argparse.Namespace, place: Path, output: Path) -> list[str]:
    """The command line of the verb."""
    return [
        *("pretrain", str(place / "corpus"), "--tokenizer", str(place / "tokenizer"), "--output", str(output)),
        *("--size", arguments.size, "--max-length", str(arguments.length), "--batch-size", str(arguments.batch)),
        *("--gradient-accumulation-steps", "1", "--max-steps", "4", "--evaluate-every", "4", "--save-every", "4"),
    ]


def wait_for_first_update(command: list[str], output: Path, environment: dict[str, str]) -> float:
    """Seconds from the start of the process until its first update stands in metrics.jsonl; then it is stopped."""
    metrics = output / "metrics.jsonl"
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            while not (metrics.exists() and b'"step": 1' in metrics.read_bytes()):
                if process.poll() is not None or time.perf_counter() - started > PATIENCE_SECONDS:
                    said.seek(0)
                    raise RuntimeError(said.read().decode("utf-8", "replace")[-2000:])
                time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds with an empty cache, with a full one, and by stage."""
    place = inputs(arguments.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "compiled"
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
        found: list[float] = []
        for number in range(1 + arguments.pairs):
            output = Path(folder) / f"run-{number}"
            command = [str(Path(sys.executable).with_name("onecard")), *words(arguments, place, output)]
            found.append(wait_for_first_update(command, output, environment))
            say(f"start, {'full' if number else 'empty'} cache: {found[-1]:.1f} s")
        probe = [sys.executable, "-W", "ignore", __file__, "--probe", str(Path(folder) / "probe")]
        for name in ("size", "vocabulary", "length", "batch"):
            probe += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run(probe, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        stages = json.loads(done.stdout.strip().split("\n")[-1])
    return {"empty_cache": found[0], "full_cache": statistics.median(found[1:]), "stages": stages}


def probe(arguments: argparse.Namespace, output: Path) -> dict[str, float]:
    """Seconds of each stage up to the first update, in this process."""
    import psutil

    stages: dict[str, float] = {"Python": time.time() - psutil.Process().create_time()}

    @contextlib.contextmanager
    def stage(name: str) -> Any:
        started = time.perf_counter()
        yield
        stages[name] = stages.get(name, 0.0) + time.perf_counter() - started

    with stage("import torch"):
        import torch  # noqa: F401
    with stage("import transformers' Llama"):
        import transformers.models.llama.modeling_llama  # noqa: F401
    with stage("import the rest"):
        import onecard.train.pretrain as verb
        from onecard import cli
        from onecard.train import loop, session

    def timed(owner: Any, name: str, called: str) -> None:
        original = getattr(owner, name)

        def made(*positional: Any, **named: Any) -> Any:
            with stage(called):
                return original(*positional, **named)

        setattr(owner, name, made)

    timed(verb, "load_tokenizer", "tokenizer")
    timed(verb, "_store", "tokens")
    timed(verb, "_prompts", "tokens")
    timed(verb, "choose", "rate of products")
    for name in ("bigram_counts", "fit_bigram", "apply_start"):
        if hasattr(verb, name):
            timed(verb, name, "start from counts")
    timed(session, "_pack", "proof of packing")
    timed(session, "compile_layers", "compile (call)")
    timed(session, "_loop", "optimizer and loop")
    original, count = loop.Loop.update, [0]

    def update(self: Any, number: int) -> Any:
        count[0] += 1
        with stage("first update" if count[0] == 1 else "a later update"):
            made = original(self, number)
        if count[0] == 2:
            raise KeyboardInterrupt
        return made

    loop.Loop.update = update  # type: ignore[method-assign]
    train = session.train

    def built(task: Any) -> Any:
        build = task.build_model

        def timed_build() -> Any:
            with stage("model"):
                return build()

        task.build_model = timed_build
        return train(task)

    verb.train = built
    started = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt, SystemExit), contextlib.redirect_stdout(sys.stderr):
        cli.main([*words(arguments, inputs(arguments.vocabulary), output), "--quiet"])
    whole = time.perf_counter() - started
    steady = stages.pop("a later update", 0.0)
    first = stages.pop("first update", 0.0)
    imports = [name for name in stages if name.startswith(("Python", "import"))]
    known = sum(seconds for name, seconds in stages.items() if name not in imports)
    stages["other"] = whole - known - first - steady
    stages["first update: compiled layers from the cache"] = first - steady
    stages["first update: itself"] = steady
    return stages


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="26M")
    parser.add_argument("--vocabulary", type=int, default=6400)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3, help="starts with a full cache")
    parser.add_argument("--probe", type=Path, help="time the stages of one start that writes here")
    arguments = parser.parse_args()
    made = measure(arguments) if arguments.probe is None else probe(arguments, arguments.probe)
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
