"""`new` lays out a project: a recipe with every setting explained, folders for text and chats, a page on how to go on.

The recipe is written from the configurations, so that it cannot fall behind them; or from a training file of another
tool (migration/), with what was carried over and what was not.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from onecard import artifact, console
from onecard.config import NewConfig
from onecard.errors import ArtifactError
from onecard.migration.draft import Draft, Note
from onecard.migration.read import draft_of
from onecard.pipeline import SET_BY_RUN, STAGES, Stage
from onecard.settings import NONE, Source

_RUN = "run"
# What a new project sets.
_VALUES: dict[str, dict[str, str]] = {
    "pretrain": {"time_limit_minutes": "30"},
    "finetune": {"sources": '["data/chats"]', "time_limit_minutes": "10"},
}
# What a newcomer changes first, by stage; the rest follows after a line that says so.
_FIRST: dict[str, tuple[str, ...]] = {
    "clean": ("sources", "held_out", "minimum_characters"),
    "tokenizer": ("vocabulary_size",),
    "pretrain": ("time_limit_minutes", "size", "num_epochs", "max_length", "mix"),
    "finetune": ("sources", "time_limit_minutes", "num_epochs", "max_length"),
    "evaluate": ("question_count", "max_new_tokens"),
}
# Stages that need what a newcomer does not have.
FOR_LATER = ("align", "classify", "compare")
_HEAD = """\
# The way from your text to a model that answers, stage by stage:  onecard run recipe.toml
#
# A line such as "#held_out = 0.05" shows a setting at its default: remove the # to change it. After a change, the same
# command makes again what depends on it, and skips the rest. To leave a stage out, remove its whole table.
# Paths are meant from the folder of this file.

# Where all stages write.
output = "run"
"""
_TAIL = """\
# After all stages the model is served on this machine and asked.
[ask]
questions = ["你好", "Who are you?"]
"""
_README = """# {name}: a onecard project

1. Put your text into `data/text/` (.txt, .md, .jsonl, .json, .csv, .tsv, .parquet, also .gz .zst .xz; any encoding).
2. Put questions with answers into `data/chats/`, if you have some, for example lines of
   `{{"question": "...", "answer": "..."}}` in a .jsonl file. Without them the model only continues text.
3. Open `recipe.toml`: every setting is there with its explanation. `time_limit_minutes` says how long to train.
4. `onecard run recipe.toml` makes everything below `run/`; run it again after any change, and only what the change
   touches is made again. Ctrl-C saves; the same command goes on.
5. Look at `run/corpus/report.html`, `run/pretrain/report.html`, `run/evaluation/report.html`.
6. `onecard chat run/finetune` talks to the model (`run/pretrain` if there were no chats).
"""
_MIGRATED = """# {name}: a onecard project

Made of a training file of {tool}. `recipe.toml` holds what was carried over, and at its head what is to be done first
and what was not carried over, with the reasons.

1. `onecard plan recipe.toml --card "RTX 4090"` says what it needs, before anything is there but the recipe.
2. `onecard preview --recipe recipe.toml` shows which tokens a fine-tuning would learn.
3. `onecard run recipe.toml` trains; Ctrl-C saves, the same command goes on.
"""


def new(config: NewConfig) -> dict[str, Any]:
    """Make a project folder: recipe.toml, README.md, and data/text and data/chats where it is not made from a file.

    ArtifactError for a folder that is not empty, ConfigError for a file that is not understood.
    """
    directory = config.directory
    draft = None if config.from_ is None else draft_of(config.from_)
    recipe_of_draft = None if draft is None else draft.text()
    if directory.is_dir() and not any(directory.iterdir()):
        # In place: somebody may be standing in it.
        with artifact.disk_faults(directory):
            _fill(directory, directory, draft, recipe_of_draft)
    elif directory.exists():
        raise ArtifactError(f"{directory} already exists and is not empty.", "Choose another folder.")
    else:
        with artifact.new_directory(directory) as temporary:
            _fill(temporary, directory, draft, recipe_of_draft)
    recipe = directory / "recipe.toml"
    made: dict[str, Any] = {"directory": str(directory), "recipe": str(recipe)}
    if draft is None:
        console.result(f"Made {directory}. Put text into {directory / 'data' / 'text'}, then:")
    else:
        made |= _say_what_became(draft)
        console.result(f"Made {directory}. {'First, in that folder:' if draft.to_do else 'Then:'}")
        for command in draft.to_do:
            console.result(f"  {command}")
        console.result(f"  onecard plan {shlex.quote(str(recipe))}")
    console.result(f"  onecard run {shlex.quote(str(recipe))}")
    return made


def _fill(folder: Path, final: Path, draft: Draft | None, recipe_of_draft: str | None) -> None:
    name = final.resolve().name
    if draft is None or recipe_of_draft is None:
        for part in ("text", "chats"):
            (folder / "data" / part).mkdir(parents=True)
        recipe, page = recipe_text(), _README.format(name=name)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        recipe, page = recipe_of_draft, _MIGRATED.format(name=name, tool=draft.tool)
    artifact.write_text_atomically(folder / "recipe.toml", recipe)
    artifact.write_text_atomically(folder / "README.md", page)


def _say_what_became(draft: Draft) -> dict[str, Any]:
    """What was carried over, what has another name, what was left: tables for a person, lists for --json."""
    if draft.carried:
        names = ", ".join(f"{note.name} = {note.value}" for note in draft.carried)
        console.result(f"Carried over as it was: {names}.")
    console.table(
        f"Carried over from {draft.tool}, under the name it has here",
        ["there", "", "here", ""],
        [[note.name, note.value, note.became, note.why] for note in draft.renamed],
    )
    if draft.left:
        console.table(
            "Not carried over",
            ["there", "", "why"],
            [[note.name, note.value, note.why] for note in draft.left],
        )
    if draft.idle:
        console.note(f"Not needed, or done by itself: {', '.join(draft.idle)}.")

    def listed(notes: list[Note]) -> list[dict[str, str]]:
        return [{"name": n.name, "value": n.value, "setting": n.became, "why": n.why} for n in notes]

    return {
        "tool": draft.tool,
        "carried": listed(draft.carried),
        "renamed": listed(draft.renamed),
        "left": listed(draft.left),
        "not_needed": draft.idle,
        "first": draft.to_do,
    }


def recipe_text() -> str:
    """A recipe with every setting of every stage, its default and its explanation, taken from the configurations."""
    stages = [_stage_text(stage) for stage in STAGES if stage.name not in FOR_LATER]
    return "\n".join([_HEAD, *stages, _TAIL])


def _stage_text(stage: Stage) -> str:
    documentation = (stage.configuration.__doc__ or "").strip().splitlines()[0]
    fields = {name: info for name, info in stage.configuration.model_fields.items() if name not in SET_BY_RUN}
    first = [name for name in _FIRST.get(stage.name, ()) if name in fields]
    later = [name for name in fields if name not in first]
    lines = [f"# {documentation}", f"[{stage.name}]"]
    for name in first:
        lines += ["", *_setting_lines(stage, name, fields[name])]
    if later:
        lines += ["", "# --- seldom changed ---"]
    for name in later:
        lines += _setting_lines(stage, name, fields[name])
    return "\n".join([*lines, ""])


def _setting_lines(stage: Stage, name: str, info: FieldInfo) -> list[str]:
    """The explanation, wrapped, and the setting: set, or its default behind a #."""
    text = (info.description or "") + "."
    default = _as_toml(None if info.is_required() else info.default)
    if name in stage.inputs:
        directories = {made.name: made.directory for made in STAGES}
        default = _as_toml(f"{_RUN}/{directories[stage.inputs[name][0]]}")
        text += " Left out: what the stage before wrote."
    elif stage.name == "evaluate" and name == "questions":
        default = _VALUES["finetune"]["sources"]
        text += " Left out: the sources of [finetune]."
    elif stage.name == "clean" and name == "sources":
        return [*_wrapped(text), *_source_lines()]
    chosen = _VALUES.get(stage.name, {}).get(name)
    return [*_wrapped(text), f"#{name} = {default}" if chosen is None else f"{name} = {chosen}"]


def _source_lines() -> list[str]:
    """The sources of [clean]: the folder of a new project, and behind a # one with all its own settings explained."""
    lines = ["# A source may also be a table with settings of its own, such as the one behind a # below:"]
    for name, info in Source.model_fields.items():
        lines += textwrap.wrap(f"{name}: {info.description}.", 116, initial_indent="#   ", subsequent_indent="#     ")
    settings = ", ".join(
        f"{name} = {_as_toml('data/more' if info.is_required() else info.default)}"
        for name, info in Source.model_fields.items()
    )
    return [*lines, "sources = [", '  "data/text",', f"  #{{{settings}}},", "]"]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text[:1].upper() + text[1:], 116, initial_indent="# ", subsequent_indent="# ")


def _as_toml(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    # JSON writes true, false, numbers, [] and {} as TOML does; no default is a filled table.
    return json.dumps(value, ensure_ascii=False)
