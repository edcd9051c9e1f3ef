"""The run directory: new, to be resumed, or finished; and the plan that fixes a run before it starts.

plan.json is written before the first update and holds every resolved setting, so that a run which was killed goes on
with exactly the numbers it began with, whatever the machine measures then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.errors import ArtifactError

PLAN = "plan.json"


class RunDirectory:
    """`plan` is None for a new run, else what an earlier process planned."""

    def __init__(self, path: Path, fingerprint: str, settings: Mapping[str, Any]) -> None:
        self.path, self.fingerprint, self._settings = path, fingerprint, dict(settings)
        self.plan: dict[str, Any] | None = None

    @classmethod
    def open(
        cls, path: Path, *, fingerprint: str, settings: Mapping[str, Any], overwrite: bool
    ) -> RunDirectory:
        """Make or reopen a run directory; ArtifactError if it holds another run (which is never touched)."""
        run = cls(path, fingerprint, settings)
        if overwrite and path.exists():
            shutil.rmtree(path)
        if (path / artifact.MANIFEST).exists():
            raise ArtifactError(
                f"{path} holds a finished run.", "Choose another --output, or pass --overwrite to replace it."
            )
        if (path / PLAN).exists():
            run._reopen()
        elif path.exists() and (not path.is_dir() or any(p.name != "tokens" for p in path.iterdir())):
            raise ArtifactError(f"{path} already exists and is not a run.", "Choose another --output.")
        with artifact.disk_faults(path):
            path.mkdir(parents=True, exist_ok=True)
        return run

    def _reopen(self) -> None:
        try:
            plan = json.loads((self.path / PLAN).read_text(encoding="utf-8"))
            stored, settings = plan["fingerprint"], plan["asked"]
        except (ValueError, KeyError) as fault:
            raise ArtifactError(f"{self.path / PLAN} is damaged ({fault}).", "Pass --overwrite to begin anew.") from fault
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
        """Remove the token store (it can be made again) and write the manifest: the run is complete."""
        shutil.rmtree(self.path / "tokens", ignore_errors=True)
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
        console.note(f"  wrote {self.path}")
