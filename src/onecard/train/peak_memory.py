"""The most memory that a piece of work held at once, beyond what its process held before it.

On a card: what was allocated on it. On a CPU: resident bytes, from the kernel's own high-water mark where it can be set
back (Linux), else sampled. Memory that Python keeps for itself is counted; other processes are not.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import suppress
from pathlib import Path

from onecard.train.metrics import resident_bytes

SAMPLE_SECONDS = 0.005


class PeakMemory:
    """Counts from the moment it is made until `bytes` is asked for."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        gc.collect()
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        _give_back_free_memory()
        self._before = self._most = resident_bytes()
        if not _reset_high_water_mark():
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()

    def bytes(self) -> int:
        """The most since the beginning, less what there was then."""
        if self._device == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated()) - self._before
        if self._sampler is not None:
            self._done.set()
            self._sampler.join()
            most = self._most
        else:
            most = _status_bytes("VmHWM")
        return max(0, most - self._before)

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._most = max(self._most, resident_bytes())


def _give_back_free_memory() -> None:
    with suppress(OSError, AttributeError):  # another C library: the level before the work is then a little high
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_high_water_mark() -> bool:
    """Whether the kernel's mark of this process now stands at what it holds."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
