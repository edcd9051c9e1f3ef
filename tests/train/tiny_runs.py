"""Runs of a tiny model that take a second, in this process or in a new one that can be stopped at a chosen place."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from misfortunes import Misfortune, befall

if TYPE_CHECKING:
    import pytest

    from onecard.config import PretrainConfig
    from onecard.train.loop import Loop

# Imported once by the server that new processes are forked from.
PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "pyarrow.parquet",
    "matplotlib.pyplot",
    "onecard.config",
    "onecard.tokenizer.train",
    "onecard.train.pretrain",
    "onecard.train.finetune",
    "onecard.train.align",
    __name__,
]
SIZE = "tiny"
MIB = 1 << 20


class Stop(NamedTuple):
    """Send `number` to the own process when update `step` (from 1) reaches `place`."""

    place: str  # update, evaluate, save (before its manifest), saved, model (likewise), finish (before the run's)
    step: int
    number: int
    times: int = 1


def add_tiny_size() -> None:
    """Make the size `tiny` known in this process."""
    from onecard.model import presets

    presets.PRESETS[SIZE] = presets.Preset(SIZE, layers=2, width=32, heads=2, key_value_heads=1)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Make runs of this process start at once: the size `tiny`, no figures, no products measured, no forecast."""
    from onecard.model import presets

    patch.setitem(presets.PRESETS, SIZE, presets.Preset(SIZE, layers=2, width=32, heads=2, key_value_heads=1))
    patch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    patch.setattr("onecard.train.precision.matrix_rate", lambda *_: 1e9)
    patch.setattr("onecard.train.precision.known", dict)
    patch.setattr("onecard.train.foresight.forecast", lambda: foretold)


def foretold(_: Any) -> Any:
    """What a run of the tiny size is said to hold, without looking."""
    from onecard.plan.job import Memory

    return Memory(MIB, MIB, 0, {"parameters": MIB})


def tiny_pretrain(folder: Path, tokenizer: Path, output: Path, **changes: Any) -> PretrainConfig:
    """The settings of a run on the corpus in `folder`, with Muon from random weights where nothing else is said."""
    from onecard.config import PretrainConfig
    from onecard.settings import build

    plain = {"start": "random", "optimizer": "muon"}
    return build(PretrainConfig, pretrain_settings(folder, tokenizer, **plain | changes) | {"output": str(output)})


def during(patch: pytest.MonkeyPatch, step: int, act: Callable[[Loop], None]) -> None:
    """Do something while update `step` (from 1) is computed, whenever it is."""
    from onecard.train.loop import Loop

    original = Loop.update

    def update(self: Loop, number: int) -> Any:
        result = original(self, number)
        if self.step == step - 1:
            act(self)
        return result

    patch.setattr(Loop, "update", update)


def cut(loop: Loop) -> None:
    """What `during` can do: end the run without a word."""
    raise RuntimeError("power cut")


def pretrain_settings(folder: Path, tokenizer: Path, output: str = "run", **changes: Any) -> dict[str, Any]:
    """12 updates of two micro-batches with evaluations and checkpoints between them."""
    settings: dict[str, Any] = {
        "corpus": str(folder / "corpus"),
        "tokenizer": str(tokenizer),
        "output": str(folder / output),
        "size": SIZE,
        "max_length": 32,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "evaluate_every": 4,
        "save_every": 3,
        "compile": False,
        "precision": "fp32",
        "warmup_ratio": 0.4,
    }
    return settings | changes


def write_corpus(folder: Path, *, documents: int = 30, held_out: int = 4) -> Path:
    """Short English and Chinese documents of two sources; the last `held_out` are kept back."""
    from onecard.data import corpus

    texts = ["The quick brown fox jumps over the lazy dog. ", "机器学习模型需要大量高质量的数据才能取得好的效果。"]
    made = [
        corpus.Document(
            id=str(i),
            text=f"{i} " + texts[i % 2] * (1 + i % 3),
            source=("poems", "news")[i % 2],
            language=("en", "zh")[i % 2],
            split="train" if i < documents - held_out else "held_out",
        )
        for i in range(documents)
    ]
    corpus.write_corpus(folder / "corpus", made)
    return folder / "corpus"


def _arm(stop: Stop) -> None:
    """Wrap the functions of the loop so that the process stops itself at one place."""
    from onecard import artifact
    from onecard.train import directory, loop

    def fire() -> None:
        for _ in range(stop.times):
            os.kill(os.getpid(), stop.number)

    def wrapped(owner: Any, name: str, due: Callable[..., bool], *, after: bool = False) -> None:
        original = getattr(owner, name)

        def made(*arguments: Any, **settings: Any) -> Any:
            if due(*arguments) and not after:
                fire()
            result = original(*arguments, **settings)
            if due(*arguments) and after:
                fire()
            return result

        setattr(owner, name, made)

    running = {"run": False}
    wrapped(loop.Loop, "run", lambda *_: running.update(run=True) or False)
    at = stop.step
    if stop.place == "update":
        wrapped(loop.Loop, "_loss", lambda self, *_: running["run"] and self.step == at - 1)
    elif stop.place == "evaluate":
        wrapped(loop.Loop, "evaluate", lambda self: self.step == at)
    elif stop.place == "save":
        wrapped(
            artifact,
            "write_manifest",
            lambda directory, kind, *_: kind == "checkpoint" and f"{at:08d}" in str(directory),
        )
    elif stop.place == "model":
        wrapped(artifact, "write_manifest", lambda directory, kind, *_: kind == "model")
    elif stop.place == "saved":
        wrapped(loop.Loop, "save", lambda self, *_: self.step == at, after=True)
    else:
        assert stop.place == "finish"
        wrapped(directory.RunDirectory, "finish", lambda *_: True)


def _enter(verb: str, settings: dict[str, Any], stop: Stop | None, errors: str, misfortune: Misfortune | None) -> None:
    from onecard import cli, config, report
    from onecard.train import finetune, foresight, precision, pretrain, session

    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    add_tiny_size()
    report.Page.figure = lambda *_, **__: None  # type: ignore[method-assign]  # drawing is half of the time
    precision.matrix_rate = lambda *_: 1e9
    precision.known = dict
    foresight.forecast = lambda: foretold
    if stop is not None:
        _arm(stop)
    if stop is not None or misfortune is not None:
        session._time_updates = lambda *_: 0.01  # only the undisturbed run measures: it must leave no trace
    kinds = {
        "pretrain": (config.PretrainConfig, pretrain.pretrain),
        "finetune": (config.FinetuneConfig, finetune.finetune),
    }
    kind, function = kinds[verb]
    # What `cli` does with the answer and the errors, with settings instead of flags.
    cli.VERBS["tiny"] = cli.VerbEntry("tiny_runs:entered", kind.__name__, "", "")
    global entered
    entered = function
    flags = [word for key, value in settings.items() for word in _flag(key, value)]
    watch = befall(misfortune, settings["output"]) if misfortune is not None else None
    status = cli.main(["tiny", *flags, "--quiet"])
    if watch is not None and watch.misfortune.count_into:
        Path(watch.misfortune.count_into).write_text(str(watch.count))
    sys.exit(status)


entered: Any = None


def _flag(key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-")
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-")]
    if key in ("corpus", "model"):
        return [value]
    return [name, *map(str, value if isinstance(value, list) else [value])]


class Process:
    """A run in a new process."""

    def __init__(
        self,
        verb: str,
        settings: dict[str, Any],
        stop: Stop | None = None,
        *,
        errors: Path | None = None,
        misfortune: Misfortune | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._errors = errors or Path(settings["output"] + ".stderr")
        self._errors.unlink(missing_ok=True)
        self.process = context.Process(target=_enter, args=(verb, settings, stop, str(self._errors), misfortune))
        self.process.start()

    def wait(self) -> tuple[int, str]:
        """The exit status (negative: the signal that ended it) and what stood on stderr."""
        self.process.join(120)
        assert self.process.exitcode is not None, "the run hangs"
        return self.process.exitcode, self._errors.read_text() if self._errors.exists() else ""

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()


def run(verb: str, settings: dict[str, Any], stop: Stop | None = None) -> tuple[int, str]:
    """Run in a new process to its end."""
    return Process(verb, settings, stop).wait()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(run_directory: Path) -> list[int]:
    return [row["step"] for row in lines(run_directory / "metrics.jsonl")]


def events(run_directory: Path, kind: str) -> Iterator[dict[str, Any]]:
    return (row for row in lines(run_directory / "events.jsonl") if row["event"] == kind)


def weights(run_directory: Path) -> bytes:
    return (run_directory / "model" / "model.safetensors").read_bytes()
