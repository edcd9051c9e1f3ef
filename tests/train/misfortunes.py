"""What befalls a run in its own process: a kill or a full disk at its n-th operation on a file, a clock set back."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NamedTuple

# Operations on files that Python tells of before it does them. What is written between them a delay comes into.
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
_MAKE = {"os.mkdir"}


class Misfortune(NamedTuple):
    """`operation` counts from 1 those on files of the run whose path contains `where`; -1 lets all pass."""

    kind: str = "none"  # kill, full (from then on nothing can be written), none
    operation: int = -1
    where: str = ""
    delay_seconds: float = 0.0  # from the operation to the kill
    clock_seconds: float = 0.0  # so much the clock is set back
    count_into: str = ""  # a file for the number of operations


class _Watch:
    """An audit hook, which lasts as long as the process."""

    def __init__(self, misfortune: Misfortune, run: str) -> None:
        self.misfortune, self.run, self.count = misfortune, run, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | Path) else ""
        # Trees are removed by names relative to an open folder.
        relative = event in ("os.remove", "os.rmdir") and not path.startswith("/")
        if not relative and (self.run not in path or self.misfortune.where not in path):
            return
        self.count += 1
        kind, at = self.misfortune.kind, self.misfortune.operation
        if kind == "kill" and self.count == at:
            if self.misfortune.delay_seconds:
                threading.Timer(self.misfortune.delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "full" and self.count >= at > 0 and (event in _MAKE or _writes(event, arguments)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return False
    mode, flags = arguments[1], arguments[2]
    return any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))


def befall(misfortune: Misfortune, run: str) -> _Watch:
    """Let it befall this process, whose run directory is `run`."""
    watch = _Watch(misfortune, run)
    sys.addaudithook(watch)
    if misfortune.clock_seconds:
        _set_clock_back(misfortune.clock_seconds)
    return watch


def _set_clock_back(seconds: float) -> None:
    from onecard import artifact
    from onecard.train import control, metrics

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Earlier:
            return super().now(tz) - timedelta(seconds=seconds)

    original, original_ns = time.time, time.time_ns
    time.time = lambda: original() - seconds
    time.time_ns = lambda: original_ns() - round(seconds * 1e9)
    for module in (artifact, control, metrics):
        module.datetime = Earlier  # type: ignore[attr-defined]
