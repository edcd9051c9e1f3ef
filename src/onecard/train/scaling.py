"""Loss scaling for fp16, and the norm that gradients are clipped to.

fp16 has no numbers below 6e-8: small gradients would become 0. The loss is multiplied by a large power of two before
backward, and the gradients are divided by it (exactly) before anything looks at them. Where the products overflow
instead, the scale is halved. Knows gradients as tensors only, no model and no optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

START = 65536.0
# So many good updates in a row, and the scale is tried twice as large.
GOOD_UPDATES = 2000


class LossScale:
    """The dynamic scale; without `enabled` it is 1 and stays 1."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.value = START if enabled else 1.0
        self._enabled = enabled
        self._good = 0

    @torch.no_grad()
    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide by the scale, in place; exact, for the scale is a power of two."""
        if self.value != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)

    def update(self, overflow: bool) -> None:
        """Take note of an update: halve after an overflow (never below 1), double after many good ones."""
        if not self._enabled:
            return
        if overflow:
            self.value, self._good = max(1.0, self.value / 2), 0
            return
        self._good += 1
        if self._good == GOOD_UPDATES:
            self.value, self._good = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good": float(self._good)}

    def load(self, state: dict[str, float]) -> None:
        """The inverse of `state`; a scale that is not enabled stays 1."""
        if self._enabled:
            self.value, self._good = state["value"], int(state["good"])


@torch.no_grad()
def clip_(gradients: list[Tensor], limit: float) -> float:
    """Scale gradients in place so that their common norm is at most `limit` (0: never); the norm before, in fp32.

    Unlike torch's own it also adds up gradients kept in bf16 in fp32: a norm with three digits would clip by them.
    """
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    norm = float(total)
    if limit and math.isfinite(norm) and norm > limit:
        torch._foreach_mul_(gradients, limit / norm)
    return norm
