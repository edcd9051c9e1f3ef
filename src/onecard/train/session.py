"""What every training verb does around the loop: resolve the plan, start or resume, train, save the model, report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from onecard import artifact, console
from onecard.config import TrainingConfig
from onecard.data.batches import RowOrder
from onecard.data.packing import Rows
from onecard.errors import ConfigError, Interrupted
from onecard.model import attention
from onecard.model.load import silence_transformers
from onecard.plan.speed import update_seconds, updates_in_time
from onecard.train import compilation, optimizers, report, timing
from onecard.train.compilation import compile_layers
from onecard.train.directory import RunDirectory
from onecard.train.loop import Loop, LoopSettings
from onecard.train.metrics import RunLog, peak_memory_bytes
from onecard.train.objectives import NextToken
from onecard.train.precision import Precision
from onecard.train.schedule import Schedule

Result = TypeVar("Result")
# Settings that change neither weights nor their order: they may differ between a run and its resumption.
_FREE = {"output", "overwrite", "keep_last", "log_every"}
# Evaluations, samples and checkpoints, as a share of a timed run.
EVALUATION_SHARE = 0.05
# Below so many updates a model has hardly begun to learn, whatever its size.
FEW_UPDATES = 50


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
    """A prepared training: everything the loop needs that a verb decides."""

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
    facts: dict[str, Any] = field(default_factory=dict)
    # Done to the trained model before it is saved, such as merging adapters into it.
    complete: Callable[[Any], None] | None = None


def fingerprint(config: TrainingConfig, inputs: list[str]) -> str:
    """Hash of everything that decides the result: settings, and the content of the inputs."""
    settings = {key: value for key, value in config.without_places().items() if key not in _FREE}
    return artifact.hash_json({"settings": settings, "inputs": inputs, "format": artifact.FORMAT})


def free_settings_removed(config: TrainingConfig) -> dict[str, Any]:
    """The settings that a resumption must repeat."""
    return {key: value for key, value in config.plain().items() if key not in _FREE}


def train(task: Task) -> dict[str, Any]:
    """Run a task to its end (resuming if the directory has a plan) and return the result document."""
    torch.manual_seed(task.config.seed)
    model = task.build_model()
    model.to(task.precision.device).train()
    attention.switch(model)
    stored = task.run.plan
    if stored is not None and stored["device"] != task.precision.device:
        console.warn(
            f"The run began on {stored['device']} and goes on on {task.precision.device}: "
            "the result will not be bit for bit that of an uninterrupted run."
        )
    wants_compile = task.config.compile if stored is None else bool(stored["compiled"])
    compiled = wants_compile and compile_layers(model, task.precision.device)
    if stored is None:
        plan = _make_plan(task, model, compiled=compiled)
        task.run.write_plan(plan)
    else:
        plan = stored
    loop = _loop(task, model, plan)
    if stored is not None and loop.resume():
        console.note(f"  resuming after update {loop.step} of {plan['max_steps']}")
        loop.log.event("resume", step=loop.step)
    else:
        loop.log.cut_after(0)
        loop.log.event("plan", **{key: value for key, value in plan.items() if key not in ("asked", "fingerprint")})
        loop.log.event("start", step=0)
    _say_plan(task, plan)
    if loop.step == 0:
        torch.manual_seed(task.config.seed)
    try:
        _or_plainly(task, model, plan, lambda: loop.run(task.verb))
    except Interrupted as stop:
        if not task.config.overwrite:
            raise
        raise Interrupted(stop.what, "Run the same command without --overwrite to go on from there.") from None
    return _finish(task, model, plan, loop)


# --- the plan -----------------------------------------------------------------------------------------------------


def _make_plan(task: Task, model: Any, *, compiled: bool) -> dict[str, Any]:
    """Resolve every `auto`; measure real updates where a time limit decides their number."""
    config, defaults = task.config, task.defaults
    batch, accumulation = _batch_shape(task)
    order = RowOrder(task.rows.per_source, task.weights, seed=config.seed, rows_per_update=batch * accumulation)
    plan: dict[str, Any] = {
        "verb": task.verb,
        "batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": defaults.optimizer if config.optimizer == "auto" else config.optimizer,
        "learning_rate": defaults.learning_rate if config.learning_rate == "auto" else config.learning_rate,
        "muon_learning_rate": (
            defaults.muon_learning_rate if config.muon_learning_rate == "auto" else config.muon_learning_rate
        ),
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
    timed = config.time_limit_minutes is not None and config.max_steps == "auto"
    if timed:
        seconds = _time_updates(task, model, plan)
        fitting = updates_in_time(config.time_limit_minutes * 60, seconds, evaluation_share=EVALUATION_SHARE)
        steps = min(steps, fitting)
    else:
        # Nothing depends on it, so nobody has to wait until it is measured.
        seconds = update_seconds(
            parameters=plan["parameters"],
            tokens=plan["tokens_per_update"],
            flops_per_second=task.precision.flops_per_second,
            device=task.precision.device,
        )
    plan |= {"seconds_per_update": seconds, "measured": timed}
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


def _batch_shape(task: Task) -> tuple[int, int]:
    """Rows in a micro-batch and micro-batches in an update, so that an update has about `update_tokens` tokens."""
    config, length = task.config, task.rows.max_length
    wanted = max(1, task.defaults.update_tokens // length)
    most = max(1, (4096 if task.precision.device == "cpu" else 16384) // length)
    if config.batch_size == "auto" and config.gradient_accumulation_steps == "auto":
        batch = min(most, wanted)
        return batch, max(1, wanted // batch)
    if config.batch_size == "auto":
        assert config.gradient_accumulation_steps != "auto"
        return max(1, min(most, wanted // config.gradient_accumulation_steps)), config.gradient_accumulation_steps
    if config.gradient_accumulation_steps == "auto":
        return config.batch_size, max(1, wanted // config.batch_size)
    return config.batch_size, config.gradient_accumulation_steps


def _time_updates(task: Task, model: Any, plan: dict[str, Any]) -> float:
    """Seconds of an update, measured."""
    console.note("  measuring this machine: a few updates, compiled first" if plan["compiled"] else "  measuring ...")

    def measured() -> float:
        return timing.seconds_per_update(
            lambda micro_batches: _loop(task, model, plan | {"gradient_accumulation_steps": micro_batches}),
            model,
            micro_batches=plan["gradient_accumulation_steps"],
        )

    return _or_plainly(task, model, plan, measured)


def _or_plainly(task: Task, model: Any, plan: dict[str, Any], action: Callable[[], Result]) -> Result:
    """What `action` gives; where the layers turn out not to compile, again with plain ones."""
    try:
        return action()
    except compilation.FAILURES as fault:
        console.note(f"  layers cannot be compiled here and run plainly: {str(fault).strip().splitlines()[0]}")
        console.note("  (on Linux: install g++ and the headers of Python, such as python3-dev, for more speed)")
        compilation.undo(model)
        model.zero_grad(set_to_none=True)
        plan["compiled"] = False
        if task.run.plan is not None:
            task.run.write_plan(plan)
        return action()


def _loop(task: Task, model: Any, plan: dict[str, Any]) -> Loop:
    config = task.config
    rows_per_update = plan["batch_size"] * plan["gradient_accumulation_steps"]
    order = RowOrder(task.rows.per_source, task.weights, seed=config.seed, rows_per_update=rows_per_update)
    muon_dtype = torch.bfloat16 if plan["precision"] == "bf16" else torch.float32
    held_out = None
    if task.held_out is not None:
        held_out = (task.held_out, _spread(task.held_out.per_source, limit=max(4, plan["max_steps"] // 20)))
    sample = None
    if task.sample_prompts:
        from onecard.train.samples import continuation_sampler

        sample = continuation_sampler(
            model,
            task.tokenizer,
            task.sample_prompts,
            stop_ids=_stop_ids(task),
            attention=attention.PACKED,
        )
    return Loop(
        run=task.run.path,
        model=model,
        objective=NextToken(),
        rows=task.rows,
        order=order,
        held_out=held_out,
        optimizers=optimizers.build(
            model,
            plan["optimizer"],
            learning_rate=plan["learning_rate"],
            muon_learning_rate=plan["muon_learning_rate"],
            weight_decay=config.weight_decay,
            muon_dtype=muon_dtype,
        ),
        schedule=Schedule(
            config.schedule,
            plan["max_steps"],
            config.warmup_ratio,
            config.decay_ratio,
            config.final_learning_rate_ratio,
        ),
        precision=task.precision,
        settings=LoopSettings(
            max_steps=plan["max_steps"],
            batch_size=plan["batch_size"],
            max_grad_norm=config.max_grad_norm,
            evaluate_every=plan["evaluate_every"],
            save_every=plan["save_every"],
            keep_last=config.keep_last,
            log_every=config.log_every,
            pad_id=task.tokenizer.pad_token_id or 0,
        ),
        sample=sample,
    )


def _spread(per_source: list[int], *, limit: int) -> list[int]:
    """At most `limit` row numbers of each source, evenly spread: the same ones at every evaluation."""
    chosen, first = [], 0
    for count in per_source:
        take = min(count, limit)
        chosen += [first + index * count // take for index in range(take)]
        first += count
    return chosen


def _say_plan(task: Task, plan: dict[str, Any]) -> None:
    console.note(
        f"  plan: {plan['parameters'] / 1e6:.1f}M parameters, {plan['max_steps']:,} updates of "
        f"{plan['tokens_per_update']:,} tokens ({plan['epochs']:.2f} epochs), {plan['optimizer']}, "
        f"{plan['precision']}, {'about' if plan['measured'] else 'very roughly'} "
        f"{console.format_duration(plan['predicted_seconds'])} at "
        f"{plan['predicted_tokens_per_second']:,.0f} tokens/s"
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


# --- the end ------------------------------------------------------------------------------------------------------


def save_model(model: Any, tokenizer: Any, directory: Path, *, stop_ids: list[int], sampling: dict[str, Any]) -> None:
    """Write the model directory in Hugging Face layout; configuration, generation settings and tokenizer stop alike."""
    from transformers import GenerationConfig

    from onecard.tokenizer.train import save_tokenizer

    silence_transformers()
    generation: Any = GenerationConfig
    eos = stop_ids[0] if len(stop_ids) == 1 else stop_ids
    model.set_attn_implementation("sdpa")
    model.config.eos_token_id = eos
    model.generation_config = generation(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    tokenizer = copy.deepcopy(tokenizer)
    if stop_ids[0] != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    with artifact.new_directory(directory, replace=True) as temporary:
        model.save_pretrained(str(temporary))
        save_tokenizer(tokenizer, temporary)
        for file in temporary.glob(
            "*.safetensors"
        ):  # written for the owner alone; the other files are for whom umask says
            file.chmod((temporary / "config.json").stat().st_mode)
        artifact.write_manifest(temporary, "model", settings={"parameters": sum(p.numel() for p in model.parameters())})


def _stop_ids(task: Task) -> list[int]:
    """What ends a text of the trained model: the end of a turn after fine-tuning, else the end of a document."""
    from onecard.tokenizer.template import stop_token_ids

    if task.verb != "finetune" and task.tokenizer.eos_token_id is not None:
        return [task.tokenizer.eos_token_id]
    found = stop_token_ids(task.tokenizer)
    if not found:
        raise ConfigError(
            "The tokenizer has no token that ends a text.", "Use one with an eos_token, such as one made with onecard."
        )
    return found


def _finish(task: Task, model: Any, plan: dict[str, Any], loop: Loop) -> dict[str, Any]:
    chat = task.verb == "finetune"
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if not chat else {"do_sample": False}
    for parameter in model.parameters():
        assert bool(torch.isfinite(parameter).all()), "the loop applies finite updates only"
    if task.complete is not None:
        task.complete(model)
    save_model(model, task.tokenizer, task.run.path / "model", stop_ids=_stop_ids(task), sampling=sampling)
    rows = RunLog(task.run.path).metrics()
    held_out = [row["held_out_loss"] for row in rows if row.get("held_out_loss") is not None]
    measured = {
        "seconds": loop.seconds,
        "tokens_per_second": loop.tokens / max(loop.seconds, 1e-9),
        # The rows know of the processes before this one too.
        "peak_memory_bytes": max(
            [peak_memory_bytes(task.precision.device), *(row["peak_memory_bytes"] for row in rows)]
        ),
    }
    result = {
        "output": str(task.run.path),
        "model": str(task.run.path / "model"),
        "parameters": plan["parameters"],
        "updates": loop.step,
        "tokens": loop.tokens,
        "skipped": loop.skipped,
        "loss": rows[-1]["loss"] if rows else None,
        "held_out_loss": held_out[-1] if held_out else None,
        "predicted_seconds": plan["predicted_seconds"],
        **measured,
        **{key: plan[key] for key in task.facts if key in plan},
    }
    report.write(task.run.path, task.verb, plan, result)
    loop.log.event("end", step=loop.step)
    task.run.finish(parents=task.parents, result=result)
    console.table(
        f"{task.verb}: {task.run.path}",
        ["", "planned", "measured"],
        [
            ["time", console.format_duration(plan["predicted_seconds"]), console.format_duration(loop.seconds)],
            ["tokens/s", f"{plan['predicted_tokens_per_second']:,.0f}", f"{measured['tokens_per_second']:,.0f}"],
            ["updates", f"{plan['max_steps']:,}", f"{loop.step:,}"],
            ["loss on held-out rows", "", f"{held_out[-1]:.3f}" if held_out else "none held out"],
        ],
    )
    return result
