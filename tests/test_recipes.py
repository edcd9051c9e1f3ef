"""The recipes of recipes/: each is read and configured as `onecard run` does, and the rows beside them are usable."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onecard.data.chats import read_chats
from onecard.data.preferences import read_comparisons
from onecard.pipeline import STAGES, _check_names, _Walk
from onecard.settings import Settings, Source, build, read_toml

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
# What `make recipe-models` brings, and what its comments tell the user to bring.
BROUGHT = ("models/smollm2.gguf", "models/smollm2-tools", "models/minilm", "data/medical/", "data/movies/")


def configured(path: Path) -> dict[str, Settings]:
    """The settings of each stage, as `onecard run` reads them before its first stage."""
    tables = read_toml(path)
    _check_names(path, tables)
    walk = _Walk(path, tables, path.parent, path.parent / "nowhere")
    made = {stage.name: walk.configure(stage) for stage in STAGES if stage.name in tables}
    walk.check_lengths(made)
    if "ask" in tables:
        from onecard.config import AskConfig

        build(AskConfig, tables["ask"])
        walk.model_directory()
    return made


def test_there_is_a_recipe_for_every_common_evening() -> None:
    assert {path.stem for path in RECIPES} == {
        "quickstart", "medical-zh", "persona", "sentiment-zh", "sentiment-en", "preference", "continued", "tools",
    }  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_walked(path: Path) -> None:
    stages = configured(path)
    assert stages
    # Every path in it lies in the repository, or is named where the recipe says what to bring.
    text = path.read_text(encoding="utf-8")
    for place in re.findall(r'"((?:models|data)/[^"]+)"', text):
        assert (FOLDER / place).exists() or place.startswith(BROUGHT), place
        if place.startswith(BROUGHT):
            comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
            assert "make recipe-models" in comments or place.rpartition("/")[2] in comments, place


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_first_lines_say_what_it_is_and_how_to_run_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = "\n".join(lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))])
    assert f"onecard run recipes/{path.name}" in head or "make quickstart" in head
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_on_recipes_names_each_of_them(language: str) -> None:
    page = (FOLDER.parent / "docs" / language / "recipes.md").read_text(encoding="utf-8")
    for path in RECIPES:
        assert f"recipes/{path.name}" in page, path.name


def refuse(rejection: object) -> None:
    raise AssertionError(rejection)


def test_the_rows_are_chats_calls_and_preferences() -> None:
    persona = list(read_chats([Source(path=str(FOLDER / "data" / "persona.jsonl"))], strict=True, reject=refuse))
    assert len(persona) == 36
    tools = list(read_chats([Source(path=str(FOLDER / "data" / "tools.jsonl"))], strict=True, reject=refuse))
    calls = [call for chat in tools for turn in chat.messages for call in turn.get("tool_calls", [])]
    assert (len(tools), len(calls)) == (32, 26)
    for chat in tools:
        assert chat.tools is not None
        known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        for turn in chat.messages:
            for call in turn.get("tool_calls", []):
                needed = known[call["function"]["name"]]
                assert set(call["function"]["arguments"]) == set(needed["required"])
    pairs = list(
        read_comparisons([Source(path=str(FOLDER / "data" / "preferences.jsonl"))], strict=True, reject=refuse)
    )
    assert len(pairs) == 32
    for pair in pairs:
        assert pair.chosen and pair.rejected
        assert len(pair.chosen[-1]["content"]) < len(pair.rejected[-1]["content"])
        assert pair.chosen[-1]["content"] in pair.rejected[-1]["content"]  # no fact is taught wrong
    for name in ("persona", "tools", "preferences"):
        lines = (FOLDER / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len({json.dumps(json.loads(line), sort_keys=True) for line in lines}) == len(lines)
