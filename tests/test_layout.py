"""The walls of the house: who may import whom, who prints, what a light path must not load."""

from __future__ import annotations

import ast
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onecard
from onecard import config, settings
from onecard.cli import VERBS

SOURCE = Path(onecard.__file__).parent
# A module imports only what stands to its left, and its own package.
ORDER = [
    "errors",
    "console",
    "settings",
    "config",
    "flags",
    "artifact",
    "report",
    "machine",
    "data",
    "tokenizer",
    "model",
    "plan",
    "train",
    "evaluate",
    "compress",
    "serve",
    "pipeline",
    "migration",
    "project",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("torch", "transformers", "pyarrow", "matplotlib", "numpy", "fastapi")


def part_of(path: Path) -> str:
    """src/onecard/data/clean.py -> data; src/onecard/cli.py -> cli; src/onecard/__init__.py -> ''."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem.removeprefix("__init__")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and part of every import of onecard, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "onecard" else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "onecard" and len(parts) > 1 and not parts[1].startswith("__"):
                yield node.lineno, parts[1]


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    assert {part_of(path) for path in FILES} - {""} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_left(path: Path) -> None:
    own = part_of(path)
    place = ORDER.index(own) if own else -1
    wrong = [
        f"{path.name}:{line} imports {part}"
        for line, part in imports(ast.parse(path.read_text(encoding="utf-8")))
        if part != own and ORDER.index(part) > place
    ]
    assert wrong == []


def test_the_check_of_imports_sees_those_inside_functions() -> None:
    tree = ast.parse(
        "def f():\n    from onecard.train import loop\n    from onecard import console\n    import onecard.serve.chat"
    )
    assert list(imports(tree)) == [(2, "train"), (3, "console"), (4, "serve")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_console_prints(path: Path) -> None:
    if path.name in ("console.py", "cli.py"):
        return
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("write", "writelines", "flush"):
            inner = node.value
            if isinstance(inner, ast.Attribute) and inner.attr in ("stdout", "stderr"):
                found.append(node.lineno)
    assert found == []


def test_every_verb_names_a_function_a_configuration_and_its_table() -> None:
    for name, entry in VERBS.items():
        module, function = entry.function.split(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert issubclass(getattr(config, entry.configuration), settings.Settings), name


def in_a_child(arguments: list[str]) -> tuple[list[str], str, float]:
    """Run `onecard` in a child; returns the heavy modules it loaded, its stdout, and its CPU time in seconds."""
    code = (
        "import json, sys\n"
        "from onecard import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as leave:\n    assert leave.code in (0, None)\n"
        "sys.stderr.write(json.dumps(sorted(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env={**os.environ}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stderr), done.stdout, seconds


def test_the_overview_is_light_and_names_every_verb() -> None:
    modules, text, seconds = in_a_child(["--help"])
    assert not {*HEAVY, "pydantic", "rich"} & set(modules)
    assert all(f"  {verb} " in text for verb in VERBS)
    assert seconds < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_is_light_and_shows_every_setting(verb: str) -> None:
    modules, text, _ = in_a_child([*verb.split(), "--help"])
    assert not set(HEAVY) & set(modules)
    for name, info in getattr(config, VERBS[verb].configuration).model_fields.items():
        extra = info.json_schema_extra
        shown = (extra["metavar"] or name.upper()) if extra["positional"] else "--" + name.rstrip("_").replace("_", "-")
        assert shown in text, name
        # argparse wraps: the words are compared, not the lines.
        assert info.description.replace("-", "").split()[-1] in text.replace("-", ""), name


def test_looking_at_a_run_and_changing_it_is_light(tmp_path: Path) -> None:
    plan = {"verb": "pretrain", "asked": {"size": "2M", "weight_decay": 0.1, "max_steps": "auto"}, "max_steps": 5}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for words in (["status"], ["pause"], ["set", "weight_decay=0.2"]):
        modules, text, seconds = in_a_child([words[0], str(tmp_path), *words[1:]])
        assert not set(HEAVY) & set(modules), words
        assert "crashed" in text or "weight_decay: 0.1 -> 0.2" in text
        assert seconds < 1
