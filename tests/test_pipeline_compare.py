"""The stage [compare] of a recipe: what it takes where nothing is said, and when it is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.config import CompareConfig, RunConfig
from onecard.errors import ConfigError
from onecard.pipeline import run

RECIPE = """
output = "out"
[clean]
sources = ["texts"]
near_duplicates = false
[finetune]
model = "base"
sources = ["chats"]
[compare]
rows = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "project"
    for name in ("texts", "chats", "base"):
        (made / name).mkdir(parents=True)
    (made / "base" / "config.json").write_text("{}")
    (made / "texts" / "a.txt").write_text("A farmer kept twelve geese by the mill, and sold their feathers in spring.")
    (made / "recipe.toml").write_text(RECIPE)

    def tune(config: Any) -> dict[str, Any]:
        with artifact.new_directory(config.output) as temporary:
            (temporary / "weights").write_text("made")
            artifact.write_manifest(temporary, "run", settings={})
        return {}

    monkeypatch.setattr("onecard.train.finetune.finetune", tune)
    return made


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[CompareConfig]:
    given: list[CompareConfig] = []

    def verb(config: CompareConfig) -> dict[str, Any]:
        given.append(config)
        with artifact.new_directory(config.output) as temporary:
            artifact.write_manifest(temporary, "comparison", settings={}, result={"verdict": ["better"]})
        return {}

    monkeypatch.setattr("onecard.evaluate.compare.compare", verb)
    return given


def states(folder: Path, *overrides: str) -> dict[str, str]:
    found: dict[str, str] = run(RunConfig(recipe=folder / "recipe.toml", set=list(overrides)))["states"]
    return found


def test_it_takes_the_rows_and_the_base_of_the_fine_tuning_and_the_text_of_the_corpus(
    folder: Path, compared: list[CompareConfig]
) -> None:
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert states(folder) == {"clean": "done", "finetune": "done", "compare": "done"}
    [config] = compared
    assert (config.base, config.model) == (folder / "base", folder / "out" / "finetune")
    assert [source.path for source in config.sources] == [str(folder / "chats")]
    assert [source.path for source in config.text] == [str(folder / "out" / "corpus")]
    assert config.rows == 7
    assert states(folder)["compare"] == "skipped"
    assert states(folder, "compare.rows=8")["compare"] == "done"
    (folder / "held.jsonl").write_text('{"question": "c", "answer": "d"}\n')
    states(folder, 'compare.sources=["held.jsonl"]')
    assert [source.path for source in compared[-1].sources] == [str(folder / "held.jsonl")]


def test_without_chats_there_is_nothing_to_compare(
    folder: Path, compared: list[CompareConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert states(folder) == {"clean": "done", "finetune": "left out", "compare": "left out"}
    assert compared == []
    assert "compare is left out" in capsys.readouterr().err


def test_without_a_fine_tuning_it_needs_a_model(folder: Path) -> None:
    (folder / "recipe.toml").write_text('output = "out"\n[compare]\nsources = ["chats"]\n')
    with pytest.raises(ConfigError, match=r"\[compare\] of .* needs model"):
        states(folder)
