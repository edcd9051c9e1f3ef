"""`run` walks a recipe from raw text to a served model; `new` lays out a project with such a recipe.

A recipe is a TOML file with a table a stage: [clean], [tokenizer], [pretrain], [finetune], [evaluate], [ask]. Stages that
are not in it are left out. Each stage writes one directory below the recipe's output and takes what the stages before
it wrote, unless the recipe names something else. A stage is skipped when its settings and the content of its inputs are
what they were; what an earlier run of it left is moved to previous/, never deleted.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onecard
from onecard import artifact, console
from onecard.config import (
    AskConfig,
    CleanConfig,
    EvaluateConfig,
    FinetuneConfig,
    NewConfig,
    PretrainConfig,
    RunConfig,
    Settings,
    Source,
    TokenizerTrainConfig,
    build,
    nearest,
    read_toml,
    relative_to,
)
from onecard.errors import ArtifactError, ConfigError

STATE = "pipeline.json"
# What decides nothing about a stage's content.
_FREE = {"output", "overwrite"}


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
    Stage(
        "tokenizer", "tokenizer", "onecard.tokenizer.train:train", TokenizerTrainConfig, {"corpus": ("clean",)}
    ),
    Stage(
        "pretrain",
        "pretrain",
        "onecard.train.pretrain:pretrain",
        PretrainConfig,
        {"corpus": ("clean",), "tokenizer": ("tokenizer",)},
    ),
    Stage("finetune", "finetune", "onecard.train.finetune:finetune", FinetuneConfig, {"model": ("pretrain",)}),
    Stage(
        "evaluate",
        "evaluation",
        "onecard.evaluate.evaluate:evaluate",
        EvaluateConfig,
        {"model": ("finetune", "pretrain"), "base": ("pretrain",), "corpus": ("clean",)},
    ),
)
ASK = "ask"


def run(config: RunConfig) -> dict[str, Any]:
    """Walk the recipe; returns the result of each stage. Stops at the first error; finished stages are kept."""
    recipe = _with_overrides(read_toml(config.recipe), config.set)
    _check_names(config.recipe, recipe)
    base = config.recipe.parent
    output = config.output or base / recipe.get("output", f"runs/{config.recipe.stem}")
    walk = _Walk(config.recipe, recipe, base, output)
    started = time.monotonic()
    # Every stage's settings are read before the first stage works: a typing error is found at once.
    planned = [stage for stage in STAGES if stage.name in recipe]
    configurations = {stage.name: walk.configure(stage) for stage in planned}
    questions = build(AskConfig, recipe[ASK], where=f"[{ASK}] of {config.recipe}") if ASK in recipe else None
    total = len(planned) + (questions is not None)
    for number, stage in enumerate(planned, 1):
        walk.stage(stage, configurations[stage.name], f"[{number}/{total}] {stage.name}")
    if questions is not None:
        walk.ask(questions, f"[{total}/{total}] {ASK}")
    seconds = time.monotonic() - started
    console.table(
        f"{config.recipe}: {console.format_duration(seconds)}",
        ["stage", "", "time", "where"],
        [[row["stage"], row["state"], console.format_duration(row["seconds"]), row["where"]] for row in walk.rows],
    )
    walk.say_next()
    return {"output": str(output), "seconds": seconds, "stages": walk.results}


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
        where = f"[{stage.name}] of {self.path}"
        for setting, providers in stage.inputs.items():
            if setting not in values:
                values[setting] = self._provided(stage, setting, providers)
        if stage.name == "evaluate" and "questions" not in values and "finetune" in self.recipe:
            tuned = relative_to(self.base, FinetuneConfig, self.recipe["finetune"])
            values["questions"] = tuned.get("sources", [])
        values["output"] = self.output / stage.directory
        return build(kind, values, where=where)

    def _provided(self, stage: Stage, setting: str, providers: tuple[str, ...]) -> Path | None:
        directories = {made.name: self.output / made.directory for made in STAGES}
        for name in providers:
            if name in self.recipe and name not in self._left_out:
                return directories[name]
        if setting in ("base", "corpus") and stage.name == "evaluate":
            return None
        raise ConfigError(
            f"[{stage.name}] of {self.path} needs {setting}, and no stage before it makes one.",
            f"Add [{providers[0]}] to the recipe, or set {setting} to a directory.",
        )

    # --- stages ---------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage, config: Any, title: str) -> None:
        """Run a stage, or skip it when nothing that decides it has changed."""
        if self._left_out:
            config = self.configure(stage)
        directory = self.output / stage.directory
        if stage.name == "finetune" and _only_empty_folders(config.sources):
            console.heading(title)
            console.warn("No file with chats was found: finetune is left out, and the model will continue text only.")
            self._left_out.add(stage.name)
            self._row(stage.name, "left out", 0, "")
            return
        key = self._key(stage, config)
        entry = self._state.get(stage.name, {})
        if entry.get("key") == key and self._whole(directory, entry):
            console.heading(f"{title}: unchanged, skipped")
            manifest = artifact.read_manifest(directory)
            self.results[stage.name] = manifest.result
            self._row(stage.name, "skipped", 0, str(directory))
            return
        console.heading(title)
        if entry.get("key") != key:
            self._move_aside(directory)
        elif (directory / artifact.MANIFEST).exists():
            # Finished, but damaged or changed by hand since.
            console.warn(f"{directory} is not as it was written; it is made again.")
            self._move_aside(directory)
        self._remember(stage.name, {"key": key})
        started = time.monotonic()
        module, function = stage.function.split(":")
        verb: Callable[[Any], dict[str, Any]] = getattr(importlib.import_module(module), function)
        self.results[stage.name] = verb(config)
        manifest = artifact.read_manifest(directory)
        self._remember(stage.name, {"key": key, "content_hash": manifest.content_hash})
        self._row(stage.name, "done", time.monotonic() - started, str(directory))

    def _key(self, stage: Stage, config: Any) -> str:
        settings = {name: value for name, value in config.plain().items() if name not in _FREE}
        hashes = []
        for name in stage.configuration.model_fields:
            value = getattr(config, name)
            if isinstance(value, list) and value and isinstance(value[0], Source):
                hashes += [_source_hashes(source) for source in value]
            elif name in stage.inputs and isinstance(value, Path):
                settings.pop(name)
                hashes.append([name, _input_hash(value)])
        return artifact.hash_json([onecard.__version__, artifact.FORMAT, stage.name, settings, hashes])

    def _whole(self, directory: Path, entry: dict[str, Any]) -> bool:
        """Finished with this key, and every file as it was written.

        A stage that finished just before a kill has its manifest but no entry here yet: it is taken over.
        """
        try:
            manifest = artifact.verify(directory / "model" if (directory / "model").is_dir() else directory)
            whole = artifact.read_manifest(directory)
        except ArtifactError:
            return False
        recorded = entry.get("content_hash")
        return bool(manifest) and recorded in (None, whole.content_hash)

    def _move_aside(self, directory: Path) -> None:
        if not directory.exists():
            return
        previous = self.output / "previous"
        previous.mkdir(parents=True, exist_ok=True)
        number = 1
        while (previous / f"{directory.name}-{number}").exists():
            number += 1
        target = previous / f"{directory.name}-{number}"
        directory.replace(target)
        console.note(f"  settings or inputs changed: what was there is kept in {target}")

    # --- questions ------------------------------------------------------------------------------------------------

    def ask(self, config: AskConfig, title: str) -> None:
        """Serve the model, ask each question over HTTP, show the answers, stop."""
        directory = self.model_directory()
        key = artifact.hash_json([config.plain(), artifact.content_hash(directory / "model")])
        entry = self._state.get(ASK, {})
        skipped = entry.get("key") == key and "answers" in entry
        console.heading(f"{title}: unchanged, skipped" if skipped else title)
        started = time.monotonic()
        answers = entry["answers"] if skipped else self._ask(config, directory)
        for answer in answers:
            console.result(f"  Q: {answer['question']}")
            console.result(f"  A: {answer['text']}  [{answer['finish_reason']}]")
        self._remember(ASK, {"key": key, "answers": answers})
        self.results[ASK] = answers
        self._row(ASK, "skipped" if skipped else "done", time.monotonic() - started, f"{len(answers)} answers")

    def _ask(self, config: AskConfig, directory: Path) -> list[dict[str, Any]]:
        from onecard.config import ServeConfig
        from onecard.serve.client import ask
        from onecard.serve.server import start_server

        server = start_server(ServeConfig(model=directory, port=0))
        try:
            console.note(f"  serving {directory} at {server.url}")
            answers = []
            for question in config.questions:
                answer = ask(server.url, server.model_name, question, config.max_new_tokens)
                answers.append({"question": question, "text": answer.text, "finish_reason": answer.finish_reason})
            return answers
        finally:
            server.stop()

    def model_directory(self) -> Path:
        """The last model that the recipe makes."""
        for name in ("finetune", "pretrain"):
            if name in self.recipe and name not in self._left_out:
                return self.output / name
        raise ConfigError(f"{self.path} makes no model to ask.", "Add [pretrain] or [finetune], or remove [ask].")

    def say_next(self) -> None:
        """The two commands to go on with."""
        if "finetune" in self.recipe or "pretrain" in self.recipe:
            directory = self.model_directory()
            console.result(f"Talk to it:  onecard chat {directory}")
            console.result(f"Serve it:    onecard serve {directory}")

    # --- state ----------------------------------------------------------------------------------------------------

    def _read_state(self) -> dict[str, Any]:
        path = self.output / STATE
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as fault:
            raise ArtifactError(f"{path} is damaged ({fault}).", "Delete it; unchanged stages are made again.") from fault
        return state

    def _remember(self, name: str, entry: dict[str, Any]) -> None:
        with artifact.disk_faults(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        self._state[name] = entry
        artifact.write_json_atomically(self.output / STATE, self._state)

    def _row(self, stage: str, state: str, seconds: float, where: str) -> None:
        self.rows.append({"stage": stage, "state": state, "seconds": seconds, "where": where})


def _input_hash(path: Path) -> str:
    """Content of an input directory: a run's model, a model directory, or anything with a manifest."""
    model = path / "model" if (path / "model").is_dir() else path
    return artifact.content_hash(model) if model.exists() else "missing"


def _source_hashes(source: Source) -> list[Any]:
    from onecard.data.sources import source_files

    return [source.plain(), [[path.name, artifact.hash_file(path)] for path in source_files(source)]]


def _only_empty_folders(sources: list[Source]) -> bool:
    """True for folders that hold no visible file (a new project whose owner brought no chats)."""
    folders = [Path(source.path) for source in sources]
    return bool(folders) and all(
        folder.is_dir() and not any(p.is_file() and not p.name.startswith(".") for p in folder.rglob("*"))
        for folder in folders
    )


def _check_names(path: Path, recipe: dict[str, Any]) -> None:
    known = [stage.name for stage in STAGES] + [ASK, "output"]
    for name, value in recipe.items():
        if name not in known:
            hint = nearest(name, known).strip() or f"Stages: {', '.join(known)}."
            raise ConfigError(f"{path}: there is no stage {name}.", hint)
        if name != "output" and not isinstance(value, dict):
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
        if stage not in recipe:
            raise ConfigError(f"--set {text}: the recipe has no stage {stage}.", nearest(stage, recipe).strip())
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        recipe[stage] = {**recipe[stage], key: parsed}
    return recipe


# --- new ----------------------------------------------------------------------------------------------------------

_NEW_VALUES: dict[str, dict[str, str]] = {
    "clean": {"sources": '["data/text"]'},
    "tokenizer": {},
    "pretrain": {"time_limit_minutes": "30"},
    "finetune": {"sources": '["data/chats"]', "time_limit_minutes": "10"},
    "evaluate": {},
}
_NEW_README = """# {name}: a onecard project

1. Put your text into `data/text/` (.txt, .md, .jsonl, .json, .csv, .tsv, .parquet, also .gz .zst .xz; any encoding).
2. Put questions with answers into `data/chats/`, if you have some, for example lines of
   `{{"question": "...", "answer": "..."}}` in a .jsonl file. Without them the model only continues text.
3. Open `recipe.toml`: every setting is there with its explanation. `time_limit_minutes` says how long to train.
4. `onecard run recipe.toml` makes everything below `run/`; run it again after any change, and only what the change
   touches is made again. Ctrl-C saves; the same command goes on.
5. Look at `run/corpus/report.html`, `run/pretrain/report.html`, `run/evaluation/report.html`.
6. `onecard chat run/finetune` talks to the model (`run/pretrain` if there were no chats).
"""


def new(config: NewConfig) -> dict[str, Any]:
    """Make a project folder: recipe.toml, data/text, data/chats, README.md. Refuses a folder that is not empty."""
    directory = config.directory
    with artifact.new_directory(directory) as temporary:
        for folder in ("text", "chats"):
            (temporary / "data" / folder).mkdir(parents=True)
        artifact.write_text_atomically(temporary / "recipe.toml", recipe_text())
        artifact.write_text_atomically(temporary / "README.md", _NEW_README.format(name=directory.resolve().name))
    console.result(f"Made {directory}. Put text into {directory / 'data' / 'text'}, then:")
    console.result(f"  onecard run {directory / 'recipe.toml'}")
    return {"directory": str(directory), "recipe": str(directory / "recipe.toml")}


def recipe_text() -> str:
    """A recipe with every setting of every stage, its default and its explanation, taken from the configurations."""
    lines = ["# Paths are meant from the folder of this file. A line that begins with # shows a default.", 'output = "run"', ""]
    for stage in STAGES:
        chosen = _NEW_VALUES[stage.name]
        doc = (stage.configuration.__doc__ or "").strip()
        lines += [f"# {doc}", f"[{stage.name}]"]
        for name, info in stage.configuration.model_fields.items():
            if name in _FREE or name in stage.inputs or name == "base":
                continue
            default = "" if info.is_required() else _as_toml(info.default)
            comment = f"  # {info.description}"
            if name in chosen:
                lines.append(f"{name} = {chosen[name]}{comment}")
            else:
                lines.append(f"# {name} = {default}{comment}")
        lines.append("")
    lines += ["# After all stages, the model is served and asked:", "[ask]", 'questions = ["你好", "Who are you?"]', ""]
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    if value is None:
        return '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else ("[]" if isinstance(value, list) else "{}")
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else str(value)
