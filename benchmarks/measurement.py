"""What every measurement reports besides its speed: peak memory, the machine's rate of matrix products, versions.

A measurement is one engine in a process of its own, which prints one JSON line last. Memory is what the process holds
beyond what it held just before its model was built (programs and data come to about the same for every engine, and are
told beside it); the compiler's own helper processes are not counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Updates:
    """Seconds and content tokens of each update, first to last, and the seconds it waited for its rows if known."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @contextmanager
    def timed(self, device: str) -> Iterator[None]:
        """Add the seconds of what is inside."""
        started = time.perf_counter()
        yield
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)

    def tokens_per_second(self, warm_up: int) -> float:
        """Median over the updates after the first `warm_up`, which compile and fill caches."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds)]
        return statistics.median(rates[min(warm_up, len(rates) - 1) :])


@dataclass
class Memory:
    """Bytes before the model was built, and the most since then."""

    device: str
    before: int = 0

    def begin(self) -> None:
        """Give back what is free, and begin to count."""
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            # 5 sets the kernel's high-water mark of this process to what it holds now.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass
        self.before = _status_bytes("VmRSS")

    def peak(self) -> int:
        """The most bytes held since `begin`, those before it included."""
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        return _status_bytes("VmHWM")

    def reserved(self) -> dict[str, int]:
        """The most that the allocator of a card held since `begin`; nothing on a CPU."""
        if self.device != "cuda":
            return {}
        import torch

        return {"reserved_bytes": torch.cuda.max_memory_reserved()}


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def product_rate(precision: str, device: str) -> float:
    """FLOP a second of matrix products in that format, now."""
    import torch

    from onecard.machine.calibrate import matrix_rate

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return matrix_rate(dtypes.get(precision, torch.bfloat16), device)


def fastest_precision(device: str) -> str:
    """bf16 where its products are faster than fp32 here, as onecard's `auto` and a person who knows would choose."""
    import torch

    from onecard.machine.calibrate import fastest_training_dtype

    return "bf16" if fastest_training_dtype(device)[0] == torch.bfloat16 else "fp32"


def finish(
    engine: str,
    updates: Updates,
    memory: Memory,
    *,
    precision: str,
    flops_per_token: float,
    rate: float,
    warm_up: int,
    more: dict[str, Any] | None = None,
) -> None:
    """Print the JSON line of a measurement; `rate` was measured before it, and is measured again now: the best counts.

    `flops_per_token`: of training, forward and backward, for all weights. `more` stands in the line too.
    """
    tokens_per_second = updates.tokens_per_second(warm_up)
    rate = max(rate, product_rate(precision, memory.device))
    peak = memory.peak()
    made = {
        "engine": engine,
        "precision": precision,
        "tokens_per_second": tokens_per_second,
        "tokens": updates.tokens,
        "seconds": [round(value, 3) for value in updates.seconds],
        "data_wait_fraction": sum(updates.waited[warm_up:]) / max(1e-9, sum(updates.seconds[warm_up:])),
        "peak_bytes": peak,
        "before_bytes": memory.before,
        "training_bytes": peak - memory.before,
        "product_flops_per_second": rate,
        "share_of_product_rate": tokens_per_second * flops_per_token / rate,
        **memory.reserved(),
        **(more or {}),
    }
    sys.stdout.write(json.dumps(made) + "\n")


def measure(script: str, arguments: list[str], *, timeout_seconds: float | None = None) -> dict[str, Any]:
    """Run one measurement in a new process; its JSON line. What it says meanwhile goes to stderr if it fails."""
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_seconds, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def median(rows: list[dict[str, Any]], key: str) -> float:
    """Over measurements of one engine."""
    return float(statistics.median(row[key] for row in rows))


def machine() -> str:
    """The processor and its cores, and the card if there is one, in one line."""
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    made = f"{names[0] if names else 'processor'}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        made += f"; {torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    return made


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
