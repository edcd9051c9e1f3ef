"""One frozen model a verb: the only place where a setting has its name, its default, its limits and its explanation.

From these come the recipe file (TOML), the flags, the help, the errors and the recipe that `onecard new` writes.
Unknown keys fail and name the nearest; `auto` is a value that the planner fills in and the run records.
Importing this module imports pydantic and nothing heavier.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from onecard.errors import ConfigError

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def setting(default: Any, text: str, *, positional: bool = False, metavar: str = "", **limits: Any) -> Any:
    """A field with its explanation; `positional` makes it an argument without a flag."""
    extra = {"positional": positional, "metavar": metavar}
    return Field(default, description=text, json_schema_extra=extra, **limits)


class Settings(BaseModel):
    """Base of all configurations."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, arbitrary_types_allowed=True)

    def plain(self) -> dict[str, Any]:
        """The settings as JSON-able values, for provenance and fingerprints."""
        return self.model_dump(mode="json")


class Source(Settings):
    """One place where text or rows come from. In a recipe: a path, or a table with these keys."""

    path: str = setting(
        ..., "file, folder or glob; `package:NAME/inside/path` is a file that an installed Python package brings"
    )
    name: str = setting("", "what reports call it (default: the last part of the path)")
    language: str = setting("auto", "zh, en, another ISO 639-1 code, or auto to find it by document")
    encoding: str = setting("auto", "such as utf-8 or gb18030; auto detects it by file")
    split: Literal["auto", "file", "line", "paragraph"] = setting(
        "auto",
        "what one document is in .txt and .md: the file, each line, or blocks between blank lines; "
        "auto takes lines when they are long and many, else the file",
    )
    field: str = setting("auto", "the key or column that holds the text; auto recognises the usual names")
    group_by: list[str] = setting([], "rows with equal values of these keys, in sequence, become one document")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @property
    def label(self) -> str:
        """The name for reports."""
        return self.name or Path(self.path.removeprefix("package:")).name


class Verb(Settings):
    """What every verb that writes a directory has."""

    overwrite: bool = setting(False, "replace the output directory if it exists")


class CleanConfig(Verb):
    """Decode, repair, filter, deduplicate and split text into a corpus directory."""

    sources: list[Source] = setting(..., "files, folders or globs of text", positional=True, metavar="SOURCE")
    output: Path = setting(Path("corpus"), "the corpus directory to write")
    held_out: Fraction = setting(
        0.05, "share of the documents kept back to measure with, by document, never trained on"
    )
    minimum_characters: int = setting(20, "shorter documents are rejected (too_short)", ge=0)
    maximum_repetition: Fraction = setting(
        0.5, "reject a document when more than this share of it repeats its own earlier lines or 10-character spans"
    )
    maximum_symbol_ratio: Fraction = setting(
        0.5,
        "reject a document when more than this share of its characters is neither letter, digit nor ordinary punctuation",
    )
    near_duplicates: bool = setting(
        True, "remove near-duplicate documents (MinHash, verified by their true similarity)"
    )
    near_duplicate_threshold: Fraction = setting(
        0.7,
        "Jaccard similarity of character n-grams (3 for Chinese, word 3-grams otherwise) from which two are the same",
    )
    seed: int = setting(0, "decides which documents are held out")
    strict: bool = setting(False, "stop at the first bad row instead of keeping it aside")


class TokenizerTrainConfig(Verb):
    """Train a byte-level BPE tokenizer with chat tokens and a chat template on a corpus."""

    corpus: Path = setting(Path("corpus"), "a corpus directory (from clean)", positional=True, metavar="CORPUS")
    output: Path = setting(Path("tokenizer"), "the tokenizer directory to write")
    vocabulary_size: int = setting(8192, "entries, special tokens included", ge=300, le=1_000_000)
    pre_tokenizer: Literal["qwen2", "llama-bpe", "gpt-2"] = setting(
        "qwen2", "how text is split before merging, by the name that llama.cpp knows it by (qwen2: one digit a token)"
    )
    maximum_token_characters: int = setting(
        16, "no token is longer than this (a run of text without spaces stays bounded)", ge=1
    )


class TrainingConfig(Verb):
    """What every verb that trains has: the settings of the one loop."""

    seed: int = setting(0, "decides initial weights and the order of rows", ge=0)
    max_steps: Positive | Auto = setting("auto", "number of updates; auto: from num_epochs and time_limit_minutes")
    num_epochs: PositiveNumber | Auto = setting("auto", "passes over the rows")
    time_limit_minutes: PositiveNumber | None = setting(
        None,
        "the plan fixes before the run as many updates as fit in this time on this machine (never more than num_epochs)",
    )
    max_length: int = setting(512, "tokens in a training row", ge=8)
    batch_size: Positive | Auto = setting("auto", "rows in a micro-batch")
    gradient_accumulation_steps: Positive | Auto = setting("auto", "micro-batches in an update")
    optimizer: Literal["auto", "adamw", "muon"] = setting("auto", "muon: Muon for the matrices, AdamW for the rest")
    learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate (of AdamW; see muon_learning_rate)")
    muon_learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate of the matrices under muon")
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    warmup_ratio: Fraction = setting(0.03, "share of the updates in which the learning rate rises")
    schedule: Literal["cosine", "wsd"] = setting("wsd", "wsd: warm-up, stable, then linear decay over decay_ratio")
    decay_ratio: Fraction = setting(0.4, "share of the updates in which wsd decays")
    final_learning_rate_ratio: Fraction = setting(0.0, "learning rate at the end as a share of the peak")
    max_grad_norm: float = setting(1.0, "gradients of an update are clipped to this norm (0: never)", ge=0)
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "bf16: bf16 autocast over fp32 weights; auto measures which is faster here"
    )
    compile: bool = setting(
        True, "compile each layer (needs a C++ compiler on a CPU); plain execution with a note otherwise"
    )
    evaluate_every: Positive | Auto = setting("auto", "updates between evaluations on held-out rows")
    save_every: Positive | Auto = setting("auto", "updates between checkpoints; auto: about once a minute")
    keep_last: Positive = setting(2, "checkpoints kept")
    log_every: Positive = setting(1, "updates between lines of metrics.jsonl")


class PretrainConfig(TrainingConfig):
    """Train a language model from nothing on a corpus."""

    corpus: Path = setting(Path("corpus"), "a corpus directory (from clean)", positional=True, metavar="CORPUS")
    tokenizer: Path = setting(Path("tokenizer"), "a tokenizer directory (from tokenizer train)")
    output: Path = setting(Path("pretrain"), "the run directory to write; the model lies in its model/")
    size: str = setting("auto", "a preset such as 4M or 26M; auto: the largest that learns enough in the time given")
    mix: dict[str, Annotated[float, Field(ge=0)]] = setting(
        {}, "passes over each source in an epoch (1 where not named), such as { poems = 2, news = 0.5 }"
    )


class FinetuneConfig(TrainingConfig):
    """Teach a model to answer: supervised fine-tuning on chat rows, learning the answers only."""

    model: Path = setting(Path("pretrain"), "a model or run directory", positional=True, metavar="MODEL")
    sources: list[Source] = setting(..., "files, folders or globs of chat rows", metavar="SOURCE")
    output: Path = setting(Path("finetune"), "the run directory to write; the model lies in its model/")
    held_out: Fraction = setting(0.02, "share of the rows kept back to measure with")
    weight_decay: float = setting(0.0, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    schedule: Literal["cosine", "wsd"] = setting("cosine", "shape of the learning rate over the run")
    strict: bool = setting(False, "stop at the first bad row instead of dropping and counting it")


class EvaluateConfig(Verb):
    """Measure a model on text that it has not seen."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    corpus: Path | None = setting(Path("corpus"), "a corpus directory: bits per byte of its held-out documents")
    base: Path | None = setting(None, "a model to compare with, side by side")
    questions: list[Source] = setting(
        [], "chat rows: the model answers some, and its stopping is measured", metavar="SOURCE"
    )
    question_count: Positive = setting(20, "how many of the questions are asked")
    compare_xz: bool = setting(
        True, "also measure what xz -9e reaches on the same held-out text after the training text"
    )
    max_new_tokens: Positive = setting(128, "longest answer")
    window_tokens: Positive | Auto = setting(
        "auto", "context of the perplexity windows; auto: what the model was trained with"
    )
    seed: int = setting(0, "decides which questions are asked")
    output: Path = setting(Path("evaluation"), "the evaluation directory to write")


class ServeConfig(Settings):
    """Serve a model over an OpenAI-compatible HTTP interface on this machine."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    host: str = setting(
        "127.0.0.1", "address to listen on; anything else than 127.0.0.1 opens the model to the network"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    name: str = setting("", "model name that clients use (default: the directory's name)")
    max_concurrent: Positive = setting(8, "requests answered at the same time; more wait in a queue")
    max_queue: Positive = setting(64, "requests that may wait; one more is answered 429")
    max_length: Positive | Auto = setting("auto", "longest prompt and answer together, in tokens")
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "number format of the weights while serving")


class ChatConfig(Settings):
    """Talk to a model in the terminal."""

    model: Path = setting(Path("finetune"), "a model or run directory", positional=True, metavar="MODEL")
    system: str = setting("", "system message put before the conversation")
    temperature: float = setting(0.7, "0 always takes the likeliest token", ge=0)
    top_p: float = setting(0.9, "nucleus sampling", ge=0, le=1)
    max_new_tokens: Positive = setting(512, "longest answer")
    seed: int | None = setting(None, "the same seed gives the same answers")
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "number format of the weights")


class AskConfig(Settings):
    """The last stage of a recipe: serve the model, ask it, show the answers, stop."""

    questions: list[str] = setting([], "asked over HTTP, one after another")
    max_new_tokens: Positive = setting(64, "longest answer")


class RunConfig(Settings):
    """Walk a recipe from text to a served model; stages whose inputs and settings are unchanged are skipped."""

    recipe: Path = setting(..., "a recipe file (TOML)", positional=True, metavar="RECIPE")
    output: Path | None = setting(None, "where all stages write (default: what the recipe says)")
    set: list[str] = setting(
        [], "change one setting of the recipe, such as pretrain.max_steps=200", metavar="STAGE.KEY=VALUE"
    )


class NewConfig(Settings):
    """Lay out a project of one's own: a recipe with every setting explained, and a folder for the text."""

    directory: Path = setting(..., "the folder to make", positional=True, metavar="DIR")


# --- reading ------------------------------------------------------------------------------------------------------

AnySettings = TypeVar("AnySettings", bound=Settings)


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' or an empty string."""
    match = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]}?" if match else ""


def build(kind: type[AnySettings], values: Mapping[str, Any], *, where: str = "") -> AnySettings:
    """Validate `values` into a configuration; ConfigError in one line that names the setting and, if unknown, the nearest."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as fault:
        first = fault.errors()[0]
        location = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-"))]
        prefix = f"{where}: " if where else ""
        if first["type"] == "extra_forbidden":
            owner = Source if len(location) > 1 and location[0] in ("sources", "questions") else kind
            hint = nearest(location[-1], owner.model_fields)
            raise ConfigError(f"{prefix}unknown setting {'.'.join(location)}.", hint.strip() or "Remove it.") from None
        if first["type"] == "missing":
            raise ConfigError(f"{prefix}the setting {'.'.join(location)} is missing.", "Give it.") from None
        name = location[0] if location else "settings"
        message = first["msg"].removeprefix("Value error, ")
        expected = _expectation(kind.model_fields[name]) if name in kind.model_fields else ""
        given = f" (given: {first['input']!r})" if not isinstance(first["input"], dict) else ""
        raise ConfigError(f"{prefix}{name}: {message[0].lower()}{message[1:]}{given}.", expected) from None


def _expectation(info: FieldInfo) -> str:
    choices = _choices(info.annotation)
    text = f"It is: {info.description}."
    return text + (f" One of: {', '.join(choices)}." if choices else "")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; ConfigError names the line of a mistake."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no recipe {path}.", "Check the path; `onecard new DIR` writes a recipe.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder.", "Give the recipe file in it, such as recipe.toml.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8.", "Save it as UTF-8.") from None
    except OSError as fault:
        raise ConfigError(f"{path} cannot be read ({fault.strerror}).", "Check its permissions.") from None
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(f"{path} is not valid TOML: {fault}.", "Mend that line.") from None


def relative_to(base: Path, kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Paths of a recipe are meant from the folder that the recipe lies in; `package:` paths are left alone."""

    def placed(path: Any) -> Any:
        if not isinstance(path, str) or path.startswith("package:"):
            return path
        return str(base / Path(path).expanduser())

    made = dict(values)
    for name, info in kind.model_fields.items():
        if name not in made:
            continue
        if info.annotation == list[Source] and isinstance(made[name], list):
            made[name] = [
                {**item, "path": placed(item.get("path"))} if isinstance(item, dict) and "path" in item else placed(item)
                for item in made[name]
            ]
        elif Path in _alternatives(info.annotation):
            made[name] = placed(made[name])
    return made


# --- flags --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and names the nearest flag."""

    def error(self, message: str) -> Any:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        hint = difflib.get_close_matches(unknown.split("=")[0], known, n=1, cutoff=0.5)
        remedy = f"Did you mean {hint[0]}?" if hint and "unrecognized" in message else f"See {self.prog} --help."
        raise ConfigError(f"{self.prog}: {message}.", remedy)


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union (or the type itself), Annotated unwrapped."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in _alternatives(part)]
    return [annotation]


def _choices(annotation: Any) -> list[str]:
    members = _alternatives(annotation)
    return [str(v) for m in members for v in get_args(m)] if all(get_origin(m) is Literal for m in members) else []


def _metavar(name: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if extra.get("metavar"):
        return str(extra["metavar"])
    choices = _choices(info.annotation)
    return "{" + ",".join(choices) + "}" if choices else name.split("_")[-1].upper()


def parser(kind: type[Settings], program: str, section: str = "") -> argparse.ArgumentParser:
    """Build the command line of a verb from its configuration; values stay strings for pydantic to convert."""
    made = _Parser(
        prog=program,
        description=(kind.__doc__ or "").strip(),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=112),
    )
    for name, info in kind.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if get_origin(info.annotation) is dict:
            continue  # a table has no form as a flag: it is set in a recipe
        is_list = get_origin(_alternatives(info.annotation)[0]) is list
        required = info.is_required()
        shown = "" if required or info.default in (None, [], "") else f" [{info.default}]"
        text = f"{info.description}{shown}".replace("%", "%%")
        if extra.get("positional"):
            made.add_argument(name, nargs="*" if is_list else "?", metavar=_metavar(name, info), help=text)
        elif bool in _alternatives(info.annotation):
            made.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            made.add_argument(
                _flag(name), dest=name, nargs="+" if is_list else None, metavar=_metavar(name, info), help=text
            )
    if section:
        made.add_argument(
            "--recipe", dest="_recipe", metavar="FILE", help=f"take settings from [{section}] of a recipe; flags win"
        )
    made.add_argument("--json", dest="_json", action="store_true", help="print one JSON document on stdout")
    made.add_argument("--quiet", dest="_quiet", action="store_true", help="no progress and notes on stderr")
    made.add_argument("--debug", dest="_debug", action="store_true", help="show the traceback of an error")
    return made


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def hyphenate(arguments: Sequence[str]) -> list[str]:
    """Accept a setting's own spelling as a flag: --learning_rate=1e-3 becomes --learning-rate=1e-3."""
    return [re.sub(r"^--[^=]+", lambda match: match[0].replace("_", "-"), word) for word in arguments]


def from_arguments(kind: type[AnySettings], parsed: Mapping[str, Any], section: str) -> AnySettings:
    """Merge the recipe's section (if `--recipe` was given) with the flags and validate."""
    values: dict[str, Any] = {}
    recipe = parsed.get("_recipe")
    if recipe:
        table = read_toml(Path(recipe)).get(section, {})
        values.update(relative_to(Path(recipe).parent, kind, table))
    # An empty list is what argparse gives for positionals that were not typed.
    values.update({key: value for key, value in parsed.items() if not key.startswith("_") and value not in ([], None)})
    return build(kind, values, where=f"[{section}] of {recipe}" if recipe else "")
