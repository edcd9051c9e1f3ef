"""How fast an update is on a machine, what energy it takes, and how large a model to train in a given time.

In: a `Job` and a `Target`. Out: a `Speed`, by kind of operation: each takes what its work or its bytes need at the rate
that it reaches (a roofline, Williams et al. 2009), one after the other; only copies of kept activations run beside the
computation. The shares below are of whole kinds of operations and of no single measurement; benchmarks/speeds.py shows
what they give beside what others and we measured.
Where a time limit decides the number of updates, it does not come from here: real updates are timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onecard.errors import ConfigError
from onecard.model.presets import PRESETS, Preset
from onecard.plan.costs import BYTES, Costs, Work, costs_of, update_tokens

if TYPE_CHECKING:
    from onecard.plan.job import Job, Speed, Target

# Share of the rate of large square products that a network's products reach when they are large. On a card others'
# measurements are of shapes like these already.
PRODUCT_SHARE = {"cuda": 1.0, "cpu": 0.85}
# A tile of a product is as long under way as if its inner dimension were so much longer (filled and emptied pipeline).
TILE_OVERHEAD = {"cuda": 64, "cpu": 16}
# Tiles of 128 x 128 that are lost when the last round of a product leaves a part of a card idle: a quarter of the
# hundred or so multiprocessors, because libraries choose tiles that suit the shape; and the inner length from which on
# they cut a product in pieces along it.
TILE, LOST_TILES, CUT_FROM = 128, 32, 1024
# Share of the product rate in attention: fused kernels reach about 65 % forward and backward (Dao 2023); on a CPU the
# softmax of a block costs as much again.
ATTENTION_SHARE = {"cuda": 0.65, "cpu": 0.3}
# Share of the rate of a large copy in traffic between products: small kernels, and on a CPU their arithmetic.
TRAFFIC_SHARE = {"cuda": 0.95, "cpu": 0.5}
# The processor needs so long to start a kernel (PyTorch, Python included); a card that is faster waits for it.
LAUNCH_SECONDS = 7e-6
# A card draws about so much of its limit in training: 375 to 400 of 450 W were measured on a 4090.
POWER_SHARE = 0.86
# Factors within which the truth is expected: rates measured on the machine itself; a card whose products others
# measured; one of which only the datasheet is known.
UNCERTAINTY = {"measured": 1.25, "published": 1.4, "datasheet": 1.6}
# Share of the measured product rate that training reaches (2 CPU cores, 4M preset, compiled; a card is assumed lower).
UTILISATION = {"cpu": 0.65, "cuda": 0.35}
# Beyond about four passes, repeated text teaches much less than new text (Muennighoff et al. 2023).
MOST_EPOCHS = 4.0
# A model is worth its size when it sees at least this many tokens for each parameter of its layers. Far below the
# 20 of Hoffmann et al. 2022, because a run of minutes on a small corpus is measured at its end, not at its optimum:
# benchmarks/RESULTS.md has the runs behind it.
LEAST_TOKENS_PER_PARAMETER = 0.2


@dataclass(frozen=True)
class Energy:
    """What a run takes from the wall for the card alone; None: power or price is unknown."""

    kwh: float | None
    cost: float | None


def speed(job: Job, target: Target, *, learned_share: float = 1.0, document_tokens: float | None = None) -> Speed:
    """Predicted time of an update of `job` on `target`, by cause. ConfigError for a format that the machine lacks.

    Of rows that are known: the share of tokens with a label (others get no logits), and the mean length of the
    documents in them, weighted by length (None: a document fills a row).
    """
    from onecard.plan.job import Speed
    from onecard.plan.shape import shape_of

    form = "bf16" if job.precision == "pure_bf16" else job.precision
    if form not in target.flops_per_second:
        raise ConfigError(
            f"precision = {job.precision} cannot be had on {target.name}.",
            f"It has {', '.join(sorted(target.flops_per_second))}.",
        )
    here, shape = replace(job, device=target.device), shape_of(job.model)
    parts = seconds_of(costs_of(here, shape, learned_share=learned_share, document_tokens=document_tokens), target)
    seconds = sum(parts.values())
    return Speed(
        seconds_per_update=seconds,
        tokens_per_second=update_tokens(job) / seconds,
        uncertainty=uncertainty(target),
        watts=None if target.watts is None else target.watts * POWER_SHARE,
        measured=target.measured,
        parts=parts,
    )


def seconds_of(costs: Costs, target: Target) -> dict[str, float]:
    """Seconds of an update by cause."""
    device = target.device
    bandwidth = target.memory_bytes_per_second
    attention_rate = target.flops_per_second[costs.attention_format] * ATTENTION_SHARE[device]
    parts = {
        "products": sum(product_seconds(work, target) for work in costs.products),
        "attention": costs.attention_flops / attention_rate,
        "memory traffic": costs.traffic_bytes / (bandwidth * TRAFFIC_SHARE[device]),
        "optimizer": costs.optimizer_bytes / (bandwidth * TRAFFIC_SHARE[device])
        + sum(product_seconds(work, target) for work in costs.optimizer_products),
    }
    computing, launching = sum(parts.values()), costs.launches * LAUNCH_SECONDS
    # A card works while the processor starts what comes next; a CPU does one after the other.
    parts["launches"] = max(0.0, launching - computing) if device == "cuda" else launching
    bus = target.host_bytes_per_second
    if bus is not None:
        # What lies on the host goes out beside the forward pass and comes back beside the backward, twice as long.
        way = costs.hidden_bytes / 2 / bus
        seen = max(0.0, way - computing / 3) + max(0.0, way - computing * 2 / 3)
        parts["transfers"] = costs.host_bytes / bus + seen
    return parts


def product_seconds(work: Work, target: Target) -> float:
    """Seconds of a product: of its work at the rate it reaches, or of reading and writing its matrices."""
    device, size = target.device, BYTES[work.format]
    reached = PRODUCT_SHARE[device] * work.inner / (work.inner + TILE_OVERHEAD[device])
    if device == "cuda":
        tiles = work.rows / TILE * work.columns / TILE * max(1.0, work.inner / CUT_FROM)
        reached *= tiles / (tiles + LOST_TILES)
    values = work.rows * work.inner + work.inner * work.columns + work.rows * work.columns
    return max(
        work.flops / (target.flops_per_second[work.format] * reached),
        work.times * values * size / target.memory_bytes_per_second,
    )


def uncertainty(target: Target) -> float:
    """The factor within which the truth is expected, either way."""
    from onecard.machine.cards import find_card

    if target.measured:
        return UNCERTAINTY["measured"]
    card = find_card(target.name)
    return UNCERTAINTY["published" if card is not None and card.gemm_tflops is not None else "datasheet"]


def energy(speed: Speed, seconds: float, electricity_price: float | None = None) -> Energy:
    """Of the card for so many seconds of training; `electricity_price` of a kWh in any currency."""
    if speed.watts is None:
        return Energy(None, None)
    kwh = speed.watts * seconds / 3.6e6
    return Energy(kwh, None if electricity_price is None else kwh * electricity_price)


# --- a size for a time --------------------------------------------------------------------------------------------


def choose_size(
    *, seconds: float, flops_per_second: float, device: str, vocabulary: int, tokens: int, context_tokens: int | None
) -> Preset:
    """The largest preset that sees enough tokens in `seconds` (at most MOST_EPOCHS passes over `tokens`).

    `context_tokens` None: what suits each size.
    """
    rate = flops_per_second * UTILISATION.get(device, 0.3)
    chosen = next(iter(PRESETS.values()))
    for preset in PRESETS.values():
        seen = (
            seconds * rate / preset.training_flops_per_token(vocabulary, (context_tokens or preset.context_tokens) / 2)
        )
        if min(seen, MOST_EPOCHS * tokens) >= LEAST_TOKENS_PER_PARAMETER * preset.layer_parameters():
            chosen = preset
    return chosen


def updates_in_time(seconds: float, seconds_per_update: float, *, evaluation_share: float) -> int:
    """How many updates fit, when evaluations, samples and checkpoints take `evaluation_share` of the time."""
    return max(1, int(seconds * (1 - evaluation_share) / seconds_per_update))


def update_seconds(*, parameters: int, tokens: int, flops_per_second: float, device: str) -> float:
    """A rough guess at the seconds of an update: 6 FLOP a parameter and token, at the usual share of the rate."""
    return 6.0 * parameters * tokens / max(1.0, flops_per_second * UTILISATION.get(device, 0.3))
