"""What fits on which card: the tables of docs/{en,zh}/planning.md, made by what `onecard plan` calls.

    .venv/bin/python benchmarks/fits.py                  all tables, some minutes
    .venv/bin/python benchmarks/fits.py recipes          one of: recipes, largest

Predictions only: none of these cards was at hand. The same prediction serves every card that it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from onecard.config import PlanConfig
from onecard.plan import architectures, questions
from onecard.plan.speed import energy
from onecard.plan.targets import target
from onecard.settings import read_toml
from onecard.train.forecast import memory
from onecard.train.plan import with_table
from onecard.train.planned import MemoryOf, Planned, planned, remembered
from onecard.train.recipe_subjects import Recipe, of_recipe
from onecard.train.subjects import of_model

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes" / "cards"
CARDS = ("RTX 3090", "RTX 4090", "RTX 5090")
GIB = 1 << 30
# Recipes for the largest card alone.
FOR_32_GB = ("pretrain-2b",)
ROW_TOKENS = 2048
# Models that people fine-tune today.
FAMILIES = ("llama-3", "qwen2.5", "qwen3", "mistral", "gemma-2-", "gemma-3", "phi-4")
Table = tuple[list[str], list[list[str]]]


def recipes() -> list[Path]:
    """Every recipe for cards, the small models first."""
    kinds = ("pretrain", "finetune", "lora", "qlora", "bert", "gpt2")

    def place(path: Path) -> tuple[int, float]:
        kind, _, size = path.stem.partition("-")
        number = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]] if size[-1:] in ("m", "b") else 0.0
        return kinds.index(kind), number

    return sorted(RECIPES.glob("*.toml"), key=place)


def cards_of(path: Path) -> tuple[str, ...]:
    """The cards that a recipe is for."""
    return CARDS[-1:] if path.stem in FOR_32_GB else CARDS


def plan_of(path: Path, card: str, memory_of: MemoryOf) -> Planned:
    """What `onecard plan RECIPE --card CARD` finds, without alternatives."""
    recipe, on = Recipe(path, read_toml(path)), target(card)
    config = with_table(PlanConfig(recipe=path, card=card), recipe)
    subject = of_model(config, on, path.parent) if config.model else of_recipe(recipe, config, on)[0]
    return planned(subject, on, memory_of, alternatives=False)


# --- tables -------------------------------------------------------------------------------------------------------


def recipe_table(memory_of: MemoryOf) -> Table:
    """A row a recipe: what it needs, and on each card what stays free, hours and energy."""
    rows = []
    for path in recipes():
        cells = [f"[{path.stem}](../../recipes/cards/{path.name})"]
        shown: dict[str, str] = {}
        for card in cards_of(path):
            made = plan_of(path, card, memory_of)
            _say(f"{path.stem} on {card}: {made.chosen.memory.needed_bytes / GIB:.2f} GiB, fits: {made.fits}")
            if len(cells) == 1:
                cells.append(f"{made.chosen.memory.needed_bytes / GIB:.1f}")
                cells.append(f"{(made.tokens or 0) / 1e9:.3g}B")
            shown[card] = _cell(made)
        rows.append([*cells, *(shown.get(card, "") for card in CARDS)])
    return ["recipe", "needs, GiB", "tokens", *CARDS], rows


def _cell(made: Planned) -> str:
    if not made.fits:
        return "-"
    seconds = made.seconds or 0.0
    taken = energy(made.chosen.speed, seconds)
    hours = f"{seconds / 3600:,.0f} h" if seconds > 36_000 else f"{seconds / 3600:.1f} h"
    return f"{made.chosen.margin_bytes / GIB:.1f} / {made.chosen.speed.tokens_per_second:,.0f} / {hours} / " + (
        "?" if taken.kwh is None else f"{taken.kwh:,.1f} kWh"
    )


def largest_table(memory_of: MemoryOf) -> Table:
    """The largest known model a card and method, at rows of 2,048 tokens."""
    rows = []
    for method in ("full", "lora", "qlora"):
        cells = [method]
        for card in CARDS:
            answer = questions.largest_model(
                target(card),
                memory_of,
                method=method,  # type: ignore[arg-type]
                context_tokens=ROW_TOKENS,
                names=[name for name in architectures.names() if name.startswith(FAMILIES)],
            )
            _say(answer.text)
            cells.append(_named(answer))
        rows.append(cells)
    return ["method", *CARDS], rows


def _named(answer: questions.Answer) -> str:
    if answer.candidate is None:
        return "-"
    billions = architectures.published_parameters(str(answer.value)) / 1e9
    return f"{answer.value} ({billions:.1f}B, {answer.candidate.memory.needed_bytes / GIB:.1f} GiB)"


TABLES: dict[str, Callable[[MemoryOf], Table]] = {
    "recipes": recipe_table,
    "largest": largest_table,
}
CHINESE = {
    "recipe": "配方",
    "needs, GiB": "需要（GiB）",
    "tokens": "词元",
    "method": "方式",
    "full": "全部权重",
    "lora": "LoRA",
    "qlora": "QLoRA",
}


def markdown(table: Table, words: dict[str, str]) -> str:
    """The table in Markdown, with words replaced cell by cell."""
    columns, rows = table
    lines = [[words.get(cell, cell) for cell in row] for row in (columns, *rows)]
    made = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([made[0], "| " + " | ".join("---" for _ in columns) + " |", *made[1:]])


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of a table."""
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"{path} has no {begin} and {end}"
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main(names: list[str]) -> None:
    """Make the tables asked for, or all, and put them into both documents."""
    memory_of = remembered(memory)
    for name in names or list(TABLES):
        table = TABLES[name](memory_of)
        for language, words in (("en", {}), ("zh", CHINESE)):
            put(HERE.parent / "docs" / language / "planning.md", name, markdown(table, words))


if __name__ == "__main__":
    main(sys.argv[1:])
