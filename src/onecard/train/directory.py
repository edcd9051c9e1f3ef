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
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.errors import ArtifactError

PLAN = "plan.json"
LOCK = ".lock"


class RunDirectory:
    """`plan` is None for a new run, else what an earlier process planned."""

    def __init__(self, path: Path, fingerprint: str, settings: Mapping[str, Any]) -> None:
        self.path, self.fingerprint, self._settings = path, fingerprint, dict(settings)
        self.plan: dict[str, Any] | None = None

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
                f"{path} holds a finished run.", "Choose another --output, or pass --overwrite to replace it."
            )
        run = cls(path, fingerprint, settings)
        with artifact.disk_faults(path):
            path.mkdir(parents=True, exist_ok=True)
            run._lock_against_others()
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
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        # Closed with the run (also one that an error ends), or with the process.
        self._close_lock = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in (errno.EACCES, errno.EAGAIN):
                raise ArtifactError(
                    f"Another process is training in {self.path}.", "Wait for its end, or stop it first."
                ) from fault
            # This file system knows no locks: nothing to hold on to.

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

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Fix the plan of the run."""
        self.plan = {"fingerprint": self.fingerprint, "asked": self._settings, **plan}
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
    return PLAN in names or names <= {"tokens", "rejected-00000.jsonl"}
