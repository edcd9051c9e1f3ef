"""Learning rate over a run, as a factor of its peak. Counts real updates; a pure function, so resuming is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then cosine, or stable and linear decay (wsd, Hu et al. 2024), to `final_ratio` of the peak."""

    kind: str
    max_steps: int
    warmup_ratio: float
    decay_ratio: float
    final_ratio: float

    def factor(self, update: int) -> float:
        """The factor for update 0, 1, ... max_steps - 1: never 0 at the first, `final_ratio` just after the last."""
        warmup = round(self.warmup_ratio * self.max_steps)
        if update < warmup:
            return (update + 1) / (warmup + 1)
        if self.kind == "cosine":
            through = (update - warmup) / max(1, self.max_steps - warmup)
            shape = 0.5 * (1 + math.cos(math.pi * through))
        else:
            # The decay begins after the warm-up, even if together they ask for more than the run.
            decay = max(1, min(round(self.decay_ratio * self.max_steps), self.max_steps - warmup))
            shape = min(1.0, (self.max_steps - update) / decay)
        return self.final_ratio + (1 - self.final_ratio) * shape
