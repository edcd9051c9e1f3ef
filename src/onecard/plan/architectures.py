"""Published models by name: their configurations from architectures.toml beside this file, without a download.

In: a name such as llama-3.1-8b, or the hub's spelling of it. Out: a transformers configuration, from which a model can
be built without weights. Knows shapes only; where a file of the model lies, and its tokenizer, is not its business.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from onecard.errors import ConfigError
from onecard.settings import nearest

# What a fine-tuned copy of the same shape adds to its name.
_ENDINGS = ("-hf", "-instruct", "-chat", "-base", "-it", "-pt", "-4k", "-8k", "-128k", "-v0.1", "-uncased-whole-word")


def architecture(name: str) -> Any:
    """The transformers configuration of a published model; ConfigError, which names the nearest, for any other name.

    `name` may carry an owner and endings that do not change the shape: "Qwen/Qwen2.5-7B-Instruct" is qwen2.5-7b.
    """
    values = dict(_values(_found(name)))
    from transformers import AutoConfig

    from onecard.model.load import silence_transformers

    silence_transformers()
    return AutoConfig.for_model(values.pop("model_type"), **values)


def known(name: str) -> bool:
    """Whether `architecture` has a configuration of this name."""
    return _canonical(name) is not None


def names() -> list[str]:
    """The names of all tables, in their order (other spellings left out)."""
    return list(_tables())


def published_parameters(name: str) -> int:
    """How many parameters the model is said to have, by those who published it."""
    return int(_tables()[_found(name)]["parameters"])


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "architectures.toml").read_text(encoding="utf-8"))


@functools.cache
def _spellings() -> dict[str, str]:
    """The table that each spelling means; the last part of the hub's name is one."""
    found: dict[str, str] = {}
    for name, table in _tables().items():
        for spelling in (name, *table.get("names", ()), _plain(table["repository"])):
            found.setdefault(spelling, name)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[_\s]+", "-", name.strip().lower().rpartition("/")[2]).removeprefix("meta-")


def _canonical(name: str) -> str | None:
    spellings, plain = _spellings(), _plain(name)
    while plain not in spellings:
        ending = next((ending for ending in _ENDINGS if plain.endswith(ending)), None)
        if ending is None:
            return None
        plain = plain.removesuffix(ending)
    return spellings[plain]


def _found(name: str) -> str:
    found = _canonical(name)
    if found is None:
        # Dashes and points as they are: `nearest` reads names of settings.
        hint = nearest(_plain(name).replace("-", "_"), [spelling.replace("-", "_") for spelling in _spellings()])
        raise ConfigError(
            f"No model {name} is known by name.",
            hint.strip().replace("_", "-") or f"Give a model directory, or one of: {', '.join(names())}.",
        )
    return found


def _values(name: str) -> dict[str, Any]:
    table = _tables()[name]
    like: dict[str, Any] = _values(table["like"]) if "like" in table else {}
    return {**like, **table["config"]}
