"""metrics.jsonl (one line an update), samples.jsonl and events.jsonl of a run.

Lines of metrics and samples after a resumed update are cut off.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onecard import artifact


class RunLog:
    """Appends to both files; a line is written whole and at once, so a kill leaves at most one broken last line."""

    def __init__(self, run: Path) -> None:
        self._metrics, self._events, self._samples = (
            run / name for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl")
        )

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_lines(self._metrics)

    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        return read_lines(self._samples)

    def update(self, **values: Any) -> None:
        """One line of metrics.jsonl."""
        _append(self._metrics, values)

    def event(self, kind: str, **values: Any) -> None:
        """One line of events.jsonl with the time."""
        _append(self._events, {"event": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **values})

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model wrote after `prompt` at an update."""
        _append(self._samples, {"step": step, "prompt": prompt, "text": text})

    def cut_after(self, step: int) -> None:
        """Forget lines after update `step` (they will be written again) and broken lines.

        Events are a diary: those of updates that are done again stay.
        """
        for path in (self._metrics, self._samples, self._events):
            if path.exists():
                rows = read_lines(path)
                kept = rows if path == self._events else [row for row in rows if row["step"] <= step]
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
                artifact.write_text_atomically(path, text)

    def flush(self) -> None:
        """Bring all lines to the disk: before a checkpoint, so that none is lost that it has counted."""
        for path in (self._metrics, self._samples, self._events):
            if path.exists():
                with artifact.disk_faults(path), path.open("rb") as file:
                    os.fsync(file.fileno())


def _append(path: Path, row: dict[str, Any]) -> None:
    with artifact.disk_faults(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file of a run; a broken last line is left out."""
    rows = []
    if path.exists():
        # A line may have been cut in the middle of a character.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def resident_bytes() -> int:
    """What this process holds in the memory of the host now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes(device: str) -> int:
    """Peak allocated bytes of the card, or peak resident bytes of this process on a CPU."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
