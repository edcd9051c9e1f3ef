"""The run directory: new, to be resumed, or finished; and the plan that fixes a run before it starts.

plan.json is written before the first update and holds every resolved setting, so that a run which was killed goes on
with exactly the numbers it began with, whatever the machine measures then.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.errors import ArtifactError
from onecard.settings import AnySettings, build
from onecard.train import control
from onecard.train.metrics import read_lines

PLAN = "plan.json"
LOCK = ".lock"


class RunDirectory:
    """`plan` is None for a new run, else what an earlier process planned."""

    def __init__(self, path: Path, fingerprint: str, settings: Mapping[str, Any]) -> None:
        self.path, self.fingerprint, self._settings = path, fingerprint, dict(settings)
        self.plan: dict[str, Any] | None = None
        self._besides: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, *, fingerprint: str, settings: Mapping[str, Any], overwrite: bool) -> RunDirectory:
        """Make or reopen a run directory.

        ArtifactError if it is finished, holds a run with other settings or of another living process, or (whatever
        `overwrite` says) is no run at all: such a directory is never touched.
        """
        if path.exists() and not _is_run(path):
            raise ArtifactError(f"{path} already exists and is not a run.", "Choose another --output.")
        if (path / artifact.MANIFEST).exists() and not overwrite:
            raise ArtifactError(
                f"{path} holds a finished run.",
                "Choose another --output, pass --overwrite to replace it, or train it longer: "
                f"onecard resume {path} --set max_steps=N",
            )
        run = cls(path, fingerprint, settings)
        with artifact.disk_faults(path):
            path.mkdir(parents=True, exist_ok=True)
            run._lock_against_others()
            control.forget_pauses(path)
            if overwrite:
                run._clear()
        if (path / PLAN).exists():
            run._reopen()
        with artifact.disk_faults(path):
            run._remove_leftovers()
            run._check_tokens()
        return run

    @property
    def tokens(self) -> Path:
        """The folder of the token stores, which belong to this fingerprint."""
        return self.path / "tokens"

    def _lock_against_others(self) -> None:
        """Hold a lock that ends with the process, however it ends."""
        descriptor = _take_lock(self.path)
        # Closed with the run (also one that an error ends), or with the process.
        self._close_lock = weakref.finalize(self, os.close, descriptor)

    def _clear(self) -> None:
        """Remove the old run: its manifest first and its plan last, so that it looks unfinished until it is gone."""
        last = {artifact.MANIFEST: 0, PLAN: 2}
        for item in sorted(self.path.iterdir(), key=lambda item: last.get(item.name, 1)):
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            elif item.name != LOCK:
                item.unlink()

    def _remove_leftovers(self) -> None:
        """What a killed process was writing (never whole, and as large as a checkpoint) or just replacing."""
        for folder in (self.path, self.path / "checkpoints", self.tokens):
            for item in [*folder.glob(".*.old"), *folder.glob(".*.part")]:
                target = item.with_name(item.name[1:].rsplit(".", 2)[0])
                if item.suffix == ".old" and not target.exists():
                    item.replace(target)
                elif item.is_dir():
                    shutil.rmtree(item)
                else:
                    item.unlink()

    def _check_tokens(self) -> None:
        """Drop token stores that were made for another run, and mark the folder as ours."""
        mark = self.tokens / "fingerprint"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != self.fingerprint:
            shutil.rmtree(self.tokens, ignore_errors=True)
            self.tokens.mkdir()
            artifact.write_text_atomically(mark, self.fingerprint)

    def _reopen(self) -> None:
        try:
            plan = json.loads((self.path / PLAN).read_text(encoding="utf-8"))
            stored, settings = plan["fingerprint"], plan["asked"]
        except (ValueError, KeyError, TypeError) as fault:
            raise ArtifactError(
                f"{self.path / PLAN} is damaged ({fault}).", "Pass --overwrite to begin anew."
            ) from fault
        if stored != self.fingerprint:
            changed = [
                f"{key}: {settings.get(key)} -> {self._settings.get(key)}"
                for key in sorted(settings.keys() | self._settings.keys())
                if settings.get(key) != self._settings.get(key)
            ]
            what = "; ".join(changed) if changed else "the input data or the version"
            raise ArtifactError(
                f"{self.path} holds an unfinished run with other settings ({what}).",
                "Give the same settings to go on, choose another --output, or pass --overwrite to begin anew.",
            )
        self.plan = plan

    def in_force(self, config: AnySettings) -> AnySettings:
        """The settings of a run that is opened: those asked for, and what `resume --set` has changed since; says so."""
        asked = config.plain()
        free = {key: value for key, value in asked.items() if key not in {*self._settings, *_OF_A_COMMAND}}
        self._besides = {"free": free, "working_directory": str(Path.cwd())}
        if self.plan is None:
            return config
        differing = differences(self.path, self.plan)
        if differing:
            console.note(f"  differs from the original plan: {'; '.join(differing)}")
        amended = {entry["name"]: entry["new"] for entry in self.plan.get("amended", [])}
        return build(type(config), {**asked, **amended}) if amended else config

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Fix the plan of the run."""
        self.plan = {"fingerprint": self.fingerprint, "asked": self._settings, **self._besides, **plan}
        artifact.write_json_atomically(self.path / PLAN, self.plan)

    def finish(self, *, parents: list[Path], result: dict[str, Any]) -> None:
        """Write the manifest: the run is complete. Then remove the token store, which can be made again."""
        assert self.plan is not None
        artifact.write_manifest(
            self.path,
            "run",
            settings={"asked": self._settings, "plan": self.plan},
            parents=parents,
            fingerprint=self.fingerprint,
            result=result,
            files=artifact.payload_files(self.path / "model"),
        )
        shutil.rmtree(self.tokens, ignore_errors=True)
        (self.path / LOCK).unlink(missing_ok=True)
        self._close_lock()
        console.note(f"  wrote {self.path}")


# What a command says about itself and not about the run.
_OF_A_COMMAND = ("output", "overwrite", "detach")


def differences(path: Path, plan: Mapping[str, Any]) -> list[str]:
    """What was changed since the plan was made, such as 'learning_rate 0.001 -> 0.0001 (update 40, me@box)'."""
    changed = [*plan.get("amended", []), *changes(path)]
    return [
        f"{entry['name']} {shown(entry.get('old', '?'))} -> {shown(entry['new'])} "
        f"(after update {entry['step']}, {entry['who']})"
        for entry in sorted(changed, key=lambda entry: int(entry["step"]))
    ]


def shown(value: Any) -> str:
    """A setting's value for a person: as TOML has it, floats to four digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def changes(path: Path) -> list[dict[str, Any]]:
    """What was changed while the run went on: name, old, new, step, who, time."""
    return [{**row, "new": row["value"]} for row in read_lines(path / control.CHANGES)]


def _take_lock(path: Path) -> int:
    """A descriptor that holds the lock of a run; ArtifactError if another process does."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    for attempt in range(3):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno not in (errno.EACCES, errno.EAGAIN):
                break  # this file system knows no locks: nothing to hold on to
            if attempt < 2:
                time.sleep(0.05)  # `holder` may be looking just now
                continue
            os.close(descriptor)
            raise ArtifactError(
                f"Another process is training in {path}.",
                f"Wait for its end, or stop it first: onecard pause {path}",
            ) from fault
        break
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep others from training in `path` meanwhile."""
    with artifact.disk_faults(path):
        descriptor = _take_lock(path)
    try:
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> int | None:
    """The process that trains in `path` (0 where its number is unknown), None if none does.

    Not for that process itself: looking at its own lock would end it.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        written = os.read(descriptor, 20)
        process = int(written) if written.isdigit() else 0
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in (errno.EACCES, errno.EAGAIN):
            return process
        import psutil  # no locks here: all that is known is whether there is a process of that number

        return process if process and psutil.pid_exists(process) else None
    else:
        return None
    finally:
        os.close(descriptor)


def _is_run(path: Path) -> bool:
    """Whether a directory is a run, was about to become one when its process ended, or is empty."""
    if not path.is_dir():
        return False
    if (path / artifact.MANIFEST).exists():
        try:
            return artifact.read_manifest(path).kind == "run"
        except ArtifactError:
            return (path / PLAN).exists()
    names = {item.name for item in path.iterdir() if not item.name.startswith(".")}
    return PLAN in names or names <= {"tokens", "rejected-00000.jsonl", "events.jsonl"}
