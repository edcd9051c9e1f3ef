"""One frozen model a verb: the only place where a setting has its name, its default, its limits and its explanation.

From these come the recipe file (TOML), the flags, the help, the errors and the recipe that `onecard new` writes.
Unknown keys fail and name the nearest; `auto` is a value that the planner fills in and the run records.
Importing this module imports pydantic and nothing heavier.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from onecard.errors import ConfigError

Auto = Literal["auto"]
NONE = "none"
Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def setting(
    default: Any, text: str, *, positional: bool = False, metavar: str = "", one_by_one: bool = False, **limits: Any
) -> Any:
    """A field with its explanation; `positional` makes it an argument that needs no flag.

    A list takes several values after its flag; with `one_by_one` it takes one, and the flag is repeated.
    """
    extra: dict[str, Any] = {"positional": positional, "metavar": metavar, "one_by_one": one_by_one}
    return Field(default, description=text, json_schema_extra=extra, **limits)


class Settings(BaseModel):
    """Base of all configurations."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _none_by_name(cls, value: Any) -> Any:
        """TOML and flags have no null: "none" means it where a setting may be left open."""
        if not isinstance(value, dict):
            return value
        fields = cls.model_fields
        return {
            key: None if item == NONE and key in fields and type(None) in alternatives(fields[key].annotation) else item
            for key, item in value.items()
        }

    def plain(self) -> dict[str, Any]:
        """The settings as JSON-able values, for provenance and fingerprints."""
        return self.model_dump(mode="json")

    def without_places(self) -> dict[str, Any]:
        """`plain` less the paths: what decides a result beside the content of the inputs, wherever those lie."""
        made = self.plain()
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if Path in alternatives(info.annotation) and value is not None:
                made.pop(name)
            elif info.annotation == list[Source]:
                made[name] = [{**source.plain(), "path": "", "name": source.label} for source in value]
        return made


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
        "reject a document when more than this share of its characters is neither letter, digit nor common punctuation",
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
        "the plan fixes before the run as many updates as fit in this time on this machine (at most num_epochs)",
    )
    max_length: int = setting(512, "tokens in a training row", ge=8)
    batch_size: Positive | Auto = setting("auto", "rows in a micro-batch")
    gradient_accumulation_steps: Positive | Auto = setting("auto", "micro-batches in an update")
    optimizer: Literal["auto", "adamw", "muon"] = setting("auto", "muon: Muon for the matrices, AdamW for the rest")
    learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate (of AdamW; see muon_learning_rate)")
    muon_learning_rate: PositiveNumber | Auto = setting("auto", "peak learning rate of the matrices under muon")
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only: never on norms and biases", ge=0)
    warmup_ratio: Fraction = setting(0.05, "share of the updates in which the learning rate rises")
    schedule: Literal["cosine", "wsd"] = setting("wsd", "wsd: warm-up, stable, then linear decay over decay_ratio")
    decay_ratio: Fraction = setting(0.6, "share of the updates in which wsd decays")
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
    start: Literal["auto", "random", "bigram"] = setting(
        "auto",
        "bigram: embeddings begin at the statistics of neighbouring tokens; auto takes it for small vocabularies",
    )
    mix: dict[str, Annotated[float, Field(ge=0)]] = setting(
        {}, "passes over each source in an epoch (1 where not named), such as { poems = 2, news = 0.5 }"
    )

    @model_validator(mode="after")
    def _size_can_be_chosen(self) -> Self:
        if self.size == "auto" and self.time_limit_minutes is None:
            # Not a ValueError: it is said as it stands.
            raise ConfigError(
                "size = auto needs to know how long pretraining may take.",
                "Give time_limit_minutes (--time-limit-minutes), or a size such as 26M (--size).",
            )
        return self


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
        [],
        "change one setting of the recipe, such as pretrain.max_steps=200",
        metavar="STAGE.KEY=VALUE",
        one_by_one=True,
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
    """Validate `values` into a configuration.

    ConfigError names the first wrong setting, what it was given and what it is; for an unknown one, the nearest known.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as fault:
        raise _as_config_error(kind, fault, f"{where}: " if where else "") from None


def _as_config_error(kind: type[Settings], fault: ValidationError, prefix: str) -> ConfigError:
    first = fault.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    info = kind.model_fields.get(name)
    owner = Source if len(first["loc"]) > 1 and info is not None and info.annotation == list[Source] else kind
    inner = [part for part in first["loc"][1:] if owner is Source and (isinstance(part, int) or part in _known(owner))]
    place = name + "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in inner)
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][-1])
        named = unknown if owner is kind else f"{unknown} in {place}"
        known = sorted(_known(owner))
        return ConfigError(
            f"{prefix}unknown setting {named}.", nearest(unknown, known).strip() or f"Known: {', '.join(known)}."
        )
    if first["type"] == "missing":
        missing = str(first["loc"][-1])
        text = _expectation(owner.model_fields[missing]) if missing in _known(owner) else ""
        return ConfigError(f"{prefix}the setting {place} is missing.", f"Give it. {text}".strip())
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f" (given: {_shortened(first['input'])})"
    last = str(inner[-1]) if inner and not isinstance(inner[-1], int) else ""
    described = owner.model_fields[last] if last else info
    return ConfigError(
        f"{prefix}{place}: {message[:1].lower()}{message[1:]}{given}.",
        "See --help." if described is None else _expectation(described),
    )


def _known(kind: type[Settings]) -> set[str]:
    return set(kind.model_fields)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _expectation(info: FieldInfo) -> str:
    choices = choices_of(info.annotation)
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
    """Paths of a recipe are meant from the folder that it lies in; `package:` paths and "none" are left alone."""

    def placed(path: Any) -> Any:
        if not isinstance(path, str) or path.startswith("package:") or path in ("", NONE):
            return path
        return os.path.normpath(base / Path(path).expanduser())

    def placed_source(item: Any) -> Any:
        return {**item, "path": placed(item["path"])} if isinstance(item, dict) and "path" in item else placed(item)

    made = dict(values)
    for name, info in kind.model_fields.items():
        if name not in made:
            continue
        if info.annotation == list[Source]:
            # One path is meant as a list of one: sources = "texts".
            items = made[name] if isinstance(made[name], list) else [made[name]]
            made[name] = [placed_source(item) for item in items]
        elif Path in alternatives(info.annotation):
            made[name] = placed(made[name])
    return made


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union (or the type itself), Annotated unwrapped."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in alternatives(part)]
    return [annotation]


def choices_of(annotation: Any) -> list[str]:
    members = alternatives(annotation)
    return [str(v) for m in members for v in get_args(m)] if all(get_origin(m) is Literal for m in members) else []
