"""The plan of a run: every `auto` resolved before the first update, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onecard import console
from onecard.config import TrainingConfig
from onecard.data.batches import RowOrder
from onecard.plan.speed import update_seconds, updates_in_time
from onecard.train.task import Defaults, Task

# Evaluations, samples and checkpoints, as a share of a timed run.
EVALUATION_SHARE = 0.05
# Below so many updates a model has hardly begun to learn, whatever its size.
FEW_UPDATES = 50


def make_plan(
    task: Task, model: Any, *, compiled: bool, time_updates: Callable[[dict[str, Any]], float]
) -> dict[str, Any]:
    """Resolve every `auto`; measure real updates where a time limit decides their number."""
    config, defaults = task.config, task.defaults
    batch, accumulation = batch_shape(
        config,
        row_tokens=task.rows.max_length,
        update_tokens=defaults.update_tokens,
        device=task.precision.device,
    )
    order = RowOrder(task.rows.per_source, task.weights, seed=config.seed, rows_per_update=batch * accumulation)
    plan: dict[str, Any] = {
        "verb": task.verb,
        "batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": optimizer_of(config, defaults),
        "learning_rate": _learning_rate(config, defaults),
        "muon_learning_rate": (
            defaults.muon_learning_rate if config.muon_learning_rate == "auto" else config.muon_learning_rate
        ),
        "activation_checkpointing": config.activation_checkpointing,
        "optimizer_states": config.optimizer_states,
        "precision": task.precision.name,
        "device": task.precision.device,
        "compiled": compiled,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rows_per_epoch": order.rows_per_epoch,
        "updates_per_epoch": order.updates_per_epoch,
        "tokens_per_update": batch * accumulation * task.rows.max_length,
        **task.facts,
    }
    epochs = defaults.num_epochs if config.num_epochs == "auto" else config.num_epochs
    steps = max(1, round(epochs * order.updates_per_epoch)) if config.max_steps == "auto" else config.max_steps
    if config.max_steps != "auto":
        for name, value in (("num_epochs", config.num_epochs), ("time_limit_minutes", config.time_limit_minutes)):
            if value not in ("auto", None):
                console.warn(f"{name} = {value} is not used: max_steps = {steps} fixes the number of updates.")
    # A provisional plan for the timing; the final numbers follow.
    plan |= {"max_steps": steps, "evaluate_every": steps, "save_every": steps}
    limit = config.time_limit_minutes if config.max_steps == "auto" else None
    if limit is not None:
        seconds = time_updates(plan)
        fitting = updates_in_time(limit * 60, seconds, evaluation_share=EVALUATION_SHARE)
        steps = min(steps, fitting)
    else:
        # Nothing depends on it, so nobody has to wait until it is measured.
        seconds = update_seconds(
            parameters=plan["parameters"],
            tokens=plan["tokens_per_update"],
            flops_per_second=task.precision.flops_per_second,
            device=task.precision.device,
        )
    plan |= {"seconds_per_update": seconds, "measured": limit is not None}
    every = config.evaluate_every if config.evaluate_every != "auto" else max(1, -(-steps // 6))
    save = config.save_every if config.save_every != "auto" else max(1, min(steps, round(60 / seconds)))
    return plan | {
        "max_steps": steps,
        "evaluate_every": every,
        "save_every": save,
        "epochs": steps / order.updates_per_epoch,
        "predicted_seconds": steps * seconds / (1 - EVALUATION_SHARE),
        "predicted_tokens_per_second": plan["tokens_per_update"] / seconds,
    }


def optimizer_of(config: TrainingConfig, defaults: Defaults) -> str:
    """What `auto` is for this verb and model."""
    return defaults.optimizer if config.optimizer == "auto" else config.optimizer


def _learning_rate(config: TrainingConfig, defaults: Defaults) -> float:
    return defaults.learning_rate if config.learning_rate == "auto" else config.learning_rate


def batch_shape(config: TrainingConfig, *, row_tokens: int, update_tokens: int, device: str) -> tuple[int, int]:
    """Rows in a micro-batch and micro-batches in an update, so that an update has about `update_tokens` tokens."""
    wanted = max(1, update_tokens // row_tokens)
    most = max(1, (4096 if device == "cpu" else 16384) // row_tokens)
    if config.optimizer_in_backward:  # gradients of several micro-batches cannot be added up
        return (min(most, wanted) if config.batch_size == "auto" else config.batch_size), 1
    if config.batch_size == "auto" and config.gradient_accumulation_steps == "auto":
        batch = min(most, wanted)
        return batch, max(1, wanted // batch)
    if config.batch_size == "auto":
        assert config.gradient_accumulation_steps != "auto"
        return max(1, min(most, wanted // config.gradient_accumulation_steps)), config.gradient_accumulation_steps
    if config.gradient_accumulation_steps == "auto":
        return config.batch_size, max(1, wanted // config.batch_size)
    return config.batch_size, config.gradient_accumulation_steps


def say_plan(task: Task, plan: dict[str, Any]) -> None:
    console.note(
        f"  plan: {plan['parameters'] / 1e6:.1f}M parameters, {plan['max_steps']:,} updates of "
        f"{plan['tokens_per_update']:,} tokens ({plan['epochs']:.2f} epochs), {plan['optimizer']}, "
        f"{plan['precision']}, {'about' if plan['measured'] else 'very roughly'} "
        f"{console.format_duration(plan['predicted_seconds'])} at "
        f"{plan['predicted_tokens_per_second']:,.0f} tokens/s"
    )
    if "predicted_peak_memory_bytes" in plan:
        parts = sorted(plan["predicted_memory"].items(), key=lambda part: -part[1])
        console.note(
            f"  memory: {console.format_bytes(sum(size for _, size in parts))} ("
            + ", ".join(f"{kind} {console.format_bytes(size)}" for kind, size in parts if size)
            + f"); {console.format_bytes(plan['free_memory_bytes'])} are free"
        )
    limit = task.config.time_limit_minutes
    if limit is not None and plan["predicted_seconds"] < 0.8 * 60 * limit and task.config.max_steps == "auto":
        console.note(
            f"  the rows, not the time, decide: {plan['epochs']:.3g} passes over them take "
            f"{console.format_duration(plan['predicted_seconds'])} of {limit:g} min. "
            "More text (or num_epochs) would use the rest."
        )
    # Whoever sets max_steps knows; whoever brought little text may not.
    if plan["max_steps"] < FEW_UPDATES and task.config.max_steps == "auto":
        console.warn(
            f"{plan['max_steps']} updates are very few: expect a model that has learned little. "
            "More text, more time or more epochs help."
        )
