"""What the planner is asked about: an update, what is fixed of it, and how long it goes on; here of a model by name.

In: the settings of `plan`. Out: a `Subject`. Stages of recipes are in recipe_subjects.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onecard.config import PlanConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.presets import Preset, preset
from onecard.plan import architectures
from onecard.plan.candidates import formats
from onecard.plan.job import Engine, Job, Target

# Tokens of a row, and of an update, where a verb takes the same for every open model (see finetune.py).
USUAL_LENGTH = 1024
UPDATE_TOKENS = 8192


@dataclass(frozen=True)
class Subject:
    """An update to be planned. `job` has what auto usually becomes, `fixed` names the settings that are no auto.

    `tokens` are those of the whole training (None: nobody said), `tokens_from` where they come from; `limit_seconds` is
    how long it may take. `usual_first`: a run would take the job as it is, if it fits.
    """

    name: str
    job: Job
    fixed: frozenset[str]
    rows_per_update: int
    clipping: bool = True
    tokens: float | None = None
    tokens_from: str = ""
    limit_seconds: float | None = None
    usual_first: bool = False


def of_model(config: PlanConfig, target: Target, base: Path = Path()) -> Subject:
    """The update of a model by size, directory or name, as `plan` was asked for it; `base`: where paths are meant from.

    Settings left to auto are open to the search.
    """
    model, shape = configuration(config.model, base)
    length = _length(config, model, shape)
    usual = shape.update_tokens if shape is not None else UPDATE_TOKENS
    batch, steps = _split(config, rows=max(1, usual // length))
    adapters = config.method != "full"
    optimizer = config.optimizer
    if optimizer == "auto":
        optimizer = "muon" if shape is not None and not adapters else "adamw"
    ways = {name: getattr(config, name) for name in _WAYS if getattr(config, name) != "auto"}
    job = Job(
        model=model,
        batch_size=batch,
        max_length=length,
        gradient_accumulation_steps=steps,
        method=config.method,
        lora_rank=config.lora_rank if adapters else 0,
        target_modules=tuple(config.target_modules),
        packed=config.packing,
        optimizer=optimizer,
        device=target.device,
        engine=Engine(compiled=config.compile),
        **ways,
    )
    if config.precision == "auto":
        job = _in_usual_format(job, target)
    return Subject(
        name=config.model,
        job=job,
        fixed=_given(config),
        rows_per_update=batch * steps,
        clipping=config.optimizer_in_backward is not True,
        tokens=config.tokens,
        tokens_from="as asked" if config.tokens else "",
    )


_WAYS = (
    "precision",
    "optimizer_states",
    "optimizer_in_backward",
    "gradients",
    "activation_checkpointing",
    "activation_offload",
    "activation_compression",
)


def _given(config: PlanConfig) -> frozenset[str]:
    names = (*_WAYS, "batch_size", "gradient_accumulation_steps")
    # Adapters are beside weights in the format that was chosen for them.
    format_chosen = ("precision",) if config.method != "full" else ()
    return frozenset(name for name in names if getattr(config, name) != "auto") | {*format_chosen}


def _in_usual_format(job: Job, target: Target) -> Job:
    """The format that a run takes; weights that stay as they are need no more than 16 bits where that is fast."""
    usual = formats(job, target)[0]
    if job.method != "full" and usual == "bf16":
        usual = "pure_bf16"
    return replace(job, precision=usual)  # type: ignore[arg-type]


def _split(config: PlanConfig, *, rows: int) -> tuple[int, int]:
    batch, steps = config.batch_size, config.gradient_accumulation_steps
    if batch == "auto":
        return (max(1, rows // steps), steps) if steps != "auto" else (rows, 1)
    return batch, max(1, rows // batch) if steps == "auto" else steps


def _length(config: PlanConfig, model: Any, shape: Preset | None) -> int:
    positions = None if shape is not None else getattr(model.get_text_config(), "max_position_embeddings", None)
    if config.max_length == "auto":
        return shape.context_tokens if shape is not None else min(USUAL_LENGTH, positions or USUAL_LENGTH)
    if positions is not None and config.max_length > positions and not config.longest_context:
        raise ConfigError(
            f"max_length {config.max_length} is more than the {positions} positions of {config.model}.",
            f"Set max_length to at most {positions}.",
        )
    return config.max_length


def configuration(model: str, base: Path = Path()) -> tuple[Any, Preset | None]:
    """The transformers configuration of a size (with its preset), a model directory, or a published model."""
    try:
        shape = preset(model)
    except ConfigError:
        shape = None
    if shape is not None:
        return of_preset(shape, vocabulary=shape.vocabulary, positions=shape.context_tokens), shape
    directory = base / Path(model).expanduser()
    if directory.exists():
        from onecard.model.load import load_architecture

        return load_architecture(directory), None
    if os.sep in model and not architectures.known(model):
        raise ArtifactError(f"There is no model at {directory}.", "Check the path, or name a published model.")
    return architectures.architecture(model), None


def of_preset(shape: Preset, *, vocabulary: int, positions: int) -> Any:
    """The configuration of a model of one's own."""
    from onecard.model.presets import llama_config

    ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return llama_config(shape, vocabulary=vocabulary, max_positions=positions, token_ids=ids)
