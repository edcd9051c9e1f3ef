"""The updates that a recipe's stages would make: pretrain, finetune, align, classify, one after another.

In: a recipe and the settings of `plan`. Out: a `Subject` for each stage. No data is needed: what a corpus or a
tokenizer would tell is taken from them where they are there, and is said to be unknown where not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onecard import artifact
from onecard.config import (
    AlignConfig,
    ClassifyConfig,
    FinetuneConfig,
    FurtherConfig,
    PlanConfig,
    PretrainConfig,
    TrainingConfig,
)
from onecard.errors import ArtifactError, ConfigError
from onecard.model.presets import Preset, preset
from onecard.plan import architectures
from onecard.plan.candidates import formats
from onecard.plan.job import Engine, Job, Target
from onecard.settings import build, relative_to
from onecard.train import foresight
from onecard.train.run_plan import batch_shape
from onecard.train.subjects import UPDATE_TOKENS, USUAL_LENGTH, Subject, of_preset

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
# The stages that train, in the order of a run.
STAGES: dict[str, type[TrainingConfig]] = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "align": AlignConfig,
    "classify": ClassifyConfig,
}
# What each of them takes for rows and updates where nothing is said: tokens of a row, tokens of an update.
USUAL: dict[str, tuple[int, int]] = {
    "finetune": (USUAL_LENGTH, UPDATE_TOKENS),
    "align": (2 * USUAL_LENGTH, 16384),
    "classify": (512, 4096),
}


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


def of_recipe(recipe: Recipe, config: PlanConfig, target: Target) -> list[Subject]:
    """The stages of a recipe that train, in their order; settings given to `plan` itself win over those of a stage."""
    present = [stage for stage in STAGES if stage in recipe.tables]
    if not present:
        raise ConfigError(
            f"{recipe.path} trains nothing.", "Plan a recipe with [pretrain] or [finetune], or give --model."
        )
    changes = {name: getattr(config, name) for name in SHARED if name in config.model_fields_set}
    if config.method != "full":
        changes.setdefault("lora_rank", config.lora_rank)
        changes["quantization"] = "nf4" if config.method == "qlora" else "none"
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
            kind = STAGES[stage]
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
        tokens_from="as asked" if config.tokens is not None else f"{passes:g} passes over the corpus",
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
    stage: str, settings: FurtherConfig, config: PlanConfig, target: Target, earlier: list[Subject]
) -> Subject:
    model = _tuned(settings.model, earlier)
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    usual, update_tokens = USUAL[stage]
    length = min(usual, positions or usual) if settings.max_length == "auto" else settings.max_length
    width = int(text.hidden_size)
    small = width <= 512 and not settings.lora_rank
    return _of_stage(
        stage,
        settings,
        model,
        target,
        row_tokens=length,
        update_tokens=2048 if width <= 256 and stage == "finetune" else update_tokens,
        optimizer="muon" if small and stage == "finetune" else "adamw",
        tokens=config.tokens,
        tokens_from="as asked",
    )


def _tuned(path: Path, earlier: list[Subject]) -> Any:
    """The model that a stage begins with: of the stage before it, of a directory, or the published one of that name."""
    made = {subject.name: subject.job.model for subject in earlier}
    if path.name in made:
        return made[path.name]
    if (path / "config.json").exists() or (path / "model" / "config.json").exists():
        from onecard.model.load import load_architecture

        return load_architecture(path)
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
    job = Job(
        model=model,
        batch_size=batch,
        max_length=row_tokens,
        gradient_accumulation_steps=steps,
        packed=getattr(settings, "packing", True) is not False,
        optimizer=optimizer if settings.optimizer == "auto" else settings.optimizer,  # type: ignore[arg-type]
        device=target.device,
        engine=Engine(compiled=settings.compile),
        **foresight.ways_of(usual),
        **foresight.adapters_of(settings),
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
