"""How fast this machine multiplies, measured in well under a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def default_device() -> str:
    """cuda where a card answers, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def matrix_rate(dtype: torch.dtype, device: str, *, seconds: float = 0.15) -> float:
    """FLOP a second of a matrix product in `dtype`, the median of repeated products over about `seconds`.

    Starts small and grows while products are quick, because a processor without units for a format can be hundreds of
    times slower than with another.
    """
    import torch

    size, best = 128, 0.0
    limit = 8192 if device == "cuda" else 1024
    while size <= limit:
        left = torch.ones(size, size, dtype=dtype, device=device)
        left @ left  # the first product of a shape pays for set-up
        rates: list[float] = []
        started = time.perf_counter()
        while not rates or (time.perf_counter() - started < seconds / 4 and len(rates) < 50):
            before = time.perf_counter()
            left @ left
            if device == "cuda":
                torch.cuda.synchronize()
            rates.append(2.0 * size**3 / (time.perf_counter() - before))
        best = max(best, sorted(rates)[len(rates) // 2])
        if 2.0 * (2 * size) ** 3 / best > seconds:
            break
        size *= 2
    return best


def fastest_training_dtype(device: str) -> tuple[torch.dtype, dict[str, float]]:
    """bf16 where its products are at least 1.2 times as fast as fp32 here, else fp32; with both measured rates."""
    import torch

    rates = {"fp32": matrix_rate(torch.float32, device), "bf16": matrix_rate(torch.bfloat16, device)}
    return (torch.bfloat16 if rates["bf16"] >= 1.2 * rates["fp32"] else torch.float32), rates
