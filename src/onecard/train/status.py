"""The verb `status`: how a run stands, from its own files, while it is written or long after.

In: a run directory (or the output of a recipe, of which the stage at work is taken). Out: one document. Nothing heavy
is imported and nothing is written. What the run did not record is left out, not guessed.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import StatusConfig
from onecard.errors import ArtifactError
from onecard.train import control
from onecard.train.directory import PLAN, changes, holder, shown
from onecard.train.metrics import RunLog, read_lines
from onecard.train.vitals import readings

# Trends are drawn from so many of the last lines of metrics.jsonl.
TREND_ROWS = 100
_CHECKPOINT = re.compile(r"step-(\d{8})")
# The keys of metrics.jsonl that are shown on their own; whatever else a run measures is a sensor.
_OWN = {
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "held_out_loss", "peak_memory_bytes",
    "data_wait_fraction",
}  # fmt: skip
_SAID = {
    "running": "running",
    "paused": "paused; everything is saved",
    "interrupted": "interrupted; everything is saved",
    "finished": "finished",
    "crashed": "crashed: its process is gone without a word",
    "stopped": "stopped by an error",
    "preparing": "running: it prepares its rows and its plan",
}


@dataclass(frozen=True)
class Standing:
    """A run directory, its plan ({} before there is one) and what became of its process."""

    path: Path
    plan: dict[str, Any]
    state: str
    reason: str
    process: int | None

    @property
    def verb(self) -> str:
        """What made it; "" before there is a plan."""
        return str(self.plan.get("verb", ""))

    @property
    def runs(self) -> bool:
        """Whether a process is at work on it now."""
        return self.process is not None


def find(path: Path) -> Standing:
    """The run at `path`, or the one below it that runs or was begun last; ArtifactError where there is none."""
    if not path.is_dir():
        raise ArtifactError(f"There is no run {path}.", "Give the directory that --output of the run named.")
    if _has_run(path):
        return _standing(path)
    below = [_standing(child) for child in sorted(path.iterdir()) if child.is_dir() and _has_run(child)]
    if not below:
        raise ArtifactError(f"{path} holds no run.", "Give the directory that --output of the run named.")
    found = max(below, key=lambda run: (run.runs, _planned_at(run.path)))
    console.note(f"  of the runs in {path}: {found.path.name}")
    return found


def _has_run(path: Path) -> bool:
    return (path / PLAN).is_file() or (path / "tokens").is_dir()


def _planned_at(path: Path) -> float:
    plan = path / PLAN
    return plan.stat().st_mtime if plan.exists() else 0.0


def _standing(path: Path) -> Standing:
    plan: dict[str, Any] = {}
    if (path / PLAN).exists():
        try:
            plan = json.loads((path / PLAN).read_text(encoding="utf-8"))
            assert isinstance(plan["asked"], dict) and plan["verb"]
        except (ValueError, KeyError, TypeError, AssertionError) as fault:
            raise ArtifactError(
                f"{path / PLAN} is damaged ({fault}).", "Run the original command with --overwrite to begin anew."
            ) from fault
    process = holder(path)
    if process is not None:
        return Standing(path, plan, "running" if plan else "preparing", "", process)
    if (path / artifact.MANIFEST).exists():
        return Standing(path, plan, "finished", "", None)
    state, reason = _ended(path)
    return Standing(path, plan, state, reason, None)


def _ended(path: Path) -> tuple[str, str]:
    """How the last process left, by the last event that tells."""
    telling = ("start", "resume", "pause", "oom", "fault", "error")
    last = next((row for row in reversed(read_lines(path / "events.jsonl")) if row["event"] in telling), None)
    if last is None or last["event"] in ("start", "resume"):
        return "crashed", ""
    reason = str(last.get("reason") or last.get("what") or "")
    if last["event"] == "pause":
        return ("interrupted" if reason.startswith("SIG") else "paused"), reason
    if last["event"] == "oom" and "reason" not in last:  # the run went on in smaller parts
        return "crashed", ""
    return "stopped", reason


def in_force(run: Standing) -> dict[str, Any]:
    """Every setting as it stands now: asked for, resolved by the plan, changed since."""
    plan = run.plan
    values = {**plan["asked"], **plan.get("free", {})}
    values |= {key: plan[key] for key in values if key in plan}
    values |= {entry["name"]: entry["new"] for entry in plan.get("amended", [])}
    halved = [row for row in read_lines(run.path / "events.jsonl") if row["event"] == "oom" and "batch_size" in row]
    if halved:
        values["batch_size"] = halved[-1]["batch_size"]
    for row in changes(run.path):
        if row["name"] != "batch_size" or not halved or row["time"] >= halved[-1]["time"]:
            values[row["name"]] = row["new"]
    return values


def last_checkpoint(run: Path) -> tuple[int, Path] | None:
    """The newest checkpoint that was written whole (its hashes are not computed here)."""
    found = [
        (int(match[1]), path)
        for path in (run / "checkpoints").glob("step-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / artifact.MANIFEST).exists()
    ]
    return max(found, default=None)


# --- the verb -----------------------------------------------------------------------------------------------------


def status(config: StatusConfig) -> dict[str, Any]:
    """Say how a run stands; the document has `state` and, as far as known, what the table shows."""
    run = find(config.run)
    document = describe(run)
    _show(run, document)
    return document


def describe(run: Standing) -> dict[str, Any]:
    """The document of `status`: times in seconds, losses in nats a token; what is not known is None."""
    rows = RunLog(run.path).metrics()
    events = read_lines(run.path / "events.jsonl")
    last = rows[-1] if rows else {}
    step = int(last.get("step", 0))
    document: dict[str, Any] = {
        "run": str(run.path),
        "verb": run.verb,
        "state": run.state,
        "reason": run.reason,
        "process": run.process,
        "step": step,
    }
    if not run.plan:
        return document
    settings = in_force(run)
    held_out = [(row["step"], row["held_out_loss"]) for row in rows if row.get("held_out_loss") is not None]
    losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    checkpoint = last_checkpoint(run.path)
    max_steps = int(settings["max_steps"])
    return document | {
        "max_steps": max_steps,
        "loss": losses[-1][1] if losses else None,
        "loss_trend": trend(losses[-TREND_ROWS:]),
        "held_out_loss": held_out[-1][1] if held_out else None,
        "held_out_trend": _held_out_trend(held_out),
        "tokens": last.get("tokens", 0),
        "tokens_per_second": _rate(rows),
        "seconds": last.get("seconds", 0.0),
        "seconds_left": 0.0 if run.state == "finished" else seconds_left(rows, max_steps),
        "silent_seconds": _age(run.path / "metrics.jsonl"),
        "learning_rate": last.get("lr"),
        "checkpoint": None
        if checkpoint is None
        else {
            "step": checkpoint[0],
            "age_seconds": _age(checkpoint[1] / artifact.MANIFEST),
            "path": str(checkpoint[1]),
        },
        "skipped": len({row["step"] for row in events if row["event"] == "skip" and row["step"] <= step}),
        "roll_backs": sum(row["event"] in ("rollback", "roll_back") for row in events),
        "changes": [*run.plan.get("amended", []), *changes(run.path)],
        "waiting": [
            {"name": request.name, "new": request.value, "who": request.who, "time": request.time}
            for _, request in control.waiting(run.path)
        ],
        "sensors": _sensors(rows),
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "settings": settings,
    }


def _sensors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest readings: sensors are asked once a second, and updates can be quicker."""
    for row in reversed(rows):
        found = {key: value for key, value in row.items() if key not in _OWN and value is not None}
        if found:
            return found
    return {}


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _window(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last rows that tell about now: since the first of them evaluations and updates took their usual share."""
    looked = [index for index, row in enumerate(rows) if row.get("held_out_loss") is not None]
    # Whole spans from one evaluation to the next, so that their cost is neither left out nor counted too often.
    first = looked[-3] if len(looked) >= 3 else 0
    return rows[max(first, len(rows) - 2000) :]


def seconds_left(rows: list[dict[str, Any]], max_steps: int) -> float | None:
    """The rest at the pace of late, evaluations included; None before there is a pace."""
    window = _window(rows)
    if len(window) < 3:
        return None
    updates = window[-1]["step"] - window[0]["step"]
    if updates <= 0:
        return None
    # Waiting for a hot card to cool is no part of the training time, but of the evening.
    first, last = (row["seconds"] + row.get("cooling_seconds", 0.0) for row in (window[0], window[-1]))
    pace = (last - first) / updates
    return max(0.0, float((max_steps - window[-1]["step"]) * pace))


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Tokens a second of late: the median of the last updates, which a single slow one does not move."""
    rates: list[float] = sorted(row["tokens_per_second"] for row in rows[-20:])
    return float(rates[len(rates) // 2]) if rates else None


def trend(points: list[tuple[int, float]]) -> dict[str, Any] | None:
    """Least-squares slope of (update, value), a hundred updates, and whether it stands out of the noise."""
    if len(points) < 5:
        return None
    count = len(points)
    mean_step = sum(step for step, _ in points) / count
    mean = sum(value for _, value in points) / count
    spread = sum((step - mean_step) ** 2 for step, _ in points)
    if spread == 0:
        return None
    slope = sum((step - mean_step) * (value - mean) for step, value in points) / spread
    rest = sum((value - mean - slope * (step - mean_step)) ** 2 for step, value in points)
    error = math.sqrt(rest / (count - 2) / spread)
    direction = "level" if abs(slope) <= 2 * error or slope == 0 else "falling" if slope < 0 else "rising"
    return {"direction": direction, "per_hundred_updates": 100 * slope, "updates": points[-1][0] - points[0][0] + 1}


def _held_out_trend(points: list[tuple[int, float]]) -> dict[str, Any] | None:
    """Against the evaluation before, and where the best was."""
    if len(points) < 2:
        return None
    best_step, best = min(points, key=lambda point: point[1])
    change = points[-1][1] - points[-2][1]
    direction = "falling" if change < 0 else "rising" if change > 0 else "level"
    return {"direction": direction, "since_last": change, "best": best, "best_step": best_step}


# --- for a person -------------------------------------------------------------------------------------------------


def _show(run: Standing, document: dict[str, Any]) -> None:
    said = _SAID[run.state]
    if run.reason:
        said += f" ({run.reason})"
    if run.process:
        said += f" (process {run.process})"
    if not run.plan:
        console.table(f"{run.path}", ["", ""], [["state", said]])
        return
    rows = [["state", said], ["update", f"{document['step']:,} of {document['max_steps']:,}"]]
    rows += [*_losses(document), *_times(run, document)]
    checkpoint = document["checkpoint"]
    rows.append(
        [
            "last checkpoint",
            "none yet"
            if checkpoint is None
            else f"update {checkpoint['step']:,}, {console.format_duration(checkpoint['age_seconds'])} ago",
        ]
    )
    if document["skipped"] or document["roll_backs"]:
        rows.append(["skipped, rolled back", f"{document['skipped']:,}, {document['roll_backs']:,}"])
    rows += readings(document["sensors"])
    rows += [
        [
            "changed",
            f"{e['name']} {shown(e.get('old', '?'))} -> {shown(e['new'])} after update {e['step']}, by {e['who']}",
        ]
        for e in document["changes"]
    ]
    rows += [["waiting", _waits(e, runs=run.runs)] for e in document["waiting"]]
    lines = _settings(document["settings"])
    rows += [["settings in force" if index == 0 else "", line] for index, line in enumerate(lines)]
    console.table(f"{run.verb}: {run.path}", ["", ""], rows)
    if not run.runs and (run.state != "finished" or document["waiting"]):
        console.result(f"Go on with:  onecard resume {run.path}")


def _losses(document: dict[str, Any]) -> list[list[str]]:
    if document["loss"] is None:
        return [["loss", "none recorded yet"]]
    text = f"{document['loss']:.3f}"
    slope = document["loss_trend"]
    if slope is not None:
        amount = "" if slope["direction"] == "level" else f" by {abs(slope['per_hundred_updates']):.3g} in 100 updates"
        text += f", {slope['direction']}{amount} (over the last {slope['updates']:,})"
    rows = [["loss", text]]
    if document["held_out_loss"] is not None:
        text, held_out = f"{document['held_out_loss']:.3f}", document["held_out_trend"]
        if held_out is not None:
            text += f", {held_out['direction']} by {abs(held_out['since_last']):.3g} since the evaluation before"
            if held_out["best"] < document["held_out_loss"]:
                text += f"; best {held_out['best']:.3f} at update {held_out['best_step']:,}"
        rows.append(["loss on held-out rows", text])
    return rows


def _times(run: Standing, document: dict[str, Any]) -> list[list[str]]:
    rows = []
    if document["tokens_per_second"] is not None:
        rows.append(["tokens/s", f"{document['tokens_per_second']:,.0f}"])
    rows.append(["time so far", console.format_duration(document["seconds"])])
    left = document["seconds_left"]
    if run.state != "finished":
        text = "not known before a few updates are done" if left is None else console.format_duration(left)
        if left is not None:
            text += " at the pace of late" if run.runs else " once it goes on"
        rows.append(["time left", text])
    silent = document["silent_seconds"]
    if run.runs and silent is not None:
        rows.append(["last written", f"{console.format_duration(silent)} ago"])
    if document["learning_rate"] is not None:
        rows.append(["learning rate now", f"{document['learning_rate']:.3g}"])
    return rows


def _waits(entry: dict[str, Any], *, runs: bool) -> str:
    when = "the next update" if runs else "the next start"
    if entry["name"] == control.PAUSE:
        return f"a pause, asked for by {entry['who']}"
    return f"{entry['name']} = {shown(entry['new'])} from {when} on, asked for by {entry['who']}"


def _settings(values: dict[str, Any]) -> list[str]:
    """The settings in force, several to a line."""
    lines: list[str] = []
    for name in sorted(values):
        value = values[name]
        if isinstance(value, dict | list) or value in (None, ""):
            continue
        word = f"{name} {shown(value)}"
        if lines and len(lines[-1]) + len(word) < 68:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines
