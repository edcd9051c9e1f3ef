"""How large a model to train in a given time, from the measured rate of matrix products.

Knows products only; what attention, memory traffic and Python cost is in one share, measured on the quickstart's model.
Where a time limit decides the number of updates, it does not come from here: real updates are timed.
"""

from __future__ import annotations

from onecard.model.presets import PRESETS, Preset

# Share of the measured product rate that training reaches (2 CPU cores, 4M preset, compiled; a card is assumed lower).
UTILISATION = {"cpu": 0.65, "cuda": 0.35}
# Beyond about four passes, repeated text teaches much less than new text (Muennighoff et al. 2023).
MOST_EPOCHS = 4.0
# A model is worth its size when it sees at least this many tokens for each parameter of its layers. Far below the
# 20 of Hoffmann et al. 2022, because a run of minutes on a small corpus is measured at its end, not at its optimum:
# benchmarks/RESULTS.md has the runs behind it.
LEAST_TOKENS_PER_PARAMETER = 0.2


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
