"""What the planner answers about a subject: the chosen settings, what else would do, what it takes in all.

In: a `Subject`, a `Target`, and the functions that predict memory. Out: a `Planned` and its JSON document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onecard.plan.candidates import Candidate
from onecard.plan.job import KINDS, Job, Memory, Target
from onecard.plan.search import MARGIN, Asked, Saving, best, savings
from onecard.plan.shape import shape_of
from onecard.plan.speed import energy
from onecard.plan.targets import notes
from onecard.train import relief
from onecard.train.run_plan import EVALUATION_SHARE
from onecard.train.subjects import Subject

MemoryOf = Callable[[Job], Memory]
# The settings of a job that a person knows, in the order in which they are told.
SETTINGS = (
    "method",
    "lora_rank",
    "target_modules",
    "precision",
    "optimizer",
    "optimizer_states",
    "optimizer_in_backward",
    "gradients",
    "batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "packed",
    "activation_checkpointing",
    "activation_offload",
    "activation_compression",
)


@dataclass(frozen=True)
class Planned:
    """The answer. `chosen` does not fit where nothing does; `would_fit` is then what would."""

    subject: Subject
    target: Target
    chosen: Candidate
    alternatives: tuple[Candidate, ...] = ()
    savings: tuple[Saving, ...] = ()
    would_fit: Candidate | None = None

    @property
    def fits(self) -> bool:
        """Whether what is needed is there at all; a thin margin is said apart."""
        return self.chosen.margin_bytes >= 0

    @property
    def thin(self) -> bool:
        """Whether less stays free than the prediction may be off."""
        return self.fits and self.chosen.margin_bytes < MARGIN * self.target.capacity_bytes

    @property
    def tokens(self) -> float | None:
        """Tokens of the whole training: as many as were named, or as there is time for."""
        limit, named = self.subject.limit_seconds, self.subject.tokens
        if limit is None:
            return named
        in_time = limit * (1 - EVALUATION_SHARE) * self.chosen.speed.tokens_per_second
        return in_time if named is None else min(named, in_time)

    @property
    def seconds(self) -> float | None:
        """Of the whole training, evaluations included; None where nobody said how long it is."""
        tokens = self.tokens
        return None if tokens is None else tokens / self.chosen.speed.tokens_per_second / (1 - EVALUATION_SHARE)

    @property
    def peak_place(self) -> str:
        """Where in the update the most is held."""
        moments = self.chosen.memory.moments
        return max(moments, key=lambda moment: moment.total_bytes).place if moments else ""


def remembered(memory: MemoryOf) -> MemoryOf:
    """The same, asked once for each job; more micro-batches than two hold what two hold."""
    answers: dict[tuple[str, Job], Memory] = {}

    def of(job: Job) -> Memory:
        fewest = min(2, job.gradient_accumulation_steps)
        model = f"{type(job.model).__name__} {job.model.to_json_string(use_diff=False)}"
        key = model, replace(job, model=None, gradient_accumulation_steps=fewest)
        if key not in answers:
            answers[key] = memory(job)
        return answers[key]

    return of


def planned(
    subject: Subject, target: Target, memory: MemoryOf, *, alternatives: bool = True, explain: bool = False
) -> Planned:
    """Choose the settings of a subject on a target.

    `alternatives`: also look for others where a run would take the usual ones; `explain`: also for what each measure
    would save of those chosen.
    """
    memory = remembered(memory)
    asked = Asked(memory, target, MARGIN)
    usual = asked.of(subject.job) if subject.usual_first else None
    if usual is not None and usual.fits and not alternatives:
        return Planned(subject, target, usual)
    found = best(
        subject.job,
        target,
        memory,
        rows_per_update=subject.rows_per_update,
        fixed=subject.fixed,
        clipping=subject.clipping,
    )
    if usual is not None and usual.fits:
        found = [usual, *(candidate for candidate in found if candidate.job != usual.job)]
    chosen, others = found[0], tuple(found[1:])
    would_fit = None
    if chosen.margin_bytes < 0:
        would = relief.relieved(chosen.job, asked.fits)
        would_fit = None if would is None else asked.of(would)
    wanted = explain or chosen.margin_bytes < 0
    saved = tuple(savings(chosen.job, target, memory, clipping=subject.clipping)) if wanted else ()
    return Planned(subject, target, chosen, others, saved, would_fit)


def settings_of(job: Job) -> dict[str, Any]:
    """The settings of a job; those of adapters only where there are any."""
    hidden = ("lora_rank", "target_modules") if job.method == "full" else ()
    return {name: getattr(job, name) for name in SETTINGS if name not in hidden}


def document(made: Planned, *, electricity_price: float | None = None) -> dict[str, Any]:
    """What `--json` prints of one subject."""
    memory, speed, seconds = made.chosen.memory, made.chosen.speed, made.seconds
    taken = None if seconds is None else energy(speed, seconds, electricity_price)
    return {
        "name": made.subject.name,
        "card": made.target.name,
        "fits": made.fits,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "context_bytes": memory.context_bytes,
        "needed_bytes": memory.needed_bytes,
        "capacity_bytes": made.target.capacity_bytes,
        "margin_bytes": made.chosen.margin_bytes,
        "breakdown": {kind: memory.breakdown.get(kind, 0) for kind in KINDS},
        "peak_place": made.peak_place,
        "largest_tensors": [{"name": name, "bytes": size} for name, size in memory.largest],
        "parameters": shape_of(made.chosen.job.model).parameters,
        "tokens_per_second": speed.tokens_per_second,
        "seconds_per_update": speed.seconds_per_update,
        "uncertainty_factor": speed.uncertainty,
        "measured": speed.measured,
        "tokens": made.tokens,
        "seconds": seconds,
        "energy_kwh": None if taken is None else taken.kwh,
        "cost": None if taken is None else taken.cost,
        "settings": settings_of(made.chosen.job),
        "alternatives": [_alternative(made.chosen, other) for other in made.alternatives],
        "savings": [
            {
                "measure": saving.words,
                "settings": saving.settings,
                "bytes": saving.saved_bytes,
                "time_factor": saving.time_factor,
            }
            for saving in made.savings
        ],
        "would_fit": None if made.would_fit is None else _alternative(made.chosen, made.would_fit),
        "notes": notes(made.target),
    }


def _alternative(chosen: Candidate, other: Candidate) -> dict[str, Any]:
    return {
        "settings": relief.differing(chosen.job, other.job),
        "needed_bytes": other.memory.needed_bytes,
        "margin_bytes": other.margin_bytes,
        "tokens_per_second": other.speed.tokens_per_second,
    }
