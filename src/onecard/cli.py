"""`onecard VERB ...`: a table of verbs by import string, and the only place that catches OnecardError.

Nothing heavy is imported until a verb runs: `onecard --help` needs no pydantic, `onecard VERB --help` no torch.
A verb's function takes its configuration and returns the JSON document that `--json` prints.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onecard
from onecard import console
from onecard.errors import ConfigError, OnecardError, of_the_system


@dataclass(frozen=True)
class VerbEntry:
    """Where a verb lives: its function, its configuration in onecard.config, its section of a recipe, one phrase."""

    function: str
    configuration: str
    section: str
    summary: str


VERBS: dict[str, VerbEntry] = {
    "new": VerbEntry("onecard.project:new", "NewConfig", "", "lay out a project of your own"),
    "doctor": VerbEntry("onecard.machine.doctor:doctor", "DoctorConfig", "", "look at this machine"),
    "plan": VerbEntry("onecard.train.plan:plan", "PlanConfig", "", "say what fits and how long it takes"),
    "run": VerbEntry("onecard.pipeline:run", "RunConfig", "", "walk a recipe from text to a served model"),
    "clean": VerbEntry("onecard.data.clean:clean", "CleanConfig", "clean", "text in any encoding becomes a corpus"),
    "inspect": VerbEntry(
        "onecard.data.inspect:inspect", "InspectConfig", "", "page through the rows of a corpus, kept and rejected"
    ),
    "tokenizer train": VerbEntry(
        "onecard.tokenizer.train:train", "TokenizerTrainConfig", "tokenizer", "train a tokenizer on a corpus"
    ),
    "tokenizer extend": VerbEntry(
        "onecard.model.extend:extend", "TokenizerExtendConfig", "", "add terms to the tokenizer of a model"
    ),
    "tokenizer report": VerbEntry(
        "onecard.model.tokenizer_report:report", "TokenizerReportConfig", "", "compare tokenizers on your text"
    ),
    "pretrain": VerbEntry(
        "onecard.train.pretrain:pretrain", "PretrainConfig", "pretrain", "train a language model from nothing"
    ),
    "finetune": VerbEntry("onecard.train.finetune:finetune", "FinetuneConfig", "finetune", "teach a model to answer"),
    "preview": VerbEntry(
        "onecard.train.preview:preview", "FinetuneConfig", "finetune", "show which tokens a fine-tuning would learn"
    ),
    "distill": VerbEntry(
        "onecard.train.distill:distill", "DistillConfig", "distill", "teach a small model what a larger one would say"
    ),
    "align": VerbEntry("onecard.train.align:align", "AlignConfig", "align", "teach a model which answers are better"),
    "classify": VerbEntry(
        "onecard.train.classify:classify", "ClassifyConfig", "classify", "teach a model to name the class of a text"
    ),
    "predict": VerbEntry("onecard.evaluate.predict:predict", "PredictConfig", "predict", "name the classes of texts"),
    "find-lr pretrain": VerbEntry(
        "onecard.train.find_lr:pretrain", "FindPretrainRateConfig", "pretrain", "which learning rate to pretrain with"
    ),
    "find-lr finetune": VerbEntry(
        "onecard.train.find_lr:finetune", "FindFinetuneRateConfig", "finetune", "which learning rate to fine-tune with"
    ),
    "status": VerbEntry("onecard.train.status:status", "StatusConfig", "", "say how a run stands"),
    "pause": VerbEntry("onecard.train.reach:pause", "PauseConfig", "", "have a run save and free the device"),
    "resume": VerbEntry("onecard.train.reach:resume", "ResumeConfig", "", "go on with a run that was stopped"),
    "set": VerbEntry("onecard.train.reach:change", "SetConfig", "", "change settings of a run while it goes on"),
    "evaluate": VerbEntry(
        "onecard.evaluate.evaluate:evaluate", "EvaluateConfig", "evaluate", "measure a model on text it has not seen"
    ),
    "compare": VerbEntry(
        "onecard.evaluate.compare:compare", "CompareConfig", "compare", "say whether a model is better than another"
    ),
    "bench memory": VerbEntry(
        "onecard.train.memory_bench:memory", "MemoryBenchConfig", "", "measure each way of saving memory"
    ),
    "quantize": VerbEntry(
        "onecard.compress.quantize:quantize", "QuantizeConfig", "quantize", "make weights integers of 4 or 8 bits"
    ),
    "prune": VerbEntry(
        "onecard.compress.prune:prune", "PruneConfig", "prune", "leave out layers, heads, channels or weights"
    ),
    "merge": VerbEntry(
        "onecard.compress.merge:merge", "MergeConfig", "merge", "add adapters, or models of one base, to the base"
    ),
    "export": VerbEntry(
        "onecard.compress.export:export",
        "ExportConfig",
        "export",
        "write a model for llama.cpp, Ollama, vLLM",
    ),
    "card": VerbEntry("onecard.compress.card:card", "CardConfig", "", "write a model card from what is recorded"),
    "diagnose": VerbEntry(
        "onecard.serve.diagnose:diagnose", "DiagnoseConfig", "", "find out why answers go round in circles"
    ),
    "chat": VerbEntry("onecard.serve.chat:chat", "ChatConfig", "", "talk to a model in the terminal"),
    "serve": VerbEntry(
        "onecard.serve.server:serve", "ServeConfig", "", "serve a model over an OpenAI-compatible HTTP interface"
    ),
}


def _overview() -> str:
    width = max(len(name) for name in VERBS)
    lines = [f"onecard {onecard.__version__}: your text, your card, your model.", "", "usage: onecard VERB ...", ""]
    lines += [f"  {name:<{width}}  {entry.summary}" for name, entry in VERBS.items()]
    return "\n".join(
        [
            *lines,
            "",
            "`onecard VERB --help` lists a verb's settings. `onecard run recipes/quickstart.toml` shows the whole way.",
        ]
    )


def _find_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb (one or two words) and the arguments after it."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in VERBS:
            return name, list(words[length:])
    groups = [name for name in VERBS if name.split()[0] == words[0]]
    if groups:
        raise ConfigError(f"`onecard {words[0]}` needs a second word.", f"One of: {', '.join(groups)}.")
    from onecard.settings import nearest

    hint = nearest(words[0], VERBS).strip()
    raise ConfigError(f"There is no verb {words[0]}.", hint or "See onecard --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status (see the contracts in docs/en/architecture.md)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _end_like_interrupts()
    # Nothing is fetched at run time: the hub client is told so before it can be imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Compiled code is kept where only its owner writes; torch would take a folder of a known name in /tmp, and does so
    # as soon as it is imported.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (pathlib is not imported yet)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(cache, "onecard", "inductor"))  # noqa: PTH118
    console.configure(json_output="--json" in words, quiet="--quiet" in words)
    try:
        status = _run(words)
    except OnecardError as fault:
        if "--json" in words and fault.document is not None:
            console.document(fault.document)
        status = _fail(fault, debug="--debug" in words)
    except KeyboardInterrupt:
        console.failure("Interrupted.", "Run the same command again; finished stages and checkpoints are kept.")
        status = 130
    except BrokenPipeError:
        console.reader_gone(sys.stdout)
        status = 0
    except OSError as fault:
        mendable = of_the_system(fault)
        if mendable is None:
            raise
        status = _fail(mendable, debug="--debug" in words)
    console.flush()
    return status


def _end_like_interrupts() -> None:
    """A program told to end, or whose terminal was closed, ends as after Ctrl-C: by its own words, with status 130."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # one that is ignored (nohup) stays ignored
            signal.signal(number, signal.default_int_handler)


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview() + "\n")
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"onecard {onecard.__version__}\n")
        return 0
    name, rest = _find_verb(words)
    entry = VERBS[name]
    from onecard import config, flags

    kind = getattr(config, entry.configuration)
    parsed = vars(flags.parser(kind, f"onecard {name}", entry.section).parse_args(flags.hyphenate(rest)))
    settings = flags.from_arguments(kind, parsed, entry.section)
    module, function = entry.function.split(":")
    if getattr(settings, "detach", False):
        return _detach(words, settings)
    answer = getattr(importlib.import_module(module), function)(settings)
    if "--json" in words:
        console.document(answer)
    return 0


def _detach(words: Sequence[str], settings: Any) -> int:
    """Go on in the background, once the settings are known to be right."""
    from onecard.train import detach

    if hasattr(settings, "recipe"):
        from onecard.pipeline import output_of

        place = output_of(settings)
    else:
        place = settings.run if hasattr(settings, "run") else settings.output
    answer = detach.begin(words, place)
    if "--json" in words:
        console.document(answer)
    return 0


def _fail(fault: OnecardError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(fault)
    console.failure(fault.what, fault.remedy)
    return fault.exit_status


if __name__ == "__main__":
    sys.exit(main())
