"""How fast this machine multiplies, copies and writes: measured in a few seconds, and kept for the planner.

The file lies in the user's cache folder ($XDG_CACHE_HOME or ~/.cache, onecard/rates.json): an entry a machine and card.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from onecard import artifact
from onecard.machine.calibrate import default_device, matrix_rate

BLOCK_BYTES = 256 << 20


def file() -> Path:
    """Where the rates are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onecard" / "rates.json"


def calibrate(directory: Path) -> dict[str, float]:
    """Measure (FLOP and bytes a second), keep and return the rates; `directory` is on the disk that is meant."""
    rates = measure() | {"disk_write_bytes_per_second": _disk_rate(directory)}
    _keep(_name(default_device()), rates)
    return rates


def measure() -> dict[str, float]:
    """The rates of products and copies, measured in about a second and not kept."""
    import torch

    device = default_device()
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if device == "cuda" else {})
    before = torch.get_float32_matmul_precision()
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # as training multiplies fp32 on a card: TF32
    try:
        rates = {f"{name}_flops_per_second": matrix_rate(dtype, device) for name, dtype in formats.items()}
    finally:
        torch.set_float32_matmul_precision(before)
    rates["memory_bytes_per_second"] = _copy_rate(device, device) * 2  # a copy reads and writes
    if device == "cuda":
        rates["host_to_card_bytes_per_second"] = _copy_rate("cpu", device)
        rates["card_to_host_bytes_per_second"] = _copy_rate(device, "cpu")
    return rates


def known() -> dict[str, float]:
    """The kept rates of this machine and card; empty if it was never calibrated."""
    found: dict[str, dict[str, float]] = _read()
    return found.get(_name(default_device()), {})


def _name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.node()} {platform.machine()}"


def _copy_rate(source: str, target: str) -> float:
    """Bytes a second of the best of a few copies of 256 MiB."""
    import torch

    pinned = "cuda" in (source, target) and source != target
    numbers = BLOCK_BYTES // 4
    a = torch.ones(numbers, device=source, pin_memory=pinned and source == "cpu")
    b = torch.empty(numbers, device=target, pin_memory=pinned and target == "cpu")
    best = 0.0
    for _ in range(4):
        started = time.perf_counter()
        b.copy_(a, non_blocking=True)
        if "cuda" in (source, target):
            torch.cuda.synchronize()
        best = max(best, BLOCK_BYTES / (time.perf_counter() - started))
    return best


def _disk_rate(directory: Path) -> float:
    """Bytes a second of writing 256 MiB and bringing them to the disk."""
    path = directory / f".onecard-{os.getpid()}.calibration"
    block = os.urandom(1 << 20)
    started = time.perf_counter()
    with artifact.disk_faults(path):
        try:
            with path.open("wb") as opened:
                for _ in range(BLOCK_BYTES >> 20):
                    opened.write(block)
                opened.flush()
                os.fsync(opened.fileno())
        finally:
            path.unlink(missing_ok=True)
    return BLOCK_BYTES / (time.perf_counter() - started)


def _read() -> dict[str, dict[str, float]]:
    try:
        found: dict[str, dict[str, float]] = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(name: str, rates: dict[str, float]) -> None:
    with artifact.disk_faults(file()):
        file().parent.mkdir(parents=True, exist_ok=True)
    artifact.write_json_atomically(file(), _read() | {name: rates})
