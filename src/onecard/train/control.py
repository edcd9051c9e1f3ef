"""Requests from outside to a running loop, for a pause or another value of a setting, and the record of changes.

requests/*.json  what other processes ask: each is written whole, and removed once it stands in changes.jsonl
changes.jsonl    what was changed after which update, by whom and when. A run that is resumed from an earlier update
                 makes each change again where it was made first, so that it ends in the same model.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onecard import artifact
from onecard.train.metrics import RunLog, read_lines

PAUSE = "pause"
REQUESTS, CHANGES = "requests", "changes.jsonl"
# What may change at the next update, without a restart.
MEANWHILE = (
    "learning_rate",
    "muon_learning_rate",
    "weight_decay",
    "schedule",
    "warmup_ratio",
    "decay_ratio",
    "final_learning_rate_ratio",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "max_steps",
    "mix",
    "evaluate_every",
    "save_every",
    "keep_last",
    "log_every",
)


@dataclass(frozen=True)
class Request:
    """What is asked: a setting and its new value, or PAUSE; `step` is the update after which it is done.

    `old` is the value before, as far as whoever asked knew it.
    """

    name: str
    value: Any
    who: str
    time: str
    step: int = -1
    old: Any = None


def ask(run: Path, name: str, value: Any = None, *, old: Any = None) -> None:
    """Ask the process that trains in `run` (now or later) for a change or a pause."""
    folder = run / REQUESTS
    with artifact.disk_faults(folder):
        folder.mkdir(exist_ok=True)
    made = Request(name, value, caller(), now(), old=old)
    # In the order of asking, also of one process within a tick of the clock.
    artifact.write_json_atomically(folder / f"{time.time_ns():020d}-{os.getpid()}.json", asdict(made))


def caller() -> str:
    """Who asks: user@machine."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user without a name, as in containers
        return f"{os.getuid()}@{socket.gethostname()}"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def waiting(run: Path) -> list[tuple[Path, Request]]:
    """What was asked and is not done yet, oldest first."""
    try:
        files = sorted(p for p in (run / REQUESTS).iterdir() if p.suffix == ".json" and p.name[0] != ".")
    except FileNotFoundError:
        return []
    return [(path, request) for path in files if (request := _read(path)) is not None]


def forget_pauses(run: Path) -> bool:
    """Take pauses back that nobody obeyed: they were meant for a process that is gone. Whether there was one."""
    pauses = [path for path, request in waiting(run) if request.name == PAUSE]
    for path in pauses:
        path.unlink(missing_ok=True)
    return bool(pauses)


def _read(path: Path) -> Request | None:
    try:
        return Request(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # not one of ours


class Control:
    """The running side. Looks for requests before each update: one look at a folder that is mostly empty."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._requests, self._changes = run / REQUESTS, run / CHANGES
        self._again: list[Request] = []
        self.reach(0)

    def reach(self, step: int) -> None:
        """The loop stands after update `step`: changes that were made later will be due again."""
        rows = [Request(**row) for row in read_lines(self._changes)]
        self._again = [request for request in rows if request.step >= step]

    def due(self, step: int, settle: Callable[[Request], Request | None] = lambda request: request) -> list[Request]:
        """What is to be done after update `step`: what was done there before, then what is newly asked.

        `settle` says what becomes of a change that is newly asked; None: it cannot be, and is not recorded.
        """
        found = [request for request in self._again if request.step == step]
        self._again = [request for request in self._again if request.step != step]
        for path in self._asked():
            request = _read(path)
            made = None if request is None else replace(request, step=step)
            if made is not None and made.name != PAUSE:
                made = settle(made)
                if made is not None:
                    self._record(made)
            if made is not None:
                found.append(made)
            path.unlink(missing_ok=True)
        return found

    def pause_wanted(self) -> bool:
        """Whether a pause is asked for now; it stays asked for."""
        return any(request.name == PAUSE for _, request in waiting(self._run))

    def _asked(self) -> list[Path]:
        try:
            return sorted(path for path in self._requests.iterdir() if path.suffix == ".json" and path.name[0] != ".")
        except FileNotFoundError:
            return []

    def _record(self, request: Request) -> None:
        """On the disk before it is done: a run that is killed now must not forget it."""
        with artifact.disk_faults(self._changes), self._changes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(request), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        RunLog(self._run).event(
            "set", step=request.step, name=request.name, old=request.old, new=request.value, who=request.who
        )
