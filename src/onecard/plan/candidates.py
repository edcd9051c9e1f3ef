"""Which settings an update can be computed with: the ways of the engine that change memory or time and not its rows.

In: a `Job` and what the user fixed. Out: every job that computes the same update, a rough guess of its bytes, and how
much one is preferred. The real bytes are another's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from onecard.plan.costs import BYTES, kept_values, row_tokens, trained_parameters
from onecard.plan.job import Job, Memory, Speed, Target
from onecard.plan.shape import Shape, shape_of

# Ways that change an update's result by a little must make it so much faster each to be taken.
APPROXIMATION_COST = 1.15
# So must every other way, for each is one more thing that can go wrong; and a micro-batch of twice the size, for its
# memory may be wanted elsewhere.
MEASURE_COST, DOUBLING_COST = 1.04, 1.003
# Layers that are traced keep about so much more than the values that `kept_values` counts: norms are taken in fp32.
KEPT_SHARE = 1.4
# So many layers are on their way to the host, or back already.
OFFLOADED_LAYERS = 5
# A chunk of logits, as it is computed, widened and turned into gradients.
CHUNK_BYTES = 768 << 20
# What a driver and libraries take of a card.
CONTEXT_BYTES = 600 << 20
# Of the free memory of the host so much may be pinned for what a card has no room for.
HOST_SHARE = 0.8
# More micro-batch sizes than these are not looked at.
MOST_SIZES = 12
# On a CPU a larger micro-batch leaves the caches sooner than it makes a product faster.
MOST_TOKENS_ON_CPU = 4096
# Below this share of the rate of fp32, a CPU gains nothing from bf16 (as when `auto` chooses the format).
WORTHWHILE = 1.2
WAYS: dict[str, tuple[Any, ...]] = {
    "precision": (),  # depends on the machine
    "activation_checkpointing": ("none", "selective", 2, "full"),
    "activation_compression": ("none", "8bit"),
    "activation_offload": (False, True),
    "optimizer_states": ("fp32", "8bit", "host"),
    "optimizer_in_backward": (False, True),
    "gradients": ("fp32", "bf16"),
}
PLAIN: dict[str, Any] = {name: values[0] for name, values in WAYS.items() if values} | {"precision": "bf16"}
_WORDS = {
    ("activation_checkpointing", "selective"): "selective checkpointing",
    ("activation_checkpointing", "full"): "full checkpointing",
    ("activation_compression", "8bit"): "activations in 8 bits",
    ("activation_offload", True): "activations on the host",
    ("optimizer_states", "8bit"): "8-bit optimizer states",
    ("optimizer_states", "host"): "optimizer states on the host",
    ("optimizer_in_backward", True): "optimizer in backward",
    ("precision", "pure_bf16"): "weights in bf16",
    ("gradients", "bf16"): "gradients in bf16",
}
_APPROXIMATE = {
    ("activation_compression", "8bit"),
    ("optimizer_states", "8bit"),
    ("precision", "pure_bf16"),
    ("gradients", "bf16"),
}


@dataclass(frozen=True)
class Candidate:
    """Settings, and what they are predicted to take. `margin_bytes`: what stays free of the whole capacity."""

    job: Job
    memory: Memory
    speed: Speed
    fits: bool
    margin_bytes: int

    @property
    def measures(self) -> list[str]:
        """The ways of saving memory that it uses, in words."""
        return words(self.job)


def ways(job: Job) -> frozenset[tuple[str, Any]]:
    """The settings that differ from the plain ones and save memory."""
    found = {(name, getattr(job, name)) for name, plain in PLAIN.items() if getattr(job, name) != plain}
    return frozenset(way for way in found if way[0] != "precision" or way[1] == "pure_bf16")


def words(job: Job) -> list[str]:
    """The ways of a job for a person."""
    order = list(WAYS)
    return [
        _WORDS.get(way, f"1 layer in {way[1]} checkpointed")
        for way in sorted(ways(job), key=lambda way: order.index(way[0]))
    ]


def approximate(job: Job) -> int:
    """How many of its ways change the result; frozen weights in bf16 are what most models are published in."""
    return len(ways(job) & _APPROXIMATE) - (job.method != "full" and job.precision == "pure_bf16")


def preference(job: Job, seconds: float) -> float:
    """Seconds of an update, more for ways that change its result or are merely more to go wrong: less is better."""
    larger: float = APPROXIMATION_COST ** approximate(job) * MEASURE_COST ** len(ways(job))
    return seconds * larger * math.pow(DOUBLING_COST, math.log2(job.batch_size))


def all_of(job: Job, target: Target, *, rows_per_update: int, fixed: frozenset[str], clipping: bool) -> Iterator[Job]:
    """Every job that computes an update of so many rows as `job` does, with its `fixed` settings.

    `clipping`: gradients are clipped by their norm, which a step inside backward cannot know.
    """
    axes = {name: _values(name, job, target, clipping) for name in WAYS if name not in fixed}
    room, shape = HOST_SHARE * (target.host_memory_bytes or math.inf), shape_of(job.model)
    for batch_size, steps in splits(job, target, rows_per_update, fixed):
        for chosen in product(*axes.values()):
            made = replace(
                job,
                batch_size=batch_size,
                gradient_accumulation_steps=steps,
                device=target.device,
                **dict(zip(axes, chosen, strict=True)),
            )
            if possible(made) and host_bytes(made, shape) <= room:
                yield made


def _values(name: str, job: Job, target: Target, clipping: bool) -> tuple[Any, ...]:
    if name == "precision":
        return formats(job, target)
    if name == "activation_offload" and target.device == "cpu":
        return (False,)
    if name == "optimizer_in_backward" and (clipping or job.method != "full"):
        return (False,)
    if name == "gradients" and job.method != "full":
        return ("fp32",)
    if name == "optimizer_states" and (job.optimizer in ("adafactor", "sgd") or job.method != "full"):
        return ("fp32",)  # there are next to none
    if name == "optimizer_states" and target.device == "cpu":
        return ("fp32", "8bit")
    return WAYS[name]


def formats(job: Job, target: Target) -> tuple[str, ...]:
    """The number formats worth trying on a machine, the usual one first."""
    if target.device == "cpu":
        rates = target.flops_per_second
        if rates.get("bf16", 0.0) < WORTHWHILE * rates["fp32"]:
            return ("fp32",)
    elif target.capability is not None and target.capability < (8, 0):
        return ("fp16",) if target.capability >= (7, 0) else ("fp32",)
    return ("bf16",) if job.method == "qlora" or job.weights == "bf16" else ("bf16", "pure_bf16")


def splits(job: Job, target: Target, rows: int, fixed: frozenset[str]) -> list[tuple[int, int]]:
    """(batch_size, gradient_accumulation_steps) whose product is `rows`, or nearest to it where one is fixed."""
    batch_fixed, steps_fixed = "batch_size" in fixed, "gradient_accumulation_steps" in fixed
    if batch_fixed and steps_fixed:
        return [(job.batch_size, job.gradient_accumulation_steps)]
    if batch_fixed:
        return [(job.batch_size, max(1, round(rows / job.batch_size)))]
    if steps_fixed:
        return [(max(1, round(rows / job.gradient_accumulation_steps)), job.gradient_accumulation_steps)]
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    if target.device == "cpu":
        sizes = [size for size in sizes if size == 1 or size * row_tokens(job) <= MOST_TOKENS_ON_CPU]
    if len(sizes) > MOST_SIZES:
        step = (len(sizes) - 1) / (MOST_SIZES - 1)
        sizes = [sizes[round(number * step)] for number in range(MOST_SIZES)]
    return [(size, rows // size) for size in sizes]


def possible(job: Job) -> bool:
    """Whether the engine takes these settings together."""
    in_backward = job.optimizer_in_backward
    packs = job.activation_offload or job.activation_compression != "none"
    return not (
        (in_backward and (job.gradient_accumulation_steps > 1 or job.precision == "fp16" or job.gradients == "bf16"))
        or (packs and job.activation_checkpointing == "selective" and not job.engine.compiled)
        or (job.optimizer == "adafactor" and job.optimizer_states != "fp32")
    )


# --- a guess of the bytes -----------------------------------------------------------------------------------------


def kept_bytes(job: Job, shape: Shape | None = None) -> int:
    """Bytes that stay from update to update, gradients included: weights, gradients, states of the optimizer."""
    shape = shape or shape_of(job.model)
    trained = trained_parameters(job, shape)
    weight = 2 if job.precision == "pure_bf16" or job.weights == "bf16" else 4
    total = float(shape.parameters * weight)
    if job.method == "qlora":  # 4 bits and a scale for each block of 64
        total -= shape.matrix_parameters * (weight - 0.5625)
    if job.method != "full":
        total += 4 * trained
        weight = 4
    if not job.optimizer_in_backward:
        total += trained * (2 if job.gradients == "bf16" else 4)
    values = {"adamw": 2, "muon": 1}.get(job.optimizer, 0)
    return int(total + trained * values * {"fp32": 4.0, "8bit": 1.03, "host": 0.0}[job.optimizer_states])


def host_bytes(job: Job, shape: Shape) -> float:
    """Bytes that a card keeps in the memory of the host (about)."""
    if job.device == "cpu":
        return 0.0
    states = {"adamw": 8, "muon": 4}.get(job.optimizer, 0) if job.optimizer_states == "host" else 0
    size = 1 if job.activation_compression == "8bit" else BYTES[job.precision]
    kept = job.batch_size * row_tokens(job) * kept_values(job, shape) * size if job.activation_offload else 0.0
    return states * trained_parameters(job, shape) + kept


def passing_bytes(job: Job, shape: Shape | None = None) -> tuple[int, int]:
    """Bytes that come and go within an update (about): those of any micro-batch, and those that grow with its tokens.

    Narrowed weights and a chunk of logits; activations and a layer at work.
    """
    shape = shape or shape_of(job.model)
    element = BYTES[job.precision]
    tokens = job.batch_size * row_tokens(job)
    size = 1 if job.activation_compression == "8bit" else element
    grows = KEPT_SHARE * tokens * kept_values(job, shape) * size
    if job.activation_offload:
        grows *= min(1.0, OFFLOADED_LAYERS / shape.layers)
    layer = kept_values(replace(job, activation_checkpointing="none"), shape) / shape.layers
    grows += 2 * tokens * layer * element
    logits = 0 if shape.head is None else tokens * shape.head.outputs * 8
    constant = CONTEXT_BYTES if job.device == "cuda" else 0
    constant += min(logits, CHUNK_BYTES) if job.engine.chunked_loss else 0
    grows += 0 if job.engine.chunked_loss else logits
    if job.precision in ("bf16", "fp16") and job.weights != "bf16" and job.method != "qlora":
        constant += 2 * (shape.matrix_parameters + (0 if shape.head is None else shape.head.weights))
    return constant, int(grows)
