"""A prepared training: what a verb decides and the session carries out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard.config import TrainingConfig
from onecard.data.packing import Rows
from onecard.settings import Auto
from onecard.train.directory import RunDirectory
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
    packing: bool | Auto = "auto"
    saving: Callable[[], AbstractContextManager[object]] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)
    # Done to the trained model before it is saved, such as merging adapters into it.
    complete: Callable[[Any], None] | None = None
