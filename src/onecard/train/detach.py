"""Going on in the background: the same command in a session of its own, which no closing terminal ends.

In: the words of a command that were found right here, and the directory it writes. Out: its process, beside which a log
grows (`OUTPUT.log`). The one who started it waits until it is at work, so that what is wrong is said to their face.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.errors import ArtifactError, OnecardError
from onecard.train.directory import holder
from onecard.train.metrics import read_lines

# After so long it is taken to be at work, though still with its preparations.
WAIT_SECONDS = 60.0


def log_of(place: Path) -> Path:
    """Where what a command in the background says is written: beside its output."""
    return place.with_name(f"{place.name}.log")


def begin(words: Sequence[str], place: Path) -> dict[str, Any]:
    """Start `onecard WORDS`, which writes `place`, in the background; OnecardError, as it would have said, if it fails.

    Returns `process`, `log` and `state` (started, preparing or done).
    """
    at_work = holder(place)
    if at_work is not None:
        raise ArtifactError(
            f"Another process is training in {place} (process {at_work}).",
            f"Wait for its end, or stop it first: onecard pause {place}",
        )
    log = log_of(place)
    with artifact.disk_faults(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        written = log.open("ab")
    # -P: a file torch.py in the working directory is not meant.
    command = [sys.executable, "-P", "-m", "onecard.cli", *_in_the_foreground(words)]
    since = datetime.now(UTC)
    with written:
        at = written.tell()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    console.note(f"  process {child.pid} begins in the background; what it says:")
    state = _wait(child, place, _Tail(log, at), since)
    console.result(f"Process {child.pid} goes on in the background, also when this terminal is closed.")
    console.result(f"Its log:    {console.short_path(log)}")
    console.result(f"How it is:  onecard status {console.short_path(place)}")
    console.result(f"Pause it:   onecard pause {console.short_path(place)}")
    return {"process": child.pid, "log": str(log), "output": str(place), "state": state}


def _in_the_foreground(words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in ("--detach", "--json")] + ["--no-detach"]


class _Tail:
    """The lines that a file gains."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at, self.lines = path, at, list[str]()

    def read(self) -> None:
        """Say the whole lines that are new."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            self.lines.append(line)
            if not line.startswith(("error: ", "  fix: ")):
                console.note(f"  | {line}")


def _wait(child: subprocess.Popen[bytes], place: Path, tail: _Tail, since: datetime) -> str:
    """Until it is at work: started, preparing (it takes long) or done. OnecardError if it fails before."""
    until = time.monotonic() + WAIT_SECONDS
    try:
        while time.monotonic() < until:
            status = child.poll()
            tail.read()
            if status is not None:
                if status:
                    raise _failure(status, tail.lines, log_of(place))
                return "done"
            if _at_work(place, since):
                return "started"
            time.sleep(0.1)
    except KeyboardInterrupt:  # of the one who waits: the other is in a session of its own
        pass
    return "preparing"


def _at_work(place: Path, since: datetime) -> bool:
    """Whether a run has taken up its loop, or a recipe its first stage, since then."""
    walked = place / "pipeline.json"
    if walked.exists() and walked.stat().st_mtime >= since.timestamp():
        return True
    begun = since.isoformat(timespec="seconds")
    return any(
        row["event"] in ("start", "resume") and row["time"] >= begun for row in read_lines(place / "events.jsonl")
    )


def _failure(status: int, lines: list[str], log: Path) -> OnecardError:
    """What the process said when it ended, with its exit status."""
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        what = lines[errors[-1]].removeprefix("error: ")
        remedy = "".join(line.removeprefix("  fix: ") for line in lines[errors[-1] + 1 :][:1])
    else:
        last = f" ({lines[-1].strip()})" if lines else ""
        what, remedy = f"The process ended at once, with status {status}{last}.", f"See {log}."
    fault = OnecardError(what, remedy)
    fault.exit_status = status if status > 0 else 1
    return fault
