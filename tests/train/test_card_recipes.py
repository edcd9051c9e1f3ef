"""Every recipe for cards is planned by the engine's own forecast and fits the cards that it is for, with a margin."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.config import PlanConfig
from onecard.plan.job import Memory
from onecard.plan.targets import target
from onecard.settings import read_toml
from onecard.train.forecast import memory
from onecard.train.plan import with_table
from onecard.train.planned import MemoryOf, Planned, planned, remembered
from onecard.train.recipe_subjects import Recipe, of_recipe
from onecard.train.subjects import of_model

FOLDER = Path(__file__).parents[2] / "recipes" / "cards"
RECIPES = sorted(FOLDER.glob("*.toml"))
# What the context of CUDA and the libraries take at most beside what is planned, in a share of the card: MARGIN.
LEAST_FREE = 0.05


@pytest.fixture(scope="module")
def memory_of() -> MemoryOf:
    return remembered(memory)


def plan_of(path: Path, card: str, memory_of: MemoryOf) -> Planned:
    recipe, on = Recipe(path, read_toml(path)), target(card)
    config = with_table(PlanConfig(recipe=path, card=card), recipe)
    subjects = [of_model(config, on, path.parent)] if config.model else of_recipe(recipe, config, on)
    assert len(subjects) == 1
    return planned(subjects[0], on, memory_of, alternatives=False)


def test_there_is_a_recipe_for_every_kind_of_work() -> None:
    assert {path.stem for path in RECIPES} == {
        "pretrain-125m",
        "pretrain-350m",
        "pretrain-1b",
        "pretrain-2b",
        "finetune-1b",
        "finetune-3b",
        "lora-8b",
        "qlora-14b",
        "qlora-32b",
        "bert-large",
        "gpt2",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_with_a_margin(path: Path, memory_of: MemoryOf) -> None:
    cards = ("RTX 5090",) if path.stem == "pretrain-2b" else ("RTX 3090", "RTX 4090", "RTX 5090")
    for card in cards:
        made = plan_of(path, card, memory_of)
        assert made.fits, card
        assert made.chosen.margin_bytes >= LEAST_FREE * made.target.capacity_bytes, card
        assert made.seconds is not None and made.chosen.speed.watts is not None
        # As they are written: nothing was chosen in their stead.
        assert made.chosen.job.batch_size * made.chosen.job.gradient_accumulation_steps == made.subject.rows_per_update


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_leaves_nothing_about_memory_to_chance(path: Path) -> None:
    """The settings are fixed, so that a plan of another day or card is of the same update."""
    asked = []

    def spy(job: object) -> Memory:
        asked.append(job)
        return Memory(1, 1, 0, {})

    plan_of(path, "RTX 5090", spy)
    assert len(asked) == 1


def test_the_guides_own_settings_of_2b_are_kept() -> None:
    table = read_toml(FOLDER / "pretrain-2b.toml")["pretrain"]
    assert (table["batch_size"], table["gradient_accumulation_steps"], table["learning_rate"]) == (12, 4, 6e-5)


@pytest.mark.parametrize("path", [path for path in RECIPES if "output" in read_toml(path)], ids=lambda path: path.stem)
def test_a_recipe_can_be_walked(path: Path) -> None:
    """What `onecard run` reads before its first stage: names, settings, lengths."""
    from onecard.pipeline import STAGES, _check_names, _Walk

    tables = read_toml(path)
    _check_names(path, tables)
    walk = _Walk(path, tables, path.parent, path.parent / "nowhere")
    for stage in STAGES:
        if stage.name in tables:
            walk.configure(stage)
