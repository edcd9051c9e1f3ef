"""What a run will hold at most: said before its model is built, mended where settings are auto, else refused.

In: a prepared task. Out: the settings in force and an `Outlook`, which the plan keeps and the report sets beside what
was measured. A model that cannot be predicted is said to be one, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onecard import console
from onecard.config import FurtherConfig, TrainingConfig
from onecard.errors import DoesNotFit, OnecardError
from onecard.plan.job import Engine, Job, Memory, Target
from onecard.train import relief
from onecard.train.metrics import resident_bytes
from onecard.train.run_plan import batch_shape, optimizer_of
from onecard.train.task import Task

# What auto is where memory is no matter.
USUAL: dict[str, Any] = {"activation_checkpointing": "none", "optimizer_states": "fp32"}
SPLIT = ("batch_size", "gradient_accumulation_steps")
# This share of what is free is left alone when settings are chosen: the error of the prediction, and other programs.
MARGIN = 0.05
# A run that needs no more than this share of what is free, before its layers are compiled, is not looked at closer.
ROOM_ENOUGH = 0.5
MemoryOf = Callable[[Job], Memory]


@dataclass(frozen=True)
class Outlook:
    """The prediction for one run, in bytes. `held_bytes` is what the process held before (0 on a card)."""

    memory: Memory
    held_bytes: int
    room_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What `peak_memory_bytes` of the run should become: allocated on a card, resident on a CPU."""
        return self.held_bytes + self.memory.peak_allocated_bytes

    @property
    def missing_bytes(self) -> int:
        """How much more is needed than is free; negative: what stays free."""
        return self.memory.peak_reserved_bytes - self.room_bytes

    def plain(self) -> dict[str, Any]:
        """What plan.json keeps of it."""
        return {
            "predicted_peak_memory_bytes": self.peak_bytes,
            "predicted_memory": self.memory.breakdown,
            "free_memory_bytes": self.room_bytes,
        }


def settings_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What auto became in the plan of an earlier process."""
    return {name: plan.get(name, usual) for name, usual in USUAL.items()}


def predicted_text(plan: dict[str, Any]) -> str:
    """The predicted peak of a plan for a person; empty where it could not be predicted."""
    found = plan.get("predicted_peak_memory_bytes")
    return "" if found is None else console.format_bytes(found)


def look_ahead(
    task: Task,
    memory: MemoryOf | None = None,
    room: Callable[[str], int] | None = None,
    target: Callable[[], Target] | None = None,
) -> tuple[TrainingConfig, Outlook | None]:
    """The configuration with nothing about memory left to `auto`, and the prediction (None: it could not be made).

    DoesNotFit where the run would need more than there is, unless `check_memory` is false. `memory`, `room` and
    `target` stand in for the forecast and for looks at this machine.
    """
    usual = task.config.model_copy(update=usual_settings(task.config))
    if task.architecture is None:
        return usual, None
    device = task.precision.device
    free = (room or room_bytes)(device)
    try:
        memory_of, job = _with_what_lies_beside(task, memory or forecast()), job_of(task, usual)
        asked, found = job, _first_look(job, memory_of, free)
        # By now what the run needs of libraries is loaded.
        outlook = Outlook(found, resident_bytes() if device == "cpu" else 0, free)
        if outlook.missing_bytes > -MARGIN * free and left_open(task.config):
            job, outlook = _mended(job, outlook, fixed(task.config), memory_of, target or this_machine)
    except OnecardError:
        raise
    except Exception as fault:  # noqa: BLE001 (whatever a model of a kind never seen does: it is only a prediction)
        reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        console.note(f"  how much memory it takes cannot be predicted ({reason[:160]})")
        return usual, None
    if outlook.missing_bytes > 0:
        _refuse(task, job, outlook, memory_of)
    return usual.model_copy(update=_as_settings(job, relief.differing(asked, job))), outlook


def _with_what_lies_beside(task: Task, memory_of: MemoryOf) -> MemoryOf:
    """The prediction with what the task keeps on the device beside the model that is trained."""
    beside = task.beside
    if beside is None:
        return memory_of

    def of(job: Job) -> Memory:
        found, more = memory_of(job), beside(job)
        size = sum(more.values())
        return replace(
            found,
            peak_allocated_bytes=found.peak_allocated_bytes + size,
            peak_reserved_bytes=found.peak_reserved_bytes + size,
            breakdown=found.breakdown | more,
        )

    return of


def _first_look(job: Job, memory_of: MemoryOf, free: int) -> Memory:
    """The prediction of a job; where there is room enough anyway, that of its layers as they are without compiling.

    Plain layers hold no less than compiled ones, and to see what those keep takes seconds, which a small run would wait
    for longer than for its first update.
    """
    if not job.engine.compiled:
        return memory_of(job)
    found = memory_of(replace(job, engine=replace(job.engine, compiled=False)))
    return found if found.peak_reserved_bytes <= ROOM_ENOUGH * free else memory_of(job)


def usual_settings(config: TrainingConfig) -> dict[str, Any]:
    """What auto becomes where there is room for it."""
    return {name: value for name, value in USUAL.items() if getattr(config, name) == "auto"}


def left_open(config: TrainingConfig) -> tuple[str, ...]:
    """What of the split into micro-batches and of the ways of saving memory the configuration leaves to `auto`."""
    return tuple(name for name in (*SPLIT, *USUAL) if getattr(config, name) == "auto")


def fixed(config: TrainingConfig) -> frozenset[str]:
    """What a search must leave as it is: all of its ways that are not left open."""
    from onecard.plan.candidates import WAYS

    return frozenset({*WAYS, *SPLIT}) - {*left_open(config)}


def job_of(task: Task, config: TrainingConfig) -> Job:
    """The update of a task, as the planner sees it; `config` has nothing about memory left to `auto`."""
    assert task.architecture is not None
    batch, accumulation = batch_shape(
        config,
        row_tokens=task.rows.max_length,
        update_tokens=task.defaults.update_tokens,
        device=task.precision.device,
    )
    return Job(
        model=task.architecture(),
        batch_size=batch,
        max_length=task.rows.max_length,
        gradient_accumulation_steps=accumulation,
        packed=task.packing is not False,
        precision=task.precision.name,  # type: ignore[arg-type]
        evaluation=task.held_out is not None,
        device=task.precision.device,  # type: ignore[arg-type]
        engine=Engine(compiled=config.compile),
        optimizer=optimizer_of(config, task.defaults),  # type: ignore[arg-type]
        **ways_of(config),
        **adapters_of(config),
    )


def adapters_of(config: TrainingConfig) -> dict[str, Any]:
    """What a job knows of adapters; nothing where all weights are trained."""
    if not isinstance(config, FurtherConfig) or not config.lora_rank:
        return {}
    return {
        "method": "lora" if config.quantization == "none" else "qlora",
        "lora_rank": config.lora_rank,
        "target_modules": tuple(config.target_modules),
        "dora": config.decomposed,
    }


def ways_of(config: TrainingConfig) -> dict[str, Any]:
    """The settings of memory that a job and a configuration have under the same name."""
    names = (
        "optimizer_states",
        "optimizer_in_backward",
        "gradients",
        "activation_checkpointing",
        "activation_offload",
        "activation_compression",
    )
    return {name: getattr(config, name) for name in names}


def forecast() -> MemoryOf:
    """The engine's own prediction."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    from onecard.train.forecast import memory

    def of(job: Job) -> Memory:
        try:
            return memory(job)
        except DataDependentOutputException:
            if not job.packed:
                raise
            # Attention with dropout goes from document to document, and tensors without content do not tell where one
            # ends: a full row of one document is the same unpacked.
            return memory(replace(job, packed=False))

    return of


def this_machine() -> Target:
    """What the search needs to know of the speed of things here."""
    from onecard.plan.targets import target

    return target()


def room_bytes(device: str) -> int:
    """What this process can still take: free on the card with what it holds itself, or available on the host."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    import psutil

    from onecard.machine.probe import memory_allowed

    available, allowed = int(psutil.virtual_memory().available), memory_allowed()
    return available if allowed is None else min(available, allowed - resident_bytes())


# --- where it does not fit ----------------------------------------------------------------------------------------


def _mended(
    job: Job, outlook: Outlook, given: frozenset[str], memory_of: MemoryOf, target_of: Callable[[], Target]
) -> tuple[Job, Outlook]:
    """The fastest way to compute the same update that leaves a margin; where none does, the one nearest to it."""
    from onecard.plan.search import best

    # What the driver keeps is gone from what is free already.
    capacity = outlook.room_bytes + outlook.memory.context_bytes
    found = best(
        job,
        replace(target_of(), capacity_bytes=capacity),
        memory_of,
        rows_per_update=job.batch_size * job.gradient_accumulation_steps,
        margin=MARGIN,
        fixed=given,
    )[0]
    if found.memory.peak_reserved_bytes >= outlook.memory.peak_reserved_bytes:
        return job, outlook
    chosen = ", ".join(f"{name} = {value}" for name, value in relief.differing(job, found.job).items())
    console.note(
        f"  {console.format_bytes(outlook.memory.peak_reserved_bytes)} would be needed and "
        f"{console.format_bytes(outlook.room_bytes)} are free: {chosen}"
    )
    return found.job, replace(outlook, memory=found.memory)


def _as_settings(job: Job, changed: dict[str, Any]) -> dict[str, Any]:
    """Changes of a job as settings: a batch is fixed with its accumulation."""
    if "batch_size" in changed or "gradient_accumulation_steps" in changed:
        changed |= {
            "batch_size": job.batch_size,
            "gradient_accumulation_steps": job.gradient_accumulation_steps,
        }
    return changed


# Adapters are for models that exist already.
_OF_PRETRAINING = tuple(name for name in relief.EVERY if name not in ("lora", "qlora"))


def _refuse(task: Task, job: Job, outlook: Outlook, memory_of: MemoryOf) -> None:
    """DoesNotFit with what would; a warning where the user wants to try."""
    place = "the card" if task.precision.device == "cuda" else "this machine"
    parts = ", ".join(f"{kind} {console.format_bytes(size)}" for kind, size in outlook.memory.breakdown.items() if size)
    what = (
        f"The run is predicted to need {console.format_bytes(outlook.memory.peak_reserved_bytes)} ({parts}), and "
        f"{console.format_bytes(outlook.room_bytes)} are free on {place}."
    )
    if not task.config.check_memory:
        console.warn(f"{what} check_memory = false: it is tried all the same.")
        return
    measures = _OF_PRETRAINING if task.verb == "pretrain" else relief.EVERY
    found = relief.relieved(job, lambda one: memory_of(one).peak_reserved_bytes <= outlook.room_bytes, measures)
    fault = DoesNotFit(what, f"{_remedy(job, found)} To try all the same: check_memory = false.")
    fault.document = {
        "fits": False,
        **outlook.plain(),
        "would_fit": None if found is None else in_settings(relief.differing(job, found), found),
    }
    raise fault


def _remedy(job: Job, found: Job | None) -> str:
    if found is None:
        return "No setting makes it fit: take a smaller model."
    changes = in_settings(relief.differing(job, found), found)
    return "This fits: " + ", ".join(f"{name} = {_toml(value)}" for name, value in changes.items()) + "."


def in_settings(changes: dict[str, Any], found: Job) -> dict[str, Any]:
    """Changes of a job under the names of a run's settings, with what they need beside them."""
    made = {name: value for name, value in changes.items() if name not in ("method", "longest_tokens")}
    if "method" in changes:
        made["lora_rank"] = found.lora_rank
        made |= {"quantization": "nf4"} if found.method == "qlora" else {}
    if changes.get("optimizer_in_backward"):
        made["max_grad_norm"] = 0
    return made


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
