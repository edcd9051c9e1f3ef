"""The best settings for an update on a machine: the fastest that fit, and what else would do.

In: a job, a target and a function that tells the memory of a job, which may take a second a call: so it is asked
little. Every job is guessed roughly first; each answer corrects the guesses of its kind; and what holds more than
something that did not fit is not asked about. Out: candidates, the best first; where nothing fits, those nearest to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from onecard.plan.candidates import (
    PLAIN,
    WAYS,
    Candidate,
    all_of,
    approximate,
    kept_bytes,
    passing_bytes,
    possible,
    preference,
    ways,
    words,
)
from onecard.plan.job import Job, Memory, Speed, Target
from onecard.plan.shape import shape_of
from onecard.plan.speed import speed

MemoryOf = Callable[[Job], Memory]
SpeedOf = Callable[[Job, Target], Speed]
# What stays free: the planner's own error, and what a desktop takes in the middle of a run.
MARGIN = 0.05
ALTERNATIVES = 3
MOST_CALLS, MOST_SECONDS = 24, 16.0
# A guess may be so far off before its kind was ever asked about, and after.
TRUST_BEFORE, TRUST_AFTER = 1.5, 1.03
# An alternative that uses more ways than a faster one must hold so much less to be worth telling.
WORTH_TELLING = 0.85


@dataclass
class Asked:
    """What memory was told so far, and the guesses that follow from it."""

    memory: MemoryOf
    target: Target
    margin: float
    speed_of: SpeedOf = speed
    calls: int = 0
    started: float = field(default_factory=time.monotonic)
    _answers: dict[Any, Memory] = field(default_factory=dict)
    # What was told over what was guessed, of the bytes that stay and of those that pass, by what decides them.
    _staying: dict[Any, float] = field(default_factory=dict)
    _passing: dict[Any, float] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> float:
        """What may be needed at most."""
        return self.target.capacity_bytes * (1 - self.margin)

    @property
    def exhausted(self) -> bool:
        """Whether enough was asked."""
        return self.calls >= MOST_CALLS or time.monotonic() - self.started > MOST_SECONDS

    def of(self, job: Job) -> Candidate:
        """A job with its memory and speed. More than two micro-batches hold what two hold."""
        asked = replace(job, gradient_accumulation_steps=min(2, job.gradient_accumulation_steps))
        key = _key(asked)
        if key not in self._answers:
            self._answers[key] = self.memory(asked)
            self.calls += 1
            self._learn(job, self._answers[key])
        memory = self._answers[key]
        return Candidate(
            job=job,
            memory=memory,
            speed=self.speed_of(job, self.target),
            fits=memory.needed_bytes <= self.limit_bytes,
            margin_bytes=self.target.capacity_bytes - memory.needed_bytes,
        )

    def _learn(self, job: Job, memory: Memory) -> None:
        told = sum(memory.breakdown.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        staying = told or kept_bytes(job)
        self._staying[_state(job)] = staying / kept_bytes(job)
        self._passing[_kind(job)] = max(0.1, (memory.needed_bytes - staying) / passing_bytes(job))

    def guess(self, job: Job) -> tuple[float, float]:
        """Bytes that a job needs, and the factor by which that may be too much."""
        asked = _kind(job) in self._passing and _state(job) in self._staying
        staying = self._staying.get(_state(job), _median(self._staying))
        passing = self._passing.get(_kind(job), _median(self._passing))
        trust = TRUST_AFTER if asked else TRUST_BEFORE
        return staying * kept_bytes(job) + passing * passing_bytes(job), trust


def _median(ratios: dict[Any, float]) -> float:
    order = sorted(ratios.values())
    return order[len(order) // 2] if order else 1.0


def _key(job: Job) -> tuple[Any, ...]:
    sizes = (job.batch_size, job.gradient_accumulation_steps, job.max_length)
    return (shape_of(job.model), *sizes, job.precision, job.optimizer_states, ways(job))


def _state(job: Job) -> tuple[Any, ...]:
    """Jobs whose staying bytes a guess is wrong about in the same way."""
    return job.precision, job.optimizer_states, job.optimizer_in_backward


def _kind(job: Job) -> tuple[Any, ...]:
    """Jobs whose passing bytes a guess is wrong about in the same way."""
    return job.activation_checkpointing, job.activation_compression, job.activation_offload, job.precision


def best(
    job: Job,
    target: Target,
    memory: MemoryOf,
    *,
    rows_per_update: int,
    margin: float = MARGIN,
    fixed: frozenset[str] = frozenset(),
    clipping: bool = True,
    speed_of: SpeedOf = speed,
) -> list[Candidate]:
    """The fastest settings that fit, then really different ones; where nothing fits, the nearest, which do not.

    `job` says what is learned and how; of its settings those named in `fixed` stay, and its rows are split into
    micro-batches anew. `margin`: share of the capacity that stays free. `clipping`: gradients are clipped. `speed_of`
    may know more of the rows (see `speed`).
    """
    asked = Asked(memory, target, margin, speed_of)
    jobs = list(all_of(job, target, rows_per_update=rows_per_update, fixed=fixed, clipping=clipping))
    seconds = {id(one): speed_of(one, target).seconds_per_update for one in jobs}
    # An update of a fixed split may have other rows than another: compared is the time of a row.
    jobs.sort(key=lambda one: preference(one, seconds[id(one)]) / (one.batch_size * one.gradient_accumulation_steps))
    accepted = _fitting(jobs, asked)
    return accepted or _nearest(jobs, asked)


def _fitting(jobs: list[Job], asked: Asked) -> list[Candidate]:
    accepted: list[Candidate] = []
    refused: list[Job] = []
    for job in jobs:
        if len(accepted) > ALTERNATIVES or asked.exhausted:
            break
        guess, trust = asked.guess(job)
        if guess > asked.limit_bytes * trust or any(_holds_as_much(job, other) for other in refused):
            continue
        if any(_tells_nothing(job, guess, other) for other in accepted):
            continue
        candidate = asked.of(job)
        if not candidate.fits:
            refused.append(job)
        elif not any(_tells_nothing(job, candidate.memory.needed_bytes, other) for other in accepted):
            accepted.append(candidate)
    return accepted


def _holds_as_much(job: Job, other: Job) -> bool:
    """Whether a job surely holds as much as another: no smaller micro-batch, and no way that the other lacks."""
    more_steps = job.gradient_accumulation_steps > 1 or other.gradient_accumulation_steps == 1
    return job.batch_size >= other.batch_size and more_steps and ways(job) <= ways(other)


def _tells_nothing(job: Job, needed: float, other: Candidate) -> bool:
    """Whether a job beside a faster one is no alternative: the same ways, or not fewer for little less memory."""
    if ways(job) == ways(other.job):
        return True
    simpler = len(ways(job)) < len(ways(other.job)) or approximate(job) < approximate(other.job)
    return not simpler and needed > WORTH_TELLING * other.memory.needed_bytes


def _nearest(jobs: list[Job], asked: Asked) -> list[Candidate]:
    """Jobs by their guessed bytes, the least first: asked about until one fits, or a few do not."""
    found: list[Candidate] = []
    for exact in (False, True):
        kind = [job for job in jobs if not (exact and approximate(job))]
        for job in sorted(kind, key=lambda one: asked.guess(one)[0])[:2]:
            if all(job != candidate.job for candidate in found):
                found.append(asked.of(job))
    fitting = [candidate for candidate in found if candidate.fits]
    if fitting:
        return sorted(fitting, key=lambda one: preference(one.job, one.speed.seconds_per_update))
    return sorted(found, key=lambda one: one.memory.needed_bytes)


# --- what each way saves ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """A way taken alone: its words, the settings, the bytes that it saves, and the time that it costs as a factor."""

    words: str
    settings: dict[str, Any]
    saved_bytes: int
    time_factor: float


def savings(job: Job, target: Target, memory: MemoryOf, *, clipping: bool = True) -> list[Saving]:
    """What each way would save of a job that does not fit, the most first; ways that it has are left out."""
    asked = Asked(memory, target, 0.0)
    job = replace(job, device=target.device)
    base = asked.of(job)
    made = []
    for changes in _changes(job, target, clipping):
        changed = replace(job, **changes)
        other = asked.of(changed)
        text = "batch_size = 1" if "batch_size" in changes else words(replace(job, **PLAIN | changes))[0]
        time_factor = base.speed.tokens_per_second / other.speed.tokens_per_second
        made.append(Saving(text, changes, base.memory.needed_bytes - other.memory.needed_bytes, time_factor))
    made = [saving for saving in made if saving.saved_bytes > 0]
    return sorted(made, key=lambda saving: -saving.saved_bytes)


def _changes(job: Job, target: Target, clipping: bool) -> list[dict[str, Any]]:
    rows = job.batch_size * job.gradient_accumulation_steps
    options: list[dict[str, Any]] = []
    if job.batch_size > 1:
        options.append({"batch_size": 1, "gradient_accumulation_steps": rows})
    fixed = frozenset(("batch_size", "gradient_accumulation_steps"))
    for other in all_of(job, target, rows_per_update=rows, fixed=fixed, clipping=clipping):
        changes = {name: getattr(other, name) for name in WAYS if getattr(other, name) != getattr(job, name)}
        if len(changes) == 1 and ways(other) > ways(job) and possible(replace(job, **changes)):
            options.append(changes)
    return options
