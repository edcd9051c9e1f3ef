"""A recipe in the making: each setting of another tool is carried over, under the same or another name, or left.

In: names and values, one by one, with what they mean here. Out: the text of a recipe that onecard reads, and what
became of each name, with the reason. A value that onecard would refuse is left, never written. Knows no tool.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard.config import AlignConfig, FinetuneConfig
from onecard.errors import ConfigError
from onecard.settings import build

Rule = Callable[["Draft", str, Any, Mapping[str, Any]], None]
"""What to do with a name and its value; the whole configuration is there for those that depend on others."""

KINDS: dict[str, type[FinetuneConfig] | type[AlignConfig]] = {"finetune": FinetuneConfig, "align": AlignConfig}
# What a table needs before a single setting of it can be looked at.
_NEEDED = {"model": ".", "sources": ["."]}
_SECRET = re.compile(r"token$|key$|secret|password", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[A-Za-z][\w-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_SHOWN_CHARACTERS = 80
_WIDTH = 118


@dataclass(frozen=True)
class Note:
    """What became of a name: `became` is the setting here ("" where there is none), `why` what is to be known of it.

    All on one line: what stands in a comment must not end it.
    """

    name: str
    value: str
    became: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        for part in ("name", "value", "became", "why"):
            object.__setattr__(self, part, _CONTROL.sub(" ", getattr(self, part)))


class Draft:
    """A recipe for one table, `finetune` or `align`, and the notes on how it came about."""

    def __init__(self, tool: str, file: Path) -> None:
        self.tool, self.file = tool, file
        self.table = "finetune"
        self.settings: dict[str, Any] = {}
        self.evaluated: list[Any] = []
        self.texts: list[Any] = []
        self.carried: list[Note] = []
        self.renamed: list[Note] = []
        self.left: list[Note] = []
        self.idle: list[str] = []
        self.to_do: list[str] = []
        self._origins: dict[str, str] = {}

    # --- what becomes of a name -----------------------------------------------------------------------------------

    def put(self, name: str, value: Any, ours: str, *, given: Any = None, why: str = "") -> None:
        """Carry a value over to the setting `ours`; `given`: what the other tool's file says, where that differs."""
        shown = _shown(name, value if given is None else given)
        kind = KINDS[self.table]
        if ours not in kind.model_fields:
            self.left.append(Note(name, shown, why=f"`onecard {self.table}` has no {ours}"))
            return
        try:
            build(kind, {**_NEEDED, ours: value})
        except ConfigError as fault:
            self.left.append(Note(name, shown, why=fault.what.rstrip(".")))
            return
        self.settings[ours] = value
        self._origins[ours] = name
        same = name == ours and given is None
        (self.carried if same else self.renamed).append(Note(name, shown, ours, why))

    def assume(self, name: str, value: Any, ours: str) -> None:
        """A default of the other tool, which its file does not name and onecard would choose otherwise."""
        if ours not in self.settings:
            self.put(name, value, ours, given=f"{value} (default of {self.tool})")

    def leave(self, name: str, value: Any, why: str) -> None:
        """Say that a value has no place here."""
        self.left.append(Note(name, _shown(name, value), why=why))

    def pass_over(self, name: str) -> None:
        """Name something that onecard does by itself, or that has no effect on the model."""
        self.idle.append(_clean(name))

    def refuse(self, what: str, remedy: str) -> ConfigError:
        """The error for a configuration that onecard cannot train at all."""
        return ConfigError(f"{self.file}: {what}", remedy)

    def read(self, values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
        """Apply to each name its rule, in the order of the file; names without a value are not looked at."""
        for key, value in values.items():
            if value is None or value in ("", [], {}):
                continue
            name = str(key)
            rule = rules.get(name)
            if rule is None:
                self.leave(name, value, "onecard has no setting of this meaning")
                continue
            try:
                rule(self, name, value, values)
            except (ValueError, TypeError) as fault:
                self.leave(name, value, f"its value was not understood ({fault})")

    # --- places ---------------------------------------------------------------------------------------------------

    def place(self, value: str, *folders: Path) -> Path | None:
        """Where a path of the other tool's file leads, looked for beside that file, here, and in `folders`."""
        # These say no where those of Path raise: at a folder that may not be read, a user that is not there.
        path = os.path.expanduser(value)  # noqa: PTH111
        for folder in (*folders, self.file.parent, Path.cwd()):
            if os.path.exists(folder / path):  # noqa: PTH110
                return (folder / path).resolve()
        return None

    def model(self, name: str, value: Any) -> None:
        """The model: a folder that is there, or a place for one of a hub, and the command that brings it."""
        text = str(value)
        found = self.place(text)
        if found is not None:
            self.put(name, str(found), "model", given=text)
        elif _HUB_NAME.fullmatch(text):
            folder = f"models/{text.rpartition('/')[2]}"
            self.put(name, folder, "model", given=text, why="a name on a hub: bring it first, onecard fetches nothing")
            self.to_do.append(f"hf download {shlex.quote(text)} --local-dir {shlex.quote(folder)}")
        else:
            self.put(name, text, "model", given=text, why="not found here: set model to where it lies")

    def rows(self, value: str, settings: Mapping[str, Any], *folders: Path) -> dict[str, Any]:
        """A source: rows that are there, or a place for those of a hub, and the command that brings them."""
        found = self.place(value, *folders)
        if found is not None:
            return {"path": str(found), **settings}
        if _HUB_NAME.fullmatch(value):
            folder = f"data/{value.rpartition('/')[2]}"
            command = f"hf download {shlex.quote(value)} --repo-type dataset --local-dir {shlex.quote(folder)}"
            if command not in self.to_do:
                self.to_do.append(command)
            return {"path": folder, **settings}
        self.to_do.append(f"# put the rows of {_clean(value)} where sources says: they were not found here")
        return {"path": value, **settings}

    # --- the recipe -----------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """The recipe as tables; ConfigError if its settings contradict each other."""
        if self.texts and self.table == "finetune":
            # Plain text is cleaned first; beside chats it makes up half of the rows.
            self.settings["text_share"] = 0.5 if "sources" in self.settings else 1.0
        elif "sources" not in self.settings:
            self.settings["sources"] = ["data/rows"]
            self.to_do.append("# put your rows into data/rows")
        if "model" not in self.settings:
            raise self.refuse("it names no model.", "Give the file that says which model is trained.")
        build(KINDS[self.table], self.settings, where=f"[{self.table}] from {self.file}")
        recipe: dict[str, Any] = {"output": "run", self.table: self.settings}
        if "text_share" in self.settings:
            recipe["clean"] = {"sources": self.texts}
        if self.evaluated:
            recipe["evaluate"] = {"questions": self.evaluated}
        return recipe

    def text(self) -> str:
        """The recipe as a file, with the name that each setting had, and what was left as comments at its head."""
        recipe = self.finish()
        lines = [f"# Made by `onecard new --from` of a configuration of {self.tool}: {_clean(str(self.file))}"]
        lines += ["# Paths are meant from the folder of this file. After # stands what a setting was called there."]
        if self.to_do:
            lines += [
                "#",
                "# First, in the folder of this file:",
                *(f"#   {_clean(command)}" for command in self.to_do),
            ]
        if self.left:
            lines += ["#", "# Not carried over:"]
            lines += [f"#   {note.name} = {note.value}: {note.why}" for note in self.left]
        lines += ["", "# Where all stages write.", f"output = {as_toml(recipe['output'])}"]
        for table in ("clean", self.table, "evaluate"):
            if table in recipe:
                lines += ["", f"[{table}]"]
                for name, value in recipe[table].items():
                    lines += self._setting(name, value, self._origins.get(name, "") if table == self.table else "")
        return "\n".join([*lines, ""])

    def _setting(self, name: str, value: Any, origin: str) -> list[str]:
        after = f" # {_clean(origin)}" if origin and origin != name else ""
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return [f"{name} = [{after}", *(f"    {as_toml(item)}," for item in value), "]"]
        line = f"{name} = {as_toml(value)}"
        return [line + after if len(line + after) <= _WIDTH else line]


def to(ours: str, convert: Callable[[Any], Any] | None = None, *, why: str = "") -> Rule:
    """The rule that carries a value over, converted if it must be."""

    def rule(draft: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
        made = value if convert is None else convert(value)
        changed = made != value and not (isinstance(value, str) and isinstance(made, int | float))
        draft.put(name, made, ours, given=value if changed else None, why=why)

    return rule


def no(why: str) -> Rule:
    """The rule that leaves a value, for this reason; one that only switches something off needs no word."""

    def rule(draft: Draft, name: str, value: Any, _: Mapping[str, Any]) -> None:
        if value is False:
            draft.pass_over(name)
        else:
            draft.leave(name, value, why)

    return rule


def of_no_effect(draft: Draft, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """The rule for what onecard does by itself, or what decides nothing."""
    draft.pass_over(name)


def number(value: Any) -> float:
    """A number, also where YAML read it as text (1e-4 without a point)."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value if isinstance(value, int | float) else float(value)


def whole(value: Any) -> int:
    """A whole number."""
    made = number(value)
    if made != int(made):
        raise ValueError("not a whole number")
    return int(made)


def as_toml(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {as_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    # JSON writes strings, numbers and booleans as TOML does, but for this one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _clean(text: str) -> str:
    """Without line ends and other control characters."""
    return _CONTROL.sub(" ", text)


def _without_secrets(value: Any) -> Any:
    """The value, what has the name of a secret inside it left out."""
    if isinstance(value, dict):
        return {
            key: "(not shown)" if _SECRET.search(str(key)) else _without_secrets(inner) for key, inner in value.items()
        }
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _shown(name: str, value: Any) -> str:
    if _SECRET.search(name):
        return "(not shown)"
    value = _without_secrets(value)
    text = _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
