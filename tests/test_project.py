"""`new`: a project that runs as it is, and a recipe in which every default is written as it is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onecard import cli
from onecard.config import CleanConfig, NewConfig
from onecard.errors import ArtifactError
from onecard.pipeline import SET_BY_RUN, STAGES
from onecard.project import FOR_LATER, new, recipe_text
from onecard.settings import Source, build

TEXT = recipe_text()
COMMENTED = re.findall(r"(?m)^#(\w+) = ", TEXT)
KINDS = {stage.name: stage.configuration for stage in STAGES if stage.name not in FOR_LATER}


def uncommented(wanted: int | None) -> dict[str, Any]:
    """The recipe with its `wanted`-th default (or all) uncommented."""
    count = -1

    def choose(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return match[1] if wanted in (None, count) else match[0]

    return tomllib.loads(re.sub(r"(?m)^#(\w+ = )", choose, TEXT))


def check(recipe: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        made = build(kind, recipe[name])
        for key, value in recipe[name].items():
            default = kind.model_fields[key].default
            if f"\n{key} = " not in TEXT and key not in ("corpus", "tokenizer", "model", "base", "questions"):
                assert getattr(made, key) == default, (name, key, value)


@pytest.mark.parametrize("wanted", range(len(COMMENTED)), ids=lambda n: f"{n}-{COMMENTED[n]}")
def test_each_default_may_be_uncommented(wanted: int) -> None:
    check(uncommented(wanted))


def test_the_recipe_as_written_and_with_all_defaults_uncommented() -> None:
    check(tomllib.loads(TEXT))
    check(uncommented(None))


def test_every_setting_of_every_stage_is_there() -> None:
    recipe = uncommented(None)
    for name, kind in KINDS.items():
        assert set(recipe[name]) == set(kind.model_fields) - SET_BY_RUN
    assert recipe["output"] == "run"
    assert recipe["ask"]["questions"]


def test_every_setting_of_a_source_is_explained_and_its_table_may_be_uncommented() -> None:
    assert tomllib.loads(TEXT)["clean"]["sources"] == ["data/text"]
    recipe = tomllib.loads(re.sub(r"(?m)^  #\{", "  {", TEXT))
    plain, table = recipe["clean"]["sources"]
    assert plain == "data/text"
    assert list(table) == list(Source.model_fields)
    assert build(CleanConfig, recipe["clean"]).sources[1] == Source(path=table["path"])
    for name in Source.model_fields:
        assert f"\n#   {name}: " in TEXT


def test_it_is_pleasant_to_read() -> None:
    lines = TEXT.splitlines()
    # A list stays on one line, so that one # removed is enough.
    assert max(len(line) for line in lines if not re.match(r"#?\w+ = \[|  #\{", line)) <= 120
    first = [next(line for line in TEXT.split(f"[{name}]")[1].splitlines() if " = " in line) for name in KINDS]
    assert first[0] == "sources = ["
    assert first[2] == "time_limit_minutes = 30"
    for index, line in enumerate(lines):
        if re.match(r"#?\w+ = ", line) and not line.startswith("questions = "):
            assert lines[index - 1].startswith("# "), line


def test_a_project_has_a_recipe_folders_and_a_page(tmp_path: Path) -> None:
    made = new(NewConfig(directory=tmp_path / "数据 集" / "模型　一"))
    folder = Path(made["directory"])
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "README.md", "data", "data/chats", "data/text", "recipe.toml",
    ]  # fmt: skip
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# 模型　一: a onecard project")
    assert (folder / "recipe.toml").read_text(encoding="utf-8") == TEXT


def test_an_empty_folder_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").mkdir()
    before = (tmp_path / "p").stat().st_ino
    monkeypatch.chdir(tmp_path / "p")
    new(NewConfig(directory=Path()))
    assert (tmp_path / "p").stat().st_ino == before
    assert (tmp_path / "p" / "README.md").read_text(encoding="utf-8").startswith("# p: ")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="not empty"):
        new(NewConfig(directory=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_to_go_on_with_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", str(tmp_path / "a b")]) == 0
    assert f"onecard run '{tmp_path}/a b/recipe.toml'" in capsys.readouterr().out


def test_a_new_project_without_text_says_where_it_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(NewConfig(directory=tmp_path / "p"))
    assert cli.main(["run", str(tmp_path / "p" / "recipe.toml")]) == 2
    assert "data/text" in capsys.readouterr().err
