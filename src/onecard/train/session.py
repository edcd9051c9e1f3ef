"""What every training verb does around the loop: resolve the plan, start or resume, train, save the model, report."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from onecard import artifact, console
from onecard.config import FurtherConfig, TrainingConfig
from onecard.data.batches import RowOrder
from onecard.data.packing import PaddedRows
from onecard.errors import ConfigError, DoesNotFit, Interrupted, OnecardError
from onecard.model import attention
from onecard.model.load import rows_without_token, silence_transformers
from onecard.train import activations, compilation, foresight, optimizers, precision, report, space, timing
from onecard.train.activations import Activations
from onecard.train.compilation import compile_layers
from onecard.train.foresight import Outlook
from onecard.train.loop import Loop, LoopSettings
from onecard.train.metrics import RunLog, peak_memory_bytes
from onecard.train.run_plan import make_plan, say_plan
from onecard.train.schedule import Schedule
from onecard.train.task import Task
from onecard.train.vitals import energy_text, open_vitals
from onecard.train.watchdog import Limits, Watchdog

Result = TypeVar("Result")
# Settings that change neither weights nor their order: they may differ between a run and its resumption.
_FREE = {
    "output",
    "overwrite",
    "keep_last",
    "keep_best",
    "keep_every",
    "log_every",
    "pause_above_celsius",
    "when_hot",
    "electricity_price",
    "currency",
    "detach",
    "check_memory",
}


def fingerprint(config: TrainingConfig, inputs: list[str]) -> str:
    """Hash of everything that decides the result: settings, and the content of the inputs."""
    settings = {key: value for key, value in config.without_places().items() if key not in _FREE}
    return artifact.hash_json({"settings": settings, "inputs": inputs, "format": artifact.FORMAT})


def free_settings_removed(config: TrainingConfig) -> dict[str, Any]:
    """The settings that a resumption must repeat."""
    return {key: value for key, value in config.plain().items() if key not in _FREE}


def check(config: TrainingConfig, precision_name: str | None = None) -> None:
    """ConfigError, naming both, for settings that cannot be combined; before any work, and once auto is resolved."""
    optimizers.check(config, precision_name)
    activations.check(config)


def train(task: Task) -> dict[str, Any]:
    """Run a task to its end (resuming if the directory has a plan) and return the result document.

    DoesNotFit if the memory of the card runs out.
    """
    stored = task.run.plan
    check(task.config, task.precision.name)
    if task.held_out is None:
        for name in ("early_stopping", "keep_best"):
            if getattr(task.config, name):
                console.warn(f"{name} is not used: no row is held out to judge the model by.")
    try:
        outlook = _settle(task, stored)
        return _train(task, stored, outlook)
    except torch.OutOfMemoryError as fault:
        RunLog(task.run.path).event("oom", reason=str(fault).splitlines()[0])
        raise DoesNotFit(
            f"The memory of the card ran out ({str(fault).splitlines()[0]}).",
            "Set activation_checkpointing = full, a smaller batch_size (the result stays the same) or max_length, or "
            "optimizer_states = 8bit; docs/en/memory.md says what each saves.",
        ) from fault
    except OnecardError as fault:
        if not isinstance(fault, Interrupted):
            with suppress(OnecardError):  # a full disk takes no event either
                RunLog(task.run.path).event("error", reason=fault.what)
        raise


def rehearsal(task: Task) -> tuple[Any, dict[str, Any], Callable[..., Loop]]:
    """A model as a run of the task begins with it, its plan, and a maker of loops over it: to try and keep nothing.

    Keywords given to the maker take the place of what the plan says.
    """
    _settle(task, None)
    model, _, compiled = _made_ready(task, None)
    plan = make_plan(task, model, compiled=compiled, time_updates=lambda _: 1.0)  # how long it takes is of no interest
    if task.start is not None:
        task.start(model)
    torch.manual_seed(task.config.seed)
    return model, plan, lambda **changes: _loop(task, model, plan | changes)


def _made_ready(task: Task, stored: dict[str, Any] | None) -> tuple[Any, bool, bool]:
    """The model on its device, with its ways of saving memory; whether rows are packed; whether it is compiled."""
    torch.manual_seed(task.config.seed)
    model = task.build_model()
    model.to(task.precision.device).train()
    packed = _pack(task, model)
    precision.convert(model, task.precision)
    if task.config.optimizer_states == "host" and task.precision.device == "cpu":
        console.note("  optimizer_states = host changes nothing here: the run trains on the host")
    assert task.config.activation_checkpointing != "auto", "settled before the model is made"
    ways = Activations(
        checkpointing=task.config.activation_checkpointing,
        offload=task.config.activation_offload,
        compression=task.config.activation_compression,
    )
    ways.apply(model)
    task.saving = ways.saving
    if stored is not None and stored["device"] != task.precision.device:
        console.warn(
            f"The run began on {stored['device']} and goes on on {task.precision.device}: "
            "the result will not be bit for bit that of an uninterrupted run."
        )
    wants_compile = task.config.compile if stored is None else bool(stored["compiled"])
    # Padded batches differ in width, and every width would have to be compiled.
    compiled = (
        packed and wants_compile and compile_layers(model, task.precision.device, cuda_graphs=task.config.cuda_graphs)
    )
    return model, packed, compiled


def _settle(task: Task, stored: dict[str, Any] | None) -> Outlook | None:
    """Leave nothing about memory to `auto`: by prediction, or as the plan of the run has it."""
    if stored is not None:
        task.config = task.config.model_copy(update=foresight.settings_of(stored))
        return None
    task.config, outlook = foresight.look_ahead(task)
    check(task.config, task.precision.name)
    return outlook


def _train(task: Task, stored: dict[str, Any] | None, outlook: Outlook | None) -> dict[str, Any]:
    model, packed, compiled = _made_ready(task, stored)
    if stored is None:
        plan = make_plan(task, model, compiled=compiled, time_updates=lambda plan: _time_updates(task, model, plan))
        plan |= {} if outlook is None else outlook.plain()
        task.run.write_plan(plan)
    else:
        plan = stored
    loop = _loop(task, model, plan)
    loop.vitals = open_vitals(task.config, task.run.path, task.precision.device)
    if stored is not None and loop.resume():
        console.note(f"  resuming after update {loop.step} of {plan['max_steps']}")
        loop.log.event("resume", step=loop.step)
    else:
        if task.start is not None:
            task.start(model)
        loop.log.cut_after(0)
        loop.log.event("plan", **{key: value for key, value in plan.items() if key not in ("asked", "fingerprint")})
        loop.log.event("start", step=0)
    say_plan(task, plan)
    space.check(loop)
    if loop.step == 0:
        torch.manual_seed(task.config.seed)
        if not packed and not task.config.optimizer_in_backward:
            loop.rehearse()
    try:
        _or_plainly(task, model, plan, lambda: loop.run(task.verb))
    except Interrupted as stop:
        if not task.config.overwrite:
            raise
        raise Interrupted(stop.what, "Run the same command without --overwrite to go on from there.") from None
    result = _finish(task, model, plan, loop)
    if loop.stopped_by is not None:
        # It came during the last update: the run is complete, and whatever would follow it is not wanted.
        signal.raise_signal(loop.stopped_by)
    return result


def _pack(task: Task, model: Any) -> bool:
    """Let the model attend packed rows; False where it cannot, or shall not: then each row holds one document."""
    if task.packing is not False and attention.switch(model, writes=task.writes):
        return True
    if task.packing is True:
        raise ConfigError(
            f"A {model.config.model_type} model cannot keep the documents of a packed row apart.",
            "Set packing = auto: each row then holds one document.",
        )
    if task.packing == "auto":
        console.note(
            f"  a {model.config.model_type} model cannot keep documents in one row apart: rows are padded instead"
        )
    task.padded = True
    if task.takes_rows_apart:
        return False
    task.rows = PaddedRows(task.rows.store, task.rows.max_length)
    if task.held_out is not None:
        task.held_out = PaddedRows(task.held_out.store, task.held_out.max_length)
    return False


# --- the plan -----------------------------------------------------------------------------------------------------


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
    muon_dtype = torch.float32 if plan["precision"] in ("fp32", "fp16") else torch.bfloat16
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
        )
    return Loop(
        run=task.run.path,
        model=model,
        objective=task.objective(task.padded),
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
            states=config.optimizer_states,
            in_backward=config.optimizer_in_backward,
            gradients=config.gradients,
            lora_plus_ratio=config.lora_plus_ratio if isinstance(config, FurtherConfig) else 1.0,
        ),
        saving=task.saving,
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
            keep_best=config.keep_best or config.early_stopping is not None,
            keep_every=config.keep_every,
            roll_back_learning_rate_factor=config.roll_back_learning_rate_factor,
        ),
        watchdog=Watchdog(
            Limits(
                skips_before_roll_back=config.skips_before_roll_back,
                most_roll_backs=config.most_roll_backs,
                on_spike=config.on_spike,
                early_stopping=config.early_stopping,
            )
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


# --- the end ------------------------------------------------------------------------------------------------------


def save_model(model: Any, tokenizer: Any, directory: Path, *, stop_ids: list[int], sampling: dict[str, Any]) -> None:
    """Write the model directory in Hugging Face layout; configuration, generation settings and tokenizer stop alike.

    Without `stop_ids` it is one that writes nothing.
    """
    from transformers import GenerationConfig

    from onecard.tokenizer.train import save_tokenizer

    silence_transformers()
    generation: Any = GenerationConfig
    attention.use_own(model)
    tokenizer = copy.deepcopy(tokenizer)
    if stop_ids:
        eos = stop_ids[0] if len(stop_ids) == 1 else stop_ids
        # Other programs generate too: rows that no token has are never theirs to say.
        spare = rows_without_token(tokenizer, model.get_input_embeddings().weight.shape[0])
        model.config.eos_token_id = eos
        model.generation_config = generation(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=eos,
            pad_token_id=tokenizer.pad_token_id,
            **({"suppress_tokens": spare} if spare else {}),
            **sampling,
        )
    if stop_ids and stop_ids[0] != tokenizer.eos_token_id:
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

    if not task.writes:
        return []
    if task.verb == "pretrain" and task.tokenizer.eos_token_id is not None:
        return [task.tokenizer.eos_token_id]
    found = stop_token_ids(task.tokenizer)
    if not found:
        raise ConfigError(
            "The tokenizer has no token that ends a text.", "Use one with an eos_token, such as one made with onecard."
        )
    return found


def _finish(task: Task, model: Any, plan: dict[str, Any], loop: Loop) -> dict[str, Any]:
    chat = task.verb != "pretrain"
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if not chat else {"do_sample": False}
    for parameter in model.parameters():
        assert bool(torch.isfinite(parameter).all()), "the loop applies finite updates only"
    told: dict[str, Any] = {}
    if task.complete is not None:
        model, told = task.complete(model)
    told |= {} if task.examine is None else task.examine(model)
    save_model(model, task.tokenizer, task.run.path / "model", stop_ids=_stop_ids(task), sampling=sampling)
    rows = RunLog(task.run.path).metrics()
    measured_losses = [row["held_out_loss"] for row in rows if row.get("held_out_loss") is not None]
    # With early stopping the best model is the one that was kept.
    kept = None
    if measured_losses:
        kept = measured_losses[-1] if task.config.early_stopping is None else min(measured_losses)
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
        "held_out_loss": kept,
        "predicted_seconds": plan["predicted_seconds"],
        "predicted_peak_memory_bytes": plan.get("predicted_peak_memory_bytes"),
        **measured,
        **loop.vitals.result(),
        **{key: plan[key] for key in task.facts if key in plan},
        **told,
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
            ["peak memory", foresight.predicted_text(plan), console.format_bytes(measured["peak_memory_bytes"])],
            ["loss on held-out rows", "", "none held out" if kept is None else f"{kept:.3f}"],
            *([] if result["energy_kwh"] is None else [["energy of the card", "", energy_text(result)]]),
        ],
    )
    return result
