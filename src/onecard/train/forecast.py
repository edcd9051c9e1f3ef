"""How much memory an update will take, found by running it: the engine's own step on tensors without content.

In: a `Job`. Out: a `Memory`. The model, its attention, what backward keeps, optimizer, loss and loop are those of a
run; `plan.trace` takes note of every allocation. A deep model is traced with a few layers, which are then repeated
where that is exact. Nothing of the model's size is allocated. Steps for a card are traced inside `fake_card`.
What is told is an update after the first one, when the states of the optimizer are there, and an evaluation after it;
loading a model, samples and checkpoints are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from onecard.plan import allocator
from onecard.plan.job import Job, Memory, Moment
from onecard.plan.trace import NotPeriodic, Recorder, Trace
from onecard.train import muon
from onecard.train.fake_step import JobRows, make_loop, packs, per_layer, quiet, run_step, text_of
from onecard.train.loop import Loop
from onecard.train.metrics import RunLog
from onecard.train.watched import Watched

# Traced around the block of layers that is repeated: so many before it, and after it. The first that is exact is taken.
_MARGINS = (1, 2, 3)
_LONGEST_PERIOD = 8
# What libraries keep is about the same on all cards before Hopper.
_CAPABILITY = (8, 6)


def memory(job: Job) -> Memory:
    """What the update holds at its peak and over its course, in bytes."""
    trace = trace_of(job)
    peak = trace.peak()
    allocated = reserved = peak.bytes
    context = beside = 0
    if job.device == "cuda":
        usage = allocator.simulate(_from_the_beginning(trace))
        allocated, reserved = usage.peak_allocated_bytes, usage.peak_reserved_bytes
        context = allocator.context_bytes(_CAPABILITY)
        beside = sum(allocator.workspace_bytes(_CAPABILITY))
    return Memory(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        context_bytes=context,
        breakdown=_more_workspace(peak.breakdown, allocated - peak.bytes),
        moments=tuple(Moment(moment.place, _more_workspace(moment.bytes, beside)) for moment in trace.moments()),
        largest=peak.largest,
    )


def _more_workspace(held: dict[str, int], size: int) -> dict[str, int]:
    """With what libraries hold, and what is lost to rounding."""
    return held | {"workspace": held["workspace"] + size}


def _from_the_beginning(trace: Trace) -> Iterator[tuple[int, int]]:
    """What an allocator sees of the first two updates and an evaluation.

    States come into being at the end of the first update, in the holes that its activations left; those of the second
    one do not fit there any more. That is most of what is reserved and not used.
    """
    records = trace.records
    there = {number for number, record in enumerate(records) if record.segment == 0}
    states = [number for number in sorted(there) if records[number].kind == "optimizer"]
    yield from ((-1 - index, size) for index, size in enumerate(allocator.workspace_bytes(_CAPABILITY)))
    yield from ((number, records[number].bytes) for number in sorted(there - set(states)))
    made = False
    for update in range(2):
        for segment, number in trace.happenings:
            where, record = trace.segments[segment], number if number >= 0 else ~number
            if record in there or (where.part == "evaluation" and not update):
                continue
            if where.part == "optimizer" and where.round > 1 and not made:
                yield from ((state, records[state].bytes) for state in states)
                made = True
            id_ = record + update * len(records)
            yield (id_, records[record].bytes) if number >= 0 else (id_, 0)
        if not made:  # steps inside backward
            yield from ((state, records[state].bytes) for state in states)
            made = True


def trace_of(job: Job, *, traced_layers: int | None = None) -> Trace:
    """The trace of the update. `traced_layers`: how many layers are run (for tests); None: as few as are exact.

    Models that have no place for the boundaries of packed documents are padded, as they are in a run.
    """
    if not packs(job):
        return _trace(job, traced_layers)
    try:
        return _trace(job, traced_layers)
    except (AssertionError, TypeError, NotImplementedError):
        return _trace(replace(job, packed=False, longest_tokens=None), traced_layers)


def _trace(job: Job, traced_layers: int | None) -> Trace:
    layers = int(text_of(job.model).num_hidden_layers)
    if traced_layers is not None:
        return run_step(job, traced_layers)
    period = _period(job)
    for margin in _MARGINS[_layers_that_differ_at_the_ends(job) :] if period is not None else ():
        assert period is not None
        fewest = max(2 * margin + period, _layers_that_fill_a_stack(job))
        traced = fewest + (layers - fewest) % period
        if traced >= layers:
            break
        try:
            trace = run_step(job, traced)
            return trace.deepened(first=margin, period=period, copies=(layers - traced) // period)
        except NotPeriodic:
            continue
    return run_step(job, layers)


def held_bytes(job: Job, run: Path) -> tuple[Loop, int]:
    """The same loop on real tensors, for who measures a small model; and the bytes of its weights and states.

    `run` is a directory for its record.
    """
    recorder = Recorder()
    with quiet():
        loop, handles = make_loop(job, job.model, JobRows(job), recorder, fake=False)
    for handle in handles:
        handle.remove()
    assert isinstance(loop.objective, Watched)
    loop.objective, loop.log = loop.objective.inner, RunLog(run)
    found: list[Tensor] = [*loop.model.parameters(), *loop.model.buffers()]
    for unit in loop.optimizers.units:
        for state in unit.part.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
    for module in loop.model.modules():
        for state in _states_of_codes(getattr(module, "weight", None)):
            found += [value for value in vars(state).values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}
    return loop, sum(storages.values())


def _states_of_codes(weight: object) -> list[object]:
    """What bitsandbytes keeps beside the codes of a weight in 4 bits."""
    outer = getattr(weight, "quant_state", None)
    inner = getattr(outer, "state2", None)
    return [state for state in (outer, inner) if state is not None]


# --- which layers are alike ---------------------------------------------------------------------------------------


def _period(job: Job) -> int | None:
    """After so many layers the same kinds of layers come again; None if they never do."""
    config = text_of(job.model)
    every = job.activation_checkpointing if isinstance(job.activation_checkpointing, int) else 1
    for period in range(1, _LONGEST_PERIOD + 1):
        kinds = per_layer(config).values()
        if period % every == 0 and all(kind[period:] == kind[: len(kind) - period] for kind in kinds):
            return period
    return None


def _layers_that_differ_at_the_ends(job: Job) -> int:
    """At each end of the model so many layers hold what no other does, beyond the first and the last one.

    What is repeated, packed or in codes of 4 bits is let go in the neighbouring layer, so one more is unlike the rest.
    """
    kinds = per_layer(text_of(job.model)).values()
    if not job.engine.compiled or any(one != kind[0] for kind in kinds for one in kind):
        return 0  # not always: they are tried one after the other
    every = isinstance(job.activation_checkpointing, int) and job.activation_checkpointing > 1
    return int(every or job.activation_offload or job.method == "qlora")


def _layers_that_fill_a_stack(job: Job) -> int:
    """Muon takes matrices of one shape in stacks: with so many layers the stacks are as high as they get."""
    if job.optimizer != "muon" or job.method != "full":
        return 1
    width = int(text_of(job.model).hidden_size)
    return -(-muon.STACK // (width * width))
