"""How fast this machine multiplies, measured in well under a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# bf16 must be this much faster than fp32 to be worth its lost digits.
WORTHWHILE = 1.2
# Longer than this, one product has told enough.
SLOW_PRODUCT_SECONDS = 0.2


def default_device() -> str:
    """cuda where a card answers, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def matrix_rate(dtype: torch.dtype, device: str) -> float:
    """FLOP a second of the best matrix product in `dtype`: the best, because other work on the machine only slows one.

    Sizes grow while a product is quick, for a processor without units for a format can be hundreds of times slower
    than with another.
    """
    import torch

    best = 0.0
    for size in (256, 512, 1024) if device == "cpu" else (1024, 4096, 8192):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        matrix @ matrix  # the first product of a shape pays for set-up
        for _ in range(5):
            started = time.perf_counter()
            matrix @ matrix
            if device == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - started
            best = max(best, 2.0 * size**3 / spent)
            if spent > SLOW_PRODUCT_SECONDS:
                break
        if spent > SLOW_PRODUCT_SECONDS / 8:  # the next size has at least eight times the work
            break
    return best


def fastest_training_dtype(device: str) -> tuple[torch.dtype, dict[str, float]]:
    """bf16 where its products are so much faster than fp32 here that it pays, else fp32; with both measured rates."""
    import torch

    rates = {"fp32": matrix_rate(torch.float32, device), "bf16": matrix_rate(torch.bfloat16, device)}
    return (torch.bfloat16 if rates["bf16"] >= WORTHWHILE * rates["fp32"] else torch.float32), rates
