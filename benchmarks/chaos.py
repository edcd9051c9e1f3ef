"""Runs killed at random moments, in saving above all, and resumed to the end: is the model the same, bit for bit?

Each run is a tiny pretraining in processes of its own. One misfortune after another befalls it: SIGKILL before or
shortly after a random operation on a file of its checkpoints, SIGKILL at any time, a disk that is full from some
moment on, a truncated or a flipped newest checkpoint, a clock set back (and file times that say nothing). Then it is
let run to its end, and its weights and losses are compared with those of a run that nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "train"))

from misfortunes import Misfortune
from tiny_runs import Process, lines, pretrain_settings, weights, write_corpus

from onecard.train import checkpoint

# Settings by name, and the kinds of misfortune with how often each comes.
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adamw, the best kept": {"optimizer": "adamw", "keep_last": 1, "keep_best": True, "evaluate_every": 2},
    "every one kept": {"optimizer": "adamw", "save_every": 1, "keep_every": 2, "gradient_accumulation_steps": 3},
}
KINDS = {"killed while saving": 8, "killed at any time": 2, "full disk": 2, "killed, then truncated": 1}
KINDS |= {"killed, then a bit flipped": 1, "killed, then the clock set back": 1}
HOLDS = (1, 2, 3)
YEAR_SECONDS = 365 * 86400


class Whole(NamedTuple):
    """An undisturbed run: its directory, settings, operations on files of checkpoints, and seconds."""

    directory: Path
    settings: dict[str, Any]
    operations: int
    seconds: float


class Outcome(NamedTuple):
    """What befell a run, and what is wrong with its end ("" if nothing is)."""

    variant: str
    befell: list[str]
    wrong: str


def make_tokenizer(folder: Path) -> Path:
    """Of 384 entries, from the corpus of the runs."""
    from onecard.config import TokenizerTrainConfig
    from onecard.tokenizer.train import train

    train(TokenizerTrainConfig(corpus=folder / "corpus", output=folder / "tokenizer", vocabulary_size=384))
    return folder / "tokenizer"


def undisturbed(folder: Path, tokenizer: Path, name: str) -> Whole:
    """Run a variant in peace."""
    output = f"whole-{list(VARIANTS).index(name)}"
    settings = pretrain_settings(folder, tokenizer, output, **VARIANTS[name])
    counted = folder / f"{output}.count"
    started = time.monotonic()
    count = Misfortune(where="checkpoints/", count_into=str(counted))
    status, errors = Process("pretrain", settings, misfortune=count).wait()
    assert (status, errors) == (0, ""), errors
    return Whole(folder / output, settings, int(counted.read_text()), time.monotonic() - started)


def disturb(whole: Whole, output: Path, chance: random.Random) -> tuple[list[str], str]:
    """Run it beside the undisturbed one with one to three misfortunes; what befell it, and what is wrong."""
    settings = whole.settings | {"output": str(output)}
    befell: list[str] = []
    clock = 0.0
    for _ in range(chance.choice(HOLDS)):
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        status, errors = _one(whole, settings, kind, clock, chance)
        if status == 0:
            break
        befell.append(kind)
        wrong = _check_failed(kind, status, errors, output)
        if wrong:
            return befell, wrong
        if (output / "onecard.json").exists():
            break  # it was killed after its end
        if "truncated" in kind or "flipped" in kind:
            befell[-1] += _damage(output, kind, chance)
        if "clock" in kind:
            clock = YEAR_SECONDS
            for file in output.rglob("*"):  # times of files tell nothing any more
                os.utime(file, (chance.uniform(0, 2e9),) * 2)
    if not (output / "onecard.json").exists():
        status, errors = Process("pretrain", settings, misfortune=Misfortune(clock_seconds=clock)).wait()
        if status != 0:
            return befell, f"ended with {status}: {errors}"
    return befell, compare(whole.directory, output)


def _one(whole: Whole, settings: dict[str, Any], kind: str, clock: float, chance: random.Random) -> tuple[int, str]:
    if kind == "killed at any time":
        process = Process("pretrain", settings, misfortune=Misfortune(clock_seconds=clock))
        process.process.join(chance.uniform(0.1, 1.1) * whole.seconds)
        process.kill()
        return process.wait()
    # Fewer operations are left than an undisturbed run has.
    done = max([step for step, _ in checkpoint.found(Path(settings["output"]))], default=0) / settings["max_steps"]
    made = Misfortune(
        "full" if kind == "full disk" else "kill",
        operation=chance.randint(1, max(1, round(whole.operations * (1 - done)))),
        where="checkpoints/",
        delay_seconds=chance.choice([0.0, chance.uniform(0, 0.005)]),
        clock_seconds=clock,
    )
    return Process("pretrain", settings, misfortune=made).wait()


def _check_failed(kind: str, status: int, errors: str, output: Path) -> str:
    """A kill says nothing; a full disk says so, ends with status 2 and leaves nothing that is half written."""
    if kind != "full disk":
        return "" if status == -9 else f"ended with {status}: {errors}"
    if status != 2 or "disk is full" not in errors:
        return f"on a full disk ended with {status}: {errors}"
    half = [path.name for path in (output / "checkpoints").glob(".*")]
    return f"on a full disk left {half}" if half else ""


def _damage(output: Path, kind: str, chance: random.Random) -> str:
    """Damage the newest checkpoint, as a failing disk would."""
    entries = checkpoint.found(output)
    if not entries:
        return " (none was there)"
    file = chance.choice(sorted(entries[-1][1].iterdir()))
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if "truncated" in kind:
        del data[at:]
    else:
        data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return f" ({file.name} of {entries[-1][0]})"


def compare(whole: Path, other: Path) -> str:
    """What differs between the ends of two runs; "" if nothing does."""
    if weights(whole) != weights(other):
        return "other weights"
    first, second = (
        [(row["step"], row["tokens"], row["loss"], row.get("held_out_loss")) for row in lines(path / "metrics.jsonl")]
        for path in (whole, other)
    )
    if first != second:
        return "other losses"
    # A kill after the manifest may leave the file of the lock, but nobody holds it.
    left = [path.name for path in other.rglob(".*") if path.name != ".lock"]
    return f"left {left}" if left else ""


def run(count: int, seed: int, folder: Path, tokenizer: Path, names: list[str]) -> list[Outcome]:
    """So many runs of the variants in turn; what went wrong stays in `folder`."""
    wholes = {name: undisturbed(folder, tokenizer, name) for name in names}
    made = []
    for number in range(count):
        name = names[number % len(names)]
        chance = random.Random(f"{seed} {number}")
        output = folder / f"run-{number:03d}"
        befell, wrong = disturb(wholes[name], output, chance)
        made.append(Outcome(name, befell, wrong))
        if not wrong:
            shutil.rmtree(output)
        say(f"{number + 1:4d}  {name}: {', '.join(befell) or 'nothing'}: {wrong or 'the same model'}")
    return made


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what each run says at its end
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    started = time.monotonic()
    write_corpus(folder)
    outcomes = run(arguments.runs, arguments.seed, folder, make_tokenizer(folder), list(VARIANTS))
    good = sum(not outcome.wrong for outcome in outcomes)
    befell = Counter(kind.partition(" (")[0] for outcome in outcomes for kind in outcome.befell)
    told = ", ".join(f"{number} x {kind}" for kind, number in befell.most_common())
    answer.write(
        f"{good} of {len(outcomes)} runs ended in the same model, bit for bit ({told}; "
        f"{time.monotonic() - started:.0f} s).\n"
    )
    if good < len(outcomes):
        answer.write(f"What is left of the others: {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
