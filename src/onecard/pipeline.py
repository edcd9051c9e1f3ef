"""`run` walks a recipe from raw text to a served model.

A recipe is a TOML file with a table a stage: [clean], [tokenizer], [pretrain], [finetune], [align], [classify],
[evaluate], [compare], [ask]. Stages that are not in it are left out. Each stage writes one directory below the recipe's
output and takes what the stages before it wrote, unless the recipe names something else. A stage is skipped when its
settings and the content of its inputs are what they were (wherever they lie); what an earlier run of it left is moved
to previous/, where the newest of each stage are kept; a directory that onecard did not make is left where it is.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onecard
from onecard import artifact, console
from onecard.config import (
    AlignConfig,
    AskConfig,
    ClassifyConfig,
    CleanConfig,
    CompareConfig,
    EvaluateConfig,
    FinetuneConfig,
    PretrainConfig,
    RunConfig,
    TokenizerTrainConfig,
)
from onecard.errors import ArtifactError, ConfigError
from onecard.model.presets import preset
from onecard.settings import Settings, Source, build, nearest, read_toml, relative_to

STATE = "pipeline.json"
# What the walk itself decides: not settings of a recipe's stages.
SET_BY_RUN = {"output", "overwrite", "dry_run"}
# So many results of a stage that a change replaced stay in previous/.
KEPT_BEFORE = 2
# What decides nothing about a stage's content.
_FREE = SET_BY_RUN | {"workers", "engine", "ray_address", "keep_last", "keep_best", "keep_every", "log_every"}
_FREE |= {"pause_above_celsius", "when_hot", "electricity_price", "currency", "detach", "check_memory"}


@dataclass(frozen=True)
class Stage:
    """One stage: its table in the recipe, its directory, its verb, its configuration, and where its inputs come from.

    `inputs` maps a setting to the stages that can provide it, the preferred first.
    """

    name: str
    directory: str
    function: str
    configuration: type[Settings]
    inputs: dict[str, tuple[str, ...]]


STAGES = (
    Stage("clean", "corpus", "onecard.data.clean:clean", CleanConfig, {}),
    Stage("tokenizer", "tokenizer", "onecard.tokenizer.train:train", TokenizerTrainConfig, {"corpus": ("clean",)}),
    Stage(
        "pretrain",
        "pretrain",
        "onecard.train.pretrain:pretrain",
        PretrainConfig,
        {"corpus": ("clean",), "tokenizer": ("tokenizer",)},
    ),
    Stage("finetune", "finetune", "onecard.train.finetune:finetune", FinetuneConfig, {"model": ("pretrain",)}),
    Stage("align", "align", "onecard.train.align:align", AlignConfig, {"model": ("finetune", "pretrain")}),
    Stage("classify", "classify", "onecard.train.classify:classify", ClassifyConfig, {"model": ("pretrain",)}),
    Stage(
        "evaluate",
        "evaluation",
        "onecard.evaluate.evaluate:evaluate",
        EvaluateConfig,
        {"model": ("align", "finetune", "pretrain"), "base": ("pretrain",), "corpus": ("clean",)},
    ),
    Stage(
        "compare",
        "comparison",
        "onecard.evaluate.compare:compare",
        CompareConfig,
        {"model": ("align", "finetune"), "base": ("pretrain",)},
    ),
)
ASK = "ask"


def run(config: RunConfig) -> dict[str, Any]:
    """Walk the recipe; returns the result of each stage. Stops at the first error; finished stages are kept."""
    recipe = read_toml(config.recipe)
    _check_names(config.recipe, recipe)
    recipe = _with_overrides(recipe, config.set)
    base, output = config.recipe.parent, output_of(config)
    walk = _Walk(config.recipe, recipe, base, output)
    started = time.monotonic()
    # Every stage's settings are read before the first stage works: a typing error is found at once.
    planned = [stage for stage in STAGES if stage.name in recipe]
    configurations = {stage.name: walk.configure(stage) for stage in planned}
    questions = None
    if ASK in recipe:
        questions = build(AskConfig, recipe[ASK], where=f"[{ASK}] of {config.recipe}")
        walk.model_directory()
    walk.check_lengths(configurations)
    total = len(planned) + (questions is not None)
    with _alone(output):
        for number, stage in enumerate(planned, 1):
            walk.stage(stage, configurations[stage.name], f"[{number}/{total}] {stage.name}")
        if questions is not None:
            walk.ask(questions, f"[{total}/{total}] {ASK}")
    seconds = time.monotonic() - started
    console.table(
        f"{config.recipe} -> {console.short_path(output)}: {console.format_duration(seconds)}",
        ["stage", "", "time", "what"],
        [[row["stage"], row["state"], console.format_duration(row["seconds"]), row["what"]] for row in walk.rows],
    )
    walk.say_next()
    states = {row["stage"]: row["state"] for row in walk.rows}
    return {"output": str(output), "seconds": seconds, "states": states, "stages": walk.results}


def output_of(config: RunConfig) -> Path:
    """Where all stages of a recipe write."""
    recipe = read_toml(config.recipe)
    _check_names(config.recipe, recipe)
    named = config.recipe.parent / Path(recipe.get("output", f"runs/{config.recipe.stem}")).expanduser()
    return config.output or Path(os.path.normpath(named))


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keep a second `onecard run` out of `output`: both would write the same directories."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with artifact.disk_faults(output):
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(
                f"Another `onecard run` is at work in {output}.", "Wait for it, or choose another --output."
            ) from None
        except OSError:
            console.note("  (this file system has no locks: do not start a second run on the same output)")
        yield


class _Walk:
    """The state of one walk over a recipe."""

    def __init__(self, path: Path, recipe: dict[str, Any], base: Path, output: Path) -> None:
        self.path, self.recipe, self.base, self.output = path, recipe, base, output
        self.results: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._left_out: set[str] = set()
        self._state = self._read_state()

    # --- settings -------------------------------------------------------------------------------------------------

    def configure(self, stage: Stage) -> Any:
        """The configuration of a stage: the recipe's table, its inputs filled in from the stages before."""
        kind = stage.configuration
        values = relative_to(self.base, kind, self.recipe[stage.name])
        for name in SET_BY_RUN & values.keys():
            del values[name]
            if not self._left_out:
                console.warn(f"{name} in [{stage.name}] is not honoured: a run decides it (see output at the top).")
        if stage.name == "compare":
            values = self._compared() | values
        where = f"[{stage.name}] of {self.path}"
        for setting, providers in stage.inputs.items():
            if setting not in values:
                values[setting] = self._provided(stage, setting, providers)
        if stage.name == "tokenizer" and "vocabulary_size" not in values:
            size = self.recipe.get("pretrain", {}).get("size", "auto")
            if size != "auto":
                values["vocabulary_size"] = preset(size).vocabulary
        if stage.name == "finetune" and values.get("text_share") and "corpus" not in values and self._makes("clean"):
            values["corpus"] = self.output / "corpus"
        if stage.name == "classify" and "sources" not in values and self._makes("clean"):
            # The texts of [clean], each with the name of its source as its label, held out as there.
            documents = str(self.output / "corpus" / "documents-*.parquet")
            values = {"label_field": "source", "split_field": "split", **values, "sources": [documents]}
        if stage.name == "evaluate":
            if "questions" not in values and self._makes("finetune"):
                tuned = relative_to(self.base, FinetuneConfig, self.recipe["finetune"])
                values["questions"] = tuned.get("sources", [])
            if str(values["base"]) == str(values["model"]):
                values["base"] = None
        values["output"] = self.output / stage.directory
        return build(kind, values, where=where)

    def _compared(self) -> dict[str, Any]:
        """What [compare] takes where nothing is said: the rows that [finetune] held back, the model that it began with,
        and the held-out text of [clean]."""
        tuned = relative_to(self.base, FinetuneConfig, self.recipe.get("finetune", {}))
        made = {"sources": tuned["sources"]} if "sources" in tuned else {}
        if "model" in tuned:
            made["base"] = tuned["model"]
        if self._makes("clean"):
            made["text"] = [str(self.output / "corpus")]
        return made

    def _provided(self, stage: Stage, setting: str, providers: tuple[str, ...]) -> Path | None:
        directories = {made.name: self.output / made.directory for made in STAGES}
        for name in providers:
            if self._makes(name):
                return directories[name]
        if setting in ("base", "corpus") and stage.name == "evaluate":
            return None
        raise ConfigError(
            f"[{stage.name}] of {self.path} needs {setting}, and no stage before it makes one.",
            f"Add [{providers[0]}] to the recipe, or set {setting} to a directory.",
        )

    def check_lengths(self, configurations: dict[str, Any]) -> None:
        """ConfigError if the rows of [finetune] are longer than the model that [pretrain] will make can read."""
        pretrain, finetune = configurations.get("pretrain"), configurations.get("finetune")
        if pretrain is None or finetune is None or _only_empty_folders(finetune.sources):
            return
        made = pretrain.output.resolve()
        if finetune.model.resolve() not in (made, made / "model") or finetune.max_length == "auto":
            return
        # With size = auto the shortest that the rules give is what is sure.
        known = preset("4M" if pretrain.size == "auto" else pretrain.size).context_tokens
        longest = known if pretrain.max_length == "auto" else pretrain.max_length
        if finetune.max_length > longest:
            raise ConfigError(
                f"{self.path}: max_length {finetune.max_length} in [finetune] is more than the {longest} of "
                "[pretrain].",
                f"Set max_length in [finetune] to at most {longest}, or raise it in [pretrain].",
            )

    def _makes(self, name: str) -> bool:
        return name in self.recipe and name not in self._left_out

    # --- stages ---------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage, config: Any, title: str) -> None:
        """Run a stage, or skip it when nothing that decides it has changed."""
        if stage.name == "compare" and "finetune" in self._left_out and not self._makes("align"):
            console.heading(title)
            console.warn("There is no fine-tuned model: compare is left out.")
            self._row(stage.name, "left out", 0, "")
            return
        if self._left_out:
            config = self.configure(stage)
        directory = self.output / stage.directory
        if stage.name == "finetune" and _only_empty_folders(config.sources):
            console.heading(title)
            folders = ", ".join(source.path for source in config.sources)
            console.warn(f"No chats in {folders}: finetune is left out, and the model will only continue text.")
            self._left_out.add(stage.name)
            self._row(stage.name, "left out", 0, "")
            return
        if stage.name == "evaluate" and not config.questions and _nothing_held_out(config.corpus):
            console.heading(title)
            console.warn(
                f"{config.corpus} holds no held-out text and there are no questions: evaluate is left out. "
                "A larger held_out, or split = paragraph for a few long files, would hold some back."
            )
            self._row(stage.name, "left out", 0, "")
            return
        key = self._key(stage, config)
        entry = self._state.get(stage.name, {})
        if entry.get("key") == key and self._whole(directory, entry):
            console.heading(f"{title}: unchanged, skipped")
            self._done(stage, "skipped", key, 0)
            return
        console.heading(title)
        if entry.get("key") != key:
            self._move_aside(directory, "settings or inputs changed")
        elif (directory / artifact.MANIFEST).exists():
            self._move_aside(directory, "it is damaged, or was changed by hand")
        self._remember(stage.name, {"key": key})
        started = time.monotonic()
        module, function = stage.function.split(":")
        verb: Callable[[Any], dict[str, Any]] = getattr(importlib.import_module(module), function)
        verb(config)
        self._done(stage, "done", key, time.monotonic() - started)

    def _done(self, stage: Stage, state: str, key: str, seconds: float) -> None:
        manifest = artifact.read_manifest(self.output / stage.directory)
        self.results[stage.name] = manifest.result
        kept = {"key": key, "content_hash": manifest.content_hash, "fingerprint": manifest.fingerprint}
        self._remember(stage.name, kept)
        self._row(stage.name, state, seconds, f"{stage.directory}/")

    def _key(self, stage: Stage, config: Any) -> str:
        """Hash of all that decides what a stage makes: settings, and the content of inputs (not where they lie)."""
        settings = {name: value for name, value in config.without_places().items() if name not in _FREE}
        hashes: list[Any] = []
        for name in stage.configuration.model_fields:
            value = getattr(config, name)
            if isinstance(value, list) and value and isinstance(value[0], Source):
                hashes.append([name, [_file_hashes(source) for source in value]])
            elif isinstance(value, Path) and (name in stage.inputs or (name == "corpus" and value.is_dir())):
                hashes.append([name, _input_hash(value)])
            elif isinstance(value, Path) and value.is_file():
                hashes.append([name, artifact.hash_file(value)])
        return artifact.hash_json([onecard.__version__, artifact.FORMAT, stage.name, settings, hashes])

    def _whole(self, directory: Path, entry: dict[str, Any]) -> bool:
        """Finished with this key, and every file as it was written.

        A stage that finished just before a kill has its manifest but no entry here yet: it is taken over. So is a run
        that has been gone on with since (`onecard resume`): what it began with is the same.
        """
        try:
            manifest = artifact.verify(directory)
        except ArtifactError:
            return False
        if manifest.kind == "run" and entry.get("fingerprint") == manifest.fingerprint:
            return True
        return entry.get("content_hash") in (None, manifest.content_hash)

    def _move_aside(self, directory: Path, reason: str) -> None:
        if not directory.exists():
            return
        if not _is_a_stages(directory):
            raise ArtifactError(f"{directory} was not made by onecard.", "Choose another output for the run.")
        previous = self.output / "previous"
        with artifact.disk_faults(previous):
            previous.mkdir(parents=True, exist_ok=True)
            kept = _numbered(previous, directory.name)
            target = previous / f"{directory.name}-{kept[-1][0] + 1 if kept else 1}"
            directory.replace(target)
            console.note(f"  {reason}: what was there is kept in {console.short_path(target)}")
            for _, old in kept[: len(kept) + 1 - KEPT_BEFORE]:
                if _is_a_stages(old):
                    shutil.rmtree(old)
                    console.note(f"  removed {console.short_path(old)}: the newest {KEPT_BEFORE} are kept")

    # --- questions ------------------------------------------------------------------------------------------------

    def ask(self, config: AskConfig, title: str) -> None:
        """Serve the model, ask each question over HTTP, show the answers, stop."""
        directory = self.model_directory()
        key = artifact.hash_json([config.plain(), _input_hash(directory)])
        entry = self._state.get(ASK, {})
        if not config.questions:
            console.warn("[ask] has no questions: nothing is asked.")
        skipped = entry.get("key") == key and "answers" in entry
        console.heading(f"{title}: unchanged, skipped" if skipped else title)
        started = time.monotonic()
        answers = entry["answers"] if skipped else self._ask(config, directory)
        for answer in answers:
            console.result(f"  Q: {answer['question']}")
            console.result(f"  A: {answer['text']}  [{answer['finish_reason']}]")
        self._remember(ASK, {"key": key, "answers": answers})
        self.results[ASK] = answers
        self._row(
            ASK,
            "skipped" if skipped else "done",
            time.monotonic() - started,
            f"{len(answers)} answer{'' if len(answers) == 1 else 's'}",
        )

    def _ask(self, config: AskConfig, directory: Path) -> list[dict[str, Any]]:
        from onecard.config import ServeConfig
        from onecard.serve.client import ask
        from onecard.serve.server import start_server

        server = start_server(ServeConfig(model=directory, port=0))
        try:
            console.note(f"  serving {console.short_path(directory)} at {server.url}")
            answers = []
            for question in config.questions:
                answer = ask(server.url, server.model_name, question, config.max_new_tokens, server.service.key)
                answers.append({"question": question, "text": answer.text, "finish_reason": answer.finish_reason})
            return answers
        finally:
            server.stop()

    def model_directory(self) -> Path:
        """The last model that the recipe makes; where fine-tuning is left out, the one it would have begun with."""
        directories = {made.name: self.output / made.directory for made in STAGES}
        for name in ("align", "finetune", "pretrain"):
            if self._makes(name):
                return directories[name]
        given = relative_to(self.base, FinetuneConfig, self.recipe.get("finetune", {})).get("model")
        if given is not None:
            return Path(given)
        raise ConfigError(f"{self.path} makes no model to ask.", "Add [pretrain] or [finetune], or remove [ask].")

    def say_next(self) -> None:
        """The two commands to go on with."""
        if self.recipe.keys() & {"pretrain", "finetune", "align"}:
            directory = shlex.quote(console.short_path(self.model_directory()))
            console.result(f"Talk to it:  onecard chat {directory}")
            console.result(f"Serve it:    onecard serve {directory}")

    # --- state ----------------------------------------------------------------------------------------------------

    def _read_state(self) -> dict[str, Any]:
        path = self.output / STATE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            raise ArtifactError(f"{self.output} is a file.", "Choose another --output.") from None
        except ValueError:
            state = None
        if not (isinstance(state, dict) and all(isinstance(entry, dict) for entry in state.values())):
            raise ArtifactError(f"{path} is damaged.", "Delete it; all stages are then made again.")
        return state

    def _remember(self, name: str, entry: dict[str, Any]) -> None:
        with artifact.disk_faults(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        self._state[name] = entry
        artifact.write_json_atomically(self.output / STATE, self._state)

    def _row(self, stage: str, state: str, seconds: float, what: str) -> None:
        self.rows.append({"stage": stage, "state": state, "seconds": seconds, "what": what})


def _numbered(previous: Path, name: str) -> list[tuple[int, Path]]:
    """What is kept of a stage: NAME-1, NAME-2 and so on, oldest first."""
    found = [(path.name.removeprefix(f"{name}-"), path) for path in previous.glob(f"{name}-*")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _is_a_stages(directory: Path) -> bool:
    """Whether onecard made it, or nothing is in it (or only what training writes before it has its plan)."""
    if not directory.is_dir():
        return False
    names = {item.name for item in directory.iterdir()}
    return bool(names & {artifact.MANIFEST, "plan.json"}) or names <= {
        ".lock",
        "tokens",
        "rejected-00000.jsonl",
        "events.jsonl",
    }


def _input_hash(path: Path) -> str:
    """Content of an input directory: a run's model, a model directory, or anything with a manifest."""
    model = path / "model" if (path / "model").is_dir() else path
    return artifact.content_hash(model) if model.exists() else "missing"


def _file_hashes(source: Source) -> list[list[str]]:
    from onecard.data.sources import source_files

    return [[path.name, artifact.hash_file(path)] for path in source_files(source)]


def _nothing_held_out(corpus: Path | None) -> bool:
    """True for a corpus of so few documents that `clean` held none back."""
    return corpus is not None and artifact.read_manifest(corpus, "corpus").result.get("held_out") == 0


def _only_empty_folders(sources: list[Source]) -> bool:
    """True for folders that hold no visible file (a new project whose owner brought no chats)."""
    folders = [Path(source.path) for source in sources]
    return bool(folders) and all(
        folder.is_dir() and not any(p.is_file() and not p.name.startswith(".") for p in folder.rglob("*"))
        for folder in folders
    )


def _check_names(path: Path, recipe: dict[str, Any]) -> None:
    known = [stage.name for stage in STAGES] + [ASK, "output", "plan"]  # what `onecard plan` is told is no stage
    for name, value in recipe.items():
        if name not in known:
            hint = nearest(name, known).strip() or f"Stages: {', '.join(known)}."
            raise ConfigError(f"{path}: there is no stage {name}.", hint)
        if name == "output":
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{path}: output is not the name of a folder.", 'Such as output = "run".')
        elif not isinstance(value, dict):
            raise ConfigError(f"{path}: {name} is not a table.", f"Write [{name}] on a line of its own.")
    if not any(stage.name in recipe for stage in STAGES):
        raise ConfigError(f"{path} has no stage.", "Begin with [clean]; `onecard new DIR` writes a whole recipe.")


def _with_overrides(recipe: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Apply STAGE.KEY=VALUE; the value is read as TOML, or as a string where it is none."""
    for text in overrides:
        name, equals, value = text.partition("=")
        stage, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set {text} is not STAGE.KEY=VALUE.", "Such as --set pretrain.max_steps=200.")
        if not isinstance(recipe.get(stage), dict):
            stages = [name for name in recipe if name != "output"]
            hint = nearest(stage, stages).strip() or f"Its stages: {', '.join(stages)}."
            raise ConfigError(f"--set {text}: the recipe has no stage {stage}.", hint)
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        recipe = {**recipe, stage: {**recipe[stage], key: parsed}}
    return recipe
