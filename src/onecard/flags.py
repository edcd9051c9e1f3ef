"""The command line of a verb, made from its configuration: every setting is a flag under its own name.

In: a class of `config` and words. Out: a validated configuration, or a ConfigError that names the nearest flag. Knows
argparse, not what the settings mean.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from onecard.errors import ConfigError
from onecard.settings import AnySettings, Settings, alternatives, build, choices_of, nearest, read_toml, relative_to


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and names the nearest flag."""

    def error(self, message: str) -> Any:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        hint = difflib.get_close_matches(unknown.split("=")[0], known, n=1, cutoff=0.5)
        remedy = f"Did you mean {hint[0]}?" if hint and "unrecognized" in message else f"See {self.prog} --help."
        raise ConfigError(f"{self.prog}: {message}.", remedy)


def _metavar(name: str, info: FieldInfo) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if extra.get("metavar"):
        return str(extra["metavar"])
    if get_origin(info.annotation) is dict:
        return "NAME=VALUE"
    choices = choices_of(info.annotation)
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
        _add_setting(made, name, info)
    if section:
        made.add_argument(
            "--recipe", dest="_recipe", metavar="FILE", help=f"take settings from [{section}] of a recipe; flags win"
        )
    made.add_argument("--json", dest="_json", action="store_true", help="print one JSON document on stdout")
    made.add_argument("--quiet", dest="_quiet", action="store_true", help="no progress and notes on stderr")
    made.add_argument("--debug", dest="_debug", action="store_true", help="show the traceback of an error")
    return made


def _add_setting(made: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    kinds = [get_origin(member) or member for member in alternatives(info.annotation)]
    default = " ".join(map(str, info.default)) if isinstance(info.default, list) else info.default
    shown = "" if info.is_required() or default in (None, {}, "") else f" [{default}]"
    text = f"{info.description}{shown}".replace("%", "%%")
    metavar = _metavar(name, info)
    if bool in kinds:
        made.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        return
    options: dict[str, Any] = {"metavar": metavar, "help": text}
    if list in kinds and extra.get("one_by_one"):
        options |= {"action": "append"}
    elif list in kinds or dict in kinds:
        options |= {"action": "extend", "nargs": "+"}
    if extra.get("positional"):
        made.add_argument(name, nargs="*" if list in kinds else "?", metavar=metavar, help=text)
        options["help"] = argparse.SUPPRESS  # the same setting by its name, for those who write every flag
    made.add_argument(_flag(name), dest=_FLAGGED + name if extra.get("positional") else name, **options)


# A positional and its flag are two arguments of argparse for one setting.
_FLAGGED = "flagged "


def _flag(name: str) -> str:
    # A name that Python keeps for itself ends with an underscore: from_.
    return "--" + name.rstrip("_").replace("_", "-")


def hyphenate(arguments: Sequence[str]) -> list[str]:
    """Accept a setting's own spelling as a flag: --learning_rate=1e-3 becomes --learning-rate=1e-3."""
    return [re.sub(r"^--[^=]+", lambda match: match[0].replace("_", "-"), word) for word in arguments]


def from_arguments(kind: type[AnySettings], parsed: Mapping[str, Any], section: str) -> AnySettings:
    """Merge the recipe's section (if `--recipe` was given) with the flags and validate."""
    values: dict[str, Any] = {}
    recipe = parsed.get("_recipe")
    if recipe:
        values.update(relative_to(Path(recipe).parent, kind, _section(Path(recipe), section)))
    for key, value in parsed.items():
        # An empty list is what argparse gives for positionals that were not typed.
        if key.startswith("_") or value in ([], None):
            continue
        name = key.removeprefix(_FLAGGED)
        values[name] = _table(name, value) if get_origin(kind.model_fields[name].annotation) is dict else value
    return build(kind, values, where=f"[{section}] of {recipe}" if recipe else "")


def _section(path: Path, section: str) -> dict[str, Any]:
    recipe = read_toml(path)
    table = recipe.get(section)
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path} has no table [{section}].", nearest(section, recipe).strip() or f"Write [{section}] into it."
        )
    return table


def _table(name: str, words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a table."""
    made = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"{_flag(name)} {word} is not NAME=VALUE.", f"Such as {_flag(name)} poems=2 news=0.5.")
        made[key] = value
    return made
