"""A prepared training: what a verb decides and the session carries out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard.config import TrainingConfig
from onecard.data.packing import Rows
from onecard.plan.job import Job
from onecard.settings import Auto
from onecard.train.directory import RunDirectory
from onecard.train.objectives import NextToken, Objective
from onecard.train.precision import Precision


@dataclass(frozen=True)
class Defaults:
    """What `auto` becomes for a verb and a model."""

    learning_rate: float
    muon_learning_rate: float
    num_epochs: float
    optimizer: str
    update_tokens: int


@dataclass
class Task:
    """A prepared training: everything the loop needs that a verb decides.

    `start` gives a new model weights that are costly to make: it is left out where a checkpoint brings them.
    """

    verb: str
    config: TrainingConfig
    run: RunDirectory
    precision: Precision
    tokenizer: Any
    build_model: Callable[[], Any]
    rows: Rows
    held_out: Rows | None
    weights: list[float]
    defaults: Defaults
    parents: list[Path]
    sample_prompts: list[tuple[str, list[int]]]
    start: Callable[[Any], None] | None = None
    # The transformers configuration of the model: its memory is predicted before it is built.
    architecture: Callable[[], Any] | None = None
    # What lies on the device beside the model that is trained, such as a teacher, in bytes by name, for an update.
    beside: Callable[[Job], dict[str, int]] | None = None
    packing: bool | Auto = "auto"
    # Made with whether rows are padded; one that says so takes packed rows apart itself.
    objective: Callable[[bool], Objective] = NextToken
    takes_rows_apart: bool = False
    # False: the model names classes and writes nothing.
    writes: bool = True
    # Found out once the model is there: it cannot keep the documents of a packed row apart.
    padded: bool = False
    saving: Callable[[], AbstractContextManager[object]] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)
    # Looks at the trained model before it is saved; what it gives stands in the result, and it may write into the run.
    examine: Callable[[Any], dict[str, Any]] | None = None
    # Makes of the trained model the one that is saved, such as by merging adapters into it; and what there is to tell.
    complete: Callable[[Any], tuple[Any, dict[str, Any]]] | None = None
