"""What the planner is asked about: the update of a recipe's stage, or of a model by name, with what is fixed of it.

In: the settings of `plan`, and for a recipe those of its stages. Out: a `Subject` for each. No data is needed: what a
corpus or a tokenizer would tell is taken from them where they are there, and is said to be unknown where not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onecard import artifact
from onecard.config import AlignConfig, FinetuneConfig, PlanConfig, PretrainConfig, TrainingConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.presets import Preset, preset
from onecard.plan import architectures
from onecard.plan.candidates import formats
from onecard.plan.job import Engine, Job, Target
from onecard.settings import build, relative_to
from onecard.train import foresight
from onecard.train.run_plan import batch_shape

# Tokens of a row, and of an update, where a verb takes the same for every open model (see finetune.py).
USUAL_LENGTH = 1024
UPDATE_TOKENS = 8192
BYTES_PER_TOKEN = 3.6  # English and Chinese text, vocabularies of tens of thousands
# Settings of `plan` that a training verb has under the same name.
SHARED = (
    "lora_rank",
    "target_modules",
    "max_length",
    "batch_size",
    "gradient_accumulation_steps",
    "precision",
    "optimizer",
    "optimizer_states",
    "optimizer_in_backward",
    "gradients",
    "activation_checkpointing",
    "activation_offload",
    "activation_compression",
    "compile",
    "time_limit_minutes",
)


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


# --- a model ------------------------------------------------------------------------------------------------------


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
        tokens_from="tokens" if config.tokens else "",
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
    if job.method == "lora" and usual == "bf16":
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


# --- a recipe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A recipe as a run reads it: its tables, where it lies, where its stages write."""

    path: Path
    tables: dict[str, Any]

    @property
    def output(self) -> Path:
        """Where a run of it writes."""
        named = self.path.parent / Path(self.tables.get("output", f"runs/{self.path.stem}")).expanduser()
        return Path(os.path.normpath(named))

    def settings(self, stage: str, kind: type[TrainingConfig], changes: dict[str, Any], **inputs: Path) -> Any:
        """The configuration of a stage with changes; inputs that it does not name are those of earlier stages."""
        values = relative_to(self.path.parent, kind, self.tables[stage])
        values |= {name: value for name, value in changes.items() if name in kind.model_fields}
        for name, place in inputs.items():
            values.setdefault(name, place)
        for name in ("output", "overwrite"):
            values.pop(name, None)
        return build(kind, values, where=f"[{stage}] of {self.path}")


STAGES = ("pretrain", "finetune", "align")


def of_recipe(recipe: Recipe, config: PlanConfig, target: Target) -> list[Subject]:
    """The stages of a recipe that train, in their order; settings given to `plan` itself win over those of a stage."""
    present = [stage for stage in STAGES if stage in recipe.tables]
    if not present:
        raise ConfigError(
            f"{recipe.path} trains nothing.", "Plan a recipe with [pretrain] or [finetune], or give --model."
        )
    changes = {name: getattr(config, name) for name in SHARED if name in config.model_fields_set}
    if config.method == "lora":
        changes.setdefault("lora_rank", config.lora_rank)
    made: list[Subject] = []
    for stage in present:
        if stage == "pretrain":
            settings = recipe.settings(
                stage,
                PretrainConfig,
                changes,
                corpus=recipe.output / "corpus",
                tokenizer=recipe.output / "tokenizer",
            )
            made.append(_of_pretraining(recipe, settings, config, target))
        else:
            kind = FinetuneConfig if stage == "finetune" else AlignConfig
            settings = recipe.settings(stage, kind, changes, model=recipe.output / _before(stage, present))
            made.append(_of_tuning(stage, settings, config, target, made))
    return made


def _before(stage: str, present: list[str]) -> str:
    earlier = present[: present.index(stage)]
    return earlier[-1] if earlier else "pretrain"


def _of_pretraining(recipe: Recipe, settings: PretrainConfig, config: PlanConfig, target: Target) -> Subject:
    from onecard.train import pretrain

    vocabulary = _vocabulary(recipe, settings)
    text_tokens = _corpus_tokens(settings)
    rate = max(target.flops_per_second.values())
    shape = _shape(settings, config, target, vocabulary, text_tokens, rate)
    length = shape.context_tokens if settings.max_length == "auto" else settings.max_length
    passes = pretrain.EPOCHS if settings.num_epochs == "auto" else settings.num_epochs
    seen = config.tokens if config.tokens is not None or text_tokens is None else passes * text_tokens
    if settings.max_steps != "auto":
        seen = float(settings.max_steps * shape.update_tokens)
    limit = _limit(settings)
    work = shape.training_flops_per_token(vocabulary, length / 2) * (float("inf") if seen is None else seen)
    if pretrain.starts_from_counts(settings, shape, vocabulary, work if limit is None else min(work, limit * rate)):
        shape = replace(shape, tied=False)
    return _of_stage(
        "pretrain",
        settings,
        of_preset(shape, vocabulary=vocabulary, positions=length),
        target,
        row_tokens=length,
        update_tokens=shape.update_tokens,
        optimizer="muon",
        tokens=config.tokens if config.tokens is not None or text_tokens is None else passes * text_tokens,
        tokens_from="tokens" if config.tokens is not None else f"{passes:g} passes over the corpus",
    )


def _shape(
    settings: PretrainConfig,
    config: PlanConfig,
    target: Target,
    vocabulary: int,
    text_tokens: float | None,
    rate: float,
) -> Preset:
    if settings.size != "auto":
        return preset(settings.size)
    from onecard.plan.speed import choose_size

    assert settings.time_limit_minutes is not None, "the configuration has seen to it"
    return choose_size(
        seconds=settings.time_limit_minutes * 60,
        flops_per_second=rate,
        device=target.device,
        vocabulary=vocabulary,
        tokens=int(text_tokens or config.tokens or 10**12),
        context_tokens=None if settings.max_length == "auto" else settings.max_length,
    )


def _of_tuning(
    stage: str, settings: FinetuneConfig, config: PlanConfig, target: Target, earlier: list[Subject]
) -> Subject:
    model = _tuned(settings.model, earlier)
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    usual = USUAL_LENGTH if stage == "finetune" else 2 * USUAL_LENGTH
    length = min(usual, positions or usual) if settings.max_length == "auto" else settings.max_length
    width = int(text.hidden_size)
    small = width <= 512 and not settings.lora_rank
    return _of_stage(
        stage,
        settings,
        model,
        target,
        row_tokens=length,
        update_tokens=2048 if width <= 256 else UPDATE_TOKENS,
        optimizer="muon" if small and stage == "finetune" else "adamw",
        tokens=config.tokens,
        tokens_from="tokens",
    )


def _tuned(path: Path, earlier: list[Subject]) -> Any:
    """The model that a stage begins with: of the stage before it, of a directory, or the published one of that name."""
    if path.exists() and ((path / "config.json").exists() or (path / "model" / "config.json").exists()):
        from onecard.model.load import load_architecture

        return load_architecture(path)
    if earlier and path.name in (subject.name for subject in earlier):
        return next(subject.job.model for subject in earlier if subject.name == path.name)
    if architectures.known(path.name):
        return architectures.architecture(path.name)
    raise ArtifactError(
        f"There is no model at {path}, and {path.name} is not the name of a published one that is known.",
        "Give the model directory, or name it as its publisher does, such as qwen2.5-1.5b.",
    )


def _of_stage(
    stage: str,
    settings: TrainingConfig,
    model: Any,
    target: Target,
    *,
    row_tokens: int,
    update_tokens: int,
    optimizer: str,
    tokens: float | None,
    tokens_from: str,
) -> Subject:
    """The update that a run of the stage would begin with, on that target; max_steps wins over `tokens`."""
    usual = settings.model_copy(update=foresight.usual_settings(settings))
    batch, steps = batch_shape(usual, row_tokens=row_tokens, update_tokens=update_tokens, device=target.device)
    rank = getattr(settings, "lora_rank", 0)
    job = Job(
        model=model,
        batch_size=batch,
        max_length=row_tokens,
        gradient_accumulation_steps=steps,
        method="lora" if rank else "full",
        lora_rank=rank,
        target_modules=tuple(getattr(settings, "target_modules", ())),
        packed=getattr(settings, "packing", True) is not False,
        optimizer=optimizer if settings.optimizer == "auto" else settings.optimizer,  # type: ignore[arg-type]
        device=target.device,
        engine=Engine(compiled=settings.compile),
        **foresight.ways_of(usual),
    )
    chosen = formats(job, target)[0] if settings.precision == "auto" else settings.precision
    if settings.max_steps != "auto":
        tokens, tokens_from = float(settings.max_steps * batch * steps * row_tokens), "max_steps"
    return Subject(
        name=stage,
        job=replace(job, precision=chosen),  # type: ignore[arg-type]
        fixed=foresight.fixed(settings),
        rows_per_update=batch * steps,
        clipping=settings.max_grad_norm > 0,
        tokens=tokens,
        tokens_from="" if tokens is None else tokens_from,
        limit_seconds=_limit(settings),
        usual_first=True,
    )


def _limit(settings: TrainingConfig) -> float | None:
    fixed = settings.max_steps != "auto" or settings.time_limit_minutes is None
    return None if fixed or settings.time_limit_minutes is None else 60 * settings.time_limit_minutes


def _vocabulary(recipe: Recipe, settings: PretrainConfig) -> int:
    """Of the tokenizer that is there, else of the one that the recipe will make."""
    made = _result(settings.tokenizer).get("vocabulary_size")
    if made is not None:
        return int(made)
    written = recipe.tables.get("tokenizer", {}).get("vocabulary_size")
    if written is not None:
        return int(written)
    from onecard.config import TokenizerTrainConfig

    usual = TokenizerTrainConfig.model_fields["vocabulary_size"].default
    return int(usual) if settings.size == "auto" else preset(settings.size).vocabulary


def _corpus_tokens(settings: PretrainConfig) -> float | None:
    """About how many tokens the corpus has, from what its making and that of the tokenizer wrote down."""
    found = _result(settings.corpus)
    if not found.get("bytes"):
        return None
    each = _result(settings.tokenizer).get("bytes_per_token") or BYTES_PER_TOKEN
    kept = 1 - found.get("held_out", 0) / max(1, found.get("kept", 1))
    tokens: float = found["bytes"] * kept / each
    return tokens


def _result(directory: Path) -> dict[str, Any]:
    try:
        return dict(artifact.read_manifest(directory).result)
    except ArtifactError:
        return {}
