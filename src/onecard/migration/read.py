"""A configuration file of another tool becomes a draft: which tool it is of is seen by the names in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onecard.errors import ConfigError
from onecard.migration import axolotl, llama_factory, unsloth
from onecard.migration.draft import Draft

_TOOLS: tuple[tuple[tuple[str, ...], Callable[[Path, Mapping[str, Any]], Draft]], ...] = (
    (llama_factory.SIGNS, llama_factory.draft),
    (axolotl.SIGNS, axolotl.draft),
    (unsloth.SIGNS, unsloth.draft),
)
_UNDERSTOOD = (
    "It is for training files of LLaMA-Factory and Axolotl (YAML, JSON), and for settings or scripts (.py) of Unsloth."
)


def draft_of(path: Path) -> Draft:
    """The draft of a file; ConfigError where it cannot be read or is of no tool that is known. Nothing in it is run."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}.", _UNDERSTOOD) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder.", "Give the training file in it.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8.", _UNDERSTOOD) from None
    if path.suffix == ".py":
        return unsloth.draft_of_script(path, text)
    values = _values(path, text)
    names = set(_names(values))
    signs, draft = max(_TOOLS, key=lambda tool: len(names & set(tool[0])))
    if len(names & set(signs)) < 2:
        raise ConfigError(f"{path} is of no tool that is known here.", _UNDERSTOOD)
    return draft(path, values)


def _values(path: Path, text: str) -> Mapping[str, Any]:
    import yaml

    try:
        # JSON is YAML too; the safe loader makes nothing but plain values.
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        problem = str(getattr(fault, "problem", None) or fault).splitlines()[0]
        raise ConfigError(f"{path}{place}: neither YAML nor JSON ({problem}).", _UNDERSTOOD) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings.", _UNDERSTOOD)
    return values


def _names(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield str(key)
        if isinstance(value, dict):
            yield from _names(value)
