"""Which rows a model learned, from the manifests of its run and of the runs before it.

In: a model. Out: its trainings on chats: the files, and which of their rows were held out. A model that onecard did not
train has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onecard import artifact
from onecard.artifact import Manifest
from onecard.data.split import question_is_held_out
from onecard.evaluate.questions import Question

_MOST_GENERATIONS = 8


@dataclass(frozen=True, slots=True)
class Training:
    """A run that learned from chats: the hashes of its files, and what decided which rows it held out."""

    run: Path
    files: frozenset[str]
    seed: int
    held_out: float


def trainings(model: Path) -> list[Training]:
    """The trainings of a model, the last first: that of its run, and those of the models it began with."""
    found: list[Training] = []
    for run, manifest in runs(model):
        asked = manifest.settings.get("asked", {})
        if "held_out" in asked and "seed" in asked:
            files = frozenset(parent["content_hash"] for parent in manifest.parents)
            found.append(Training(run, files, int(asked["seed"]), float(asked["held_out"])))
    return found


def runs(model: Path) -> list[tuple[Path, Manifest]]:
    """The runs that made a model, the last first, as far back as their directories lie where they were.

    A run is followed to the model that it began with; one that was compressed or merged, to all that it was made of.
    """
    found: dict[Path, Manifest] = {}
    places = [model]
    while places and len(found) < _MOST_GENERATIONS:
        place = places.pop(0)
        run = next((path for path in (place, place.parent) if _is_run(path)), None)
        if run in found or (run is None and not (place / artifact.MANIFEST).is_file()):
            continue
        manifest = artifact.read_manifest(run or place)
        parents = [Path(parent["path"]) for parent in manifest.parents if Path(parent["path"]).is_dir()]
        if run is not None:
            found[run] = manifest
            places += parents[:1]
        elif manifest.kind == "model":
            places += parents
    return list(found.items())


def _is_run(path: Path) -> bool:
    return (path / artifact.MANIFEST).is_file() and artifact.read_manifest(path).kind == "run"


def learned_by(found: Sequence[Training]) -> Callable[[Question], bool]:
    """Whether one of the trainings learned from the row of a question: from its file, of which it was not held out."""
    hashed = functools.cache(lambda file: artifact.hash_file(Path(file)) if Path(file).is_file() else "")

    def learned(question: Question) -> bool:
        return any(
            hashed(question.file) in training.files
            and not question_is_held_out(training.seed, training.held_out, question.messages)
            for training in found
        )

    return learned
