"""Number formats of training: fp32 weights always; products in fp32, or in bf16 under autocast where that is faster."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from onecard import console
from onecard.machine.calibrate import default_device, fastest_training_dtype, matrix_rate


@dataclass(frozen=True)
class Precision:
    """The chosen format, the device, and the measured rate of its matrix products in FLOP a second."""

    name: str
    device: str
    flops_per_second: float

    @property
    def dtype(self) -> torch.dtype:
        """Format of the products."""
        return torch.bfloat16 if self.name == "bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        if self.name == "bf16":
            return torch.autocast(self.device, dtype=torch.bfloat16)
        return nullcontext()


def choose(setting: str) -> Precision:
    """Resolve `precision`: auto measures fp32 and bf16 products here and says why it took which."""
    device = default_device()
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    if setting != "auto":
        dtype = torch.bfloat16 if setting == "bf16" else torch.float32
        rate = matrix_rate(dtype, device)
        other = torch.float32 if setting == "bf16" else None
        if other is not None and (plain := matrix_rate(other, device)) > rate:
            console.warn(
                f"bf16 products run at {rate / 1e9:,.0f} GFLOP/s here, fp32 at {plain / 1e9:,.0f}: "
                "precision = fp32 is faster."
            )
        return Precision(setting, device, rate)
    dtype, rates = fastest_training_dtype(device)
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    console.note(
        f"  precision {name}: products at {rates['fp32'] / 1e9:,.0f} GFLOP/s in fp32 "
        f"and {rates['bf16'] / 1e9:,.0f} in bf16 on this {device}"
    )
    return Precision(name, device, rates[name])
