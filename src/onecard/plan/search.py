"""The best settings for an update on a machine: the fastest that fit, and what else would do.

In: a job, a target and a function that tells the memory of a job, which may take a second a call: so it is asked
little. Every job is guessed roughly first; each answer corrects the guesses of its kind; and what holds more than
something that did not fit is not asked about. Out: candidates, the best first; where nothing fits, those nearest to it.
"""

from __future__ import annotations

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
from onecard.plan.floor import floor
from onecard.plan.job import Job, Memory, Speed, Target
from onecard.plan.shape import Shape, shape_of
from onecard.plan.speed import speed

MemoryOf = Callable[[Job], Memory]
SpeedOf = Callable[[Job, Target], Speed]
# What stays free: the planner's own error, and what a desktop takes in the middle of a run.
MARGIN = 0.05
ALTERNATIVES = 3
# Asked at most so often; counted and not timed, so that a search finds the same on every machine.
MOST_CALLS = 10
# A guess may be so far off before its kind was ever asked about, and after.
TRUST_BEFORE, TRUST_AFTER = 1.05, 1.03
# An allocator keeps about so much more than tensors take.
RESERVED = 1.05
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
    _answers: dict[Any, Memory] = field(default_factory=dict)
    # What was told over what was guessed, of the bytes that stay and of those that pass, by what decides them.
    _staying: dict[Any, float] = field(default_factory=dict)
    _passing: dict[Any, float] = field(default_factory=dict)
    _sums: tuple[float, float] = (0.0, 0.0)

    @property
    def limit_bytes(self) -> float:
        """What may be needed at most."""
        return self.target.capacity_bytes * (1 - self.margin)

    @property
    def exhausted(self) -> bool:
        """Whether enough was asked."""
        return self.calls >= MOST_CALLS

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

    def fits(self, job: Job) -> bool:
        """Whether a job fits. Not asked about is one that cannot: whose weights, states and gradients are too much."""
        return floor(job).total_bytes <= self.limit_bytes and self.of(job).fits

    def _learn(self, job: Job, memory: Memory) -> None:
        told = sum(memory.breakdown.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        staying = told or kept_bytes(job)
        self._staying[_state(job)] = staying / kept_bytes(job)
        constant, grows = passing_bytes(job)
        passing = max(0.1 * grows, memory.needed_bytes / RESERVED - staying - constant)
        self._passing[_kind(job)] = passing / grows
        self._sums = self._sums[0] + passing, self._sums[1] + grows

    def guess(self, option: Option) -> tuple[float, float]:
        """Bytes that an option needs, and the factor by which that may be too much."""
        asked = option.kind in self._passing and option.state in self._staying
        # What is small is far off more easily, so kinds never asked about follow the sums.
        staying = self._staying.get(option.state, 1.0)
        passing = self._passing.get(option.kind, self._sums[0] / self._sums[1] if self._sums[1] else 1.0)
        trust = TRUST_AFTER if asked else TRUST_BEFORE
        constant, grows = option.passing_bytes
        return RESERVED * (staying * option.kept_bytes + constant + passing * grows), trust


@dataclass(frozen=True)
class Option:
    """A job to choose among: how much it is preferred (less is better), and what its guess is made of."""

    job: Job
    preference: float
    ways: frozenset[tuple[str, Any]]
    approximate: int
    kept_bytes: int
    least_bytes: int
    passing_bytes: tuple[int, int]
    state: tuple[Any, ...]
    kind: tuple[Any, ...]


def _option(job: Job, shape: Shape, target: Target, speed_of: SpeedOf) -> Option:
    seconds = preference(job, speed_of(job, target).seconds_per_update)
    return Option(
        job,
        # An update of a fixed split may have other rows than another: compared is the time of a row.
        seconds / (job.batch_size * job.gradient_accumulation_steps),
        ways(job),
        approximate(job),
        kept_bytes(job, shape),
        floor(job, shape).total_bytes,
        passing_bytes(job, shape),
        _state(job),
        _kind(job),
    )


def _key(job: Job) -> tuple[Any, ...]:
    sizes = (job.batch_size, job.gradient_accumulation_steps, job.max_length)
    return (shape_of(job.model), *sizes, job.precision, job.optimizer_states, ways(job))


def _state(job: Job) -> tuple[Any, ...]:
    """Jobs whose staying bytes a guess is wrong about in the same way."""
    return job.precision, job.optimizer_states, job.optimizer_in_backward, job.gradients


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
    jobs = all_of(job, target, rows_per_update=rows_per_update, fixed=fixed, clipping=clipping)
    shape = shape_of(job.model)
    options = sorted((_option(one, shape, target, speed_of) for one in jobs), key=lambda option: option.preference)
    return _fitting(options, asked) or _nearest(options, asked)


def _fitting(options: list[Option], asked: Asked) -> list[Candidate]:
    """What fits of the options, the most preferred first, and no two that are much alike.

    After each answer the guesses are better, so the next question is looked for from the beginning.
    """
    accepted: list[tuple[Option, Candidate]] = []
    refused: list[Option] = []
    while len(accepted) <= ALTERNATIVES and not asked.exhausted:
        option = next((one for one in options if _worth_asking(one, accepted, refused, asked)), None)
        if option is None:
            break
        candidate = asked.of(option.job)
        if candidate.fits:
            accepted.append((option, candidate))
        else:
            refused.append(option)
    accepted.sort(key=lambda pair: pair[0].preference)
    told: list[tuple[Option, Candidate]] = []
    for option, candidate in accepted:
        if not any(_tells_nothing(option, candidate.memory.needed_bytes, other) for other in told):
            told.append((option, candidate))
    return [candidate for _, candidate in told]


def _worth_asking(
    option: Option, accepted: list[tuple[Option, Candidate]], refused: list[Option], asked: Asked
) -> bool:
    guess, trust = asked.guess(option)
    if option.least_bytes > asked.limit_bytes:
        return False
    if guess > asked.limit_bytes * trust or any(_holds_as_much(option, other) for other in refused):
        return False
    better = [pair for pair in accepted if pair[0].preference <= option.preference]
    return all(pair[0] is not option for pair in accepted) and not any(
        _tells_nothing(option, guess, pair) for pair in better
    )


def _holds_as_much(option: Option, other: Option) -> bool:
    """Whether an option surely holds as much as another: no smaller micro-batch, and no way that the other lacks."""
    job, less = option.job, other.job
    more_steps = job.gradient_accumulation_steps > 1 or less.gradient_accumulation_steps == 1
    return job.batch_size >= less.batch_size and more_steps and option.ways <= other.ways


def _tells_nothing(option: Option, needed: float, better: tuple[Option, Candidate]) -> bool:
    """Whether an option beside a faster one is no alternative: the same ways, or not fewer for little less memory."""
    other, candidate = better
    if option.ways == other.ways:
        return True
    simpler = len(option.ways) < len(other.ways) or option.approximate < other.approximate
    return not simpler and needed > WORTH_TELLING * candidate.memory.needed_bytes


def _nearest(options: list[Option], asked: Asked) -> list[Candidate]:
    """The options that are guessed to need least, of all and of the exact ones, asked about: nearest first."""
    found: list[Candidate] = []
    for exact in (False, True):
        kind = [option for option in options if not (exact and option.approximate)]
        for option in sorted(kind, key=lambda one: asked.guess(one)[0])[:2]:
            if all(option.job != candidate.job for candidate in found):
                found.append(asked.of(option.job))
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
