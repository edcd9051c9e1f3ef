"""What every configuration is made of: frozen models whose unknown keys fail and name the nearest, read from TOML.

Importing this module imports pydantic and nothing heavier.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

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
    columns: dict[str, str] = setting(
        {},
        'for columns (or keys) of other names: {question="症状", answer="建议"} reads these two, under the names that '
        "onecard knows, and no other; field, group_by and label_field then mean these names",
    )
    message_keys: dict[str, str] = setting(
        {}, 'the same for the keys of the messages in a row: {role="speaker", content="says"}'
    )
    roles: dict[str, str | list[str]] = setting(
        {}, 'who speaks, under other names: {user="patient", assistant=["doctor", "nurse"]}'
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @property
    def label(self) -> str:
        """The name for reports."""
        return self.name or Path(self.path.removeprefix("package:")).name


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


def assignment(text: str) -> tuple[str, Any]:
    """The name and the value of KEY=VALUE; the value is read as TOML, or as a string where it is none."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not (equals and name):
        raise ConfigError(f"{text} is not KEY=VALUE.", "Such as learning_rate=1e-5.")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value.strip()


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
