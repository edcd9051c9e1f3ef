"""What makes an update fit that needs too much: measures, the cheapest first, each on top of those before it.

In: a `Job` and whether one fits (a callable). Out: the job that fits and the settings that differ. Knows the order in
which measures cost: first what changes no result, then what changes numbers, then what trains less, then shorter rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import Any

from onecard.plan.job import Job

# Rows are not made shorter than this: chats would no longer fit into one.
SHORTEST_ROW = 256
# Of the adapters that are proposed.
RANK = 16
EVERY = (
    "batch_size",
    "activation_checkpointing",
    "optimizer_states",
    "gradients",
    "optimizer_in_backward",
    "precision",
    "optimizer",
    "lora",
    "qlora",
    "max_length",
)


def relieved(job: Job, fits: Callable[[Job], bool], measures: Collection[str] = EVERY) -> Job | None:
    """The first job on the ladder of these measures that fits; None where all of them together do not suffice."""
    return next((step for step in steps(job, measures) if fits(step)), None)


def steps(job: Job, measures: Collection[str] = EVERY) -> Iterator[Job]:
    """The job under one measure, under that and the next, and so on."""
    for name in (name for name in EVERY if name in measures):
        while (changed := _MEASURES[name](job)) is not None:
            job = changed
            yield job


def differing(job: Job, other: Job) -> dict[str, Any]:
    """Settings by name that `other` has otherwise than `job`, in their order."""
    names = [field.name for field in fields(Job) if field.name not in ("model", "weights", "engine")]
    return {name: getattr(other, name) for name in names if getattr(other, name) != getattr(job, name)}


def _smaller_batch(job: Job) -> Job | None:
    if job.batch_size == 1:
        return None
    rows = job.batch_size * job.gradient_accumulation_steps
    half = job.batch_size // 2
    if job.optimizer_in_backward:  # every update is one micro-batch
        return replace(job, batch_size=half)
    return replace(job, batch_size=half, gradient_accumulation_steps=max(1, rows // half))


def _more_checkpointing(job: Job) -> Job | None:
    following = {"none": "selective", "selective": "full"}.get(str(job.activation_checkpointing))
    if following is None and isinstance(job.activation_checkpointing, int) and job.activation_checkpointing > 1:
        following = "full"
    packs = job.activation_offload or job.activation_compression != "none"
    if following == "selective" and packs and not job.engine.compiled:
        following = "full"
    return None if following is None else replace(job, activation_checkpointing=following)  # type: ignore[arg-type]


def _smaller_states(job: Job) -> Job | None:
    if job.optimizer not in ("adamw", "muon") or job.optimizer_states != "fp32":
        return None
    return replace(job, optimizer_states="8bit")


def _smaller_gradients(job: Job) -> Job | None:
    if job.gradients == "bf16" or job.optimizer_in_backward or job.method != "full":
        return None
    return replace(job, gradients="bf16")


def _in_backward(job: Job) -> Job | None:
    """Takes the place of 16-bit gradients: with it there are none, and an update is one micro-batch."""
    if job.optimizer_in_backward or job.method != "full" or job.precision == "fp16":
        return None
    return replace(job, optimizer_in_backward=True, gradients="fp32", gradient_accumulation_steps=1)


def _smaller_weights(job: Job) -> Job | None:
    return replace(job, precision="pure_bf16") if job.precision in ("fp32", "bf16") else None


def _adafactor(job: Job) -> Job | None:
    if job.optimizer in ("adafactor", "sgd") or job.method != "full":
        return None
    return replace(job, optimizer="adafactor", optimizer_states="fp32")


def _adapters(job: Job) -> Job | None:
    """Takes the place of what makes training all weights cheaper: there is little left to save."""
    if job.method != "full":
        return None
    plain = replace(job, optimizer_in_backward=False, gradients="fp32", optimizer="adamw", optimizer_states="fp32")
    return replace(plain, method="lora", lora_rank=job.lora_rank or RANK)


def _four_bits(job: Job) -> Job | None:
    return replace(job, method="qlora") if job.method == "lora" else None


def _shorter_rows(job: Job) -> Job | None:
    half = job.max_length // 2
    if half < SHORTEST_ROW:
        return None
    longest = None if job.longest_tokens is None else min(job.longest_tokens, half)
    return replace(job, max_length=half, longest_tokens=longest)


_MEASURES: dict[str, Callable[[Job], Job | None]] = {
    "batch_size": _smaller_batch,
    "activation_checkpointing": _more_checkpointing,
    "optimizer_states": _smaller_states,
    "gradients": _smaller_gradients,
    "optimizer_in_backward": _in_backward,
    "precision": _smaller_weights,
    "optimizer": _adafactor,
    "lora": _adapters,
    "qlora": _four_bits,
    "max_length": _shorter_rows,
}
