"""The verbs `pause`, `set` and `resume`: reaching into a run from another terminal, or after a crash.

In: a run directory. A process that trains there is asked by files (see control); one that is to train again is started
here with the settings that its plan recorded. What a run is made of (architecture, tokenizer, rows, their order) is
refused with the reason; what needs another process is taken by `resume --set` only.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import (
    AlignConfig,
    ClassifyConfig,
    DistillConfig,
    FinetuneConfig,
    PauseConfig,
    PretrainConfig,
    ResumeConfig,
    SetConfig,
    TrainingConfig,
)
from onecard.errors import ArtifactError, ConfigError, OnecardError
from onecard.settings import assignment, build, nearest
from onecard.train import control
from onecard.train.directory import PLAN, locked, shown
from onecard.train.metrics import RunLog
from onecard.train.status import Standing, describe, find, in_force, last_checkpoint

KINDS: dict[str, type[TrainingConfig]] = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "distill": DistillConfig,
    "align": AlignConfig,
    "classify": ClassifyConfig,
}
# What another process can do differently with the same weights and rows.
RESTART = (
    "batch_size",
    "precision",
    "optimizer",
    "optimizer_states",
    "optimizer_in_backward",
    "gradients",
    "compile",
    "cuda_graphs",
    "activation_checkpointing",
    "activation_offload",
    "activation_compression",
    "keep_best",
    "keep_every",
    "skips_before_roll_back",
    "most_roll_backs",
    "roll_back_learning_rate_factor",
    "on_spike",
    "early_stopping",
    "pause_above_celsius",
    "when_hot",
    "electricity_price",
    "currency",
)
# Done by the running loop, but asked for at a start only: layers are compiled, and memory is taken, for the size.
_ASKED_AT_START = ("batch_size",)
_ARCHITECTURE = "it is part of the model's architecture, and the weights that are trained have that shape"
_ROWS = "it decides which rows there are, and the run counts its place among them"
FIXED = {
    "size": _ARCHITECTURE,
    "start": "it decides the weights that the run began with",
    "lora_rank": _ARCHITECTURE,
    "lora_alpha": _ARCHITECTURE,
    "lora_dropout": _ARCHITECTURE,
    "target_modules": _ARCHITECTURE,
    "model": "the run began with its weights",
    "tokenizer": "every row is written in its ids, and the embeddings are its entries",
    "corpus": _ROWS,
    "sources": _ROWS,
    "held_out": _ROWS,
    "packing": _ROWS,
    "strict": _ROWS,
    "max_length": "the rows are cut to it, and the run counts its place among them",
    "seed": "it decides the order of the rows and the weights that the run began with",
    "num_epochs": "the plan has made updates of it",
    "time_limit_minutes": "the plan has made updates of it",
    "output": "it is where the run lies",
    "overwrite": "it is no setting of the run but of a command",
    "detach": "it is no setting of the run but of a command",
}
_INSTEAD = {
    "num_epochs": "Set max_steps, the number of updates.",
    "time_limit_minutes": "Set max_steps, the number of updates.",
    "detach": "Use: onecard resume RUN --detach",
}


# --- pause --------------------------------------------------------------------------------------------------------


def pause(config: PauseConfig) -> dict[str, Any]:
    """Ask for a pause and wait for it. OnecardError if it has not come in time, or the process ended otherwise."""
    run = find(config.run)
    if not run.runs:
        console.result(f"{run.path} is not running: it is {run.state}{f' ({run.reason})' if run.reason else ''}.")
        return {"run": str(run.path), "state": run.state, "step": describe(run)["step"]}
    control.ask(run.path, control.PAUSE)
    console.note(f"  asked process {run.process}: it saves at the next completed update, then frees the device")
    _wait(run, config.wait_minutes * 60)
    after = find(run.path)
    # Whoever obeyed it took it; else nobody is left who should.
    control.forget_pauses(run.path)
    step = describe(after)["step"]
    if after.state == "finished":
        console.result(f"{run.path} came to its end before it could pause: it is finished.")
    elif after.state != "paused":
        raise OnecardError(
            f"The process ended, but not by the pause: {run.path} is {after.state}"
            f"{f' ({after.reason})' if after.reason else ''}.",
            f"Go on with: onecard resume {run.path}",
        )
    else:
        console.result(f"Paused after update {step}; everything is saved and the device is free.")
        console.result(f"Go on with:  onecard resume {run.path}")
    return {"run": str(run.path), "state": after.state, "step": step}


def _wait(run: Standing, seconds: float) -> None:
    """Until no process trains there. OnecardError when it takes longer."""
    began = said = time.monotonic()
    while find(run.path).runs:
        now = time.monotonic()
        if now - began > seconds:
            raise OnecardError(
                f"{run.path} has not paused within {console.format_duration(seconds)}: an update (or the preparation "
                "before the first one) is still going on.",
                f"The request stands and is obeyed at the next completed update; see: onecard status {run.path}",
            )
        if now - said > 10:
            said = now
            step = describe(run)["step"]
            console.note(f"  waiting for the end of update {step + 1} ({console.format_duration(now - began)})")
        time.sleep(0.1)


# --- set ----------------------------------------------------------------------------------------------------------


def change(config: SetConfig) -> dict[str, Any]:
    """Change settings from the next update on; ConfigError, before anything is changed, for what cannot be."""
    run = find(config.run)
    _check_changeable(run)
    wanted = _checked(run, config.changes)
    if run.state == "finished":
        _check_goes_on(run, wanted)
    later = [name for name in wanted if name not in control.MEANWHILE]
    if later:
        raise ConfigError(
            f"{', '.join(later)} cannot change within a process.",
            f"{'Pause it, then' if run.runs else 'Use'}: onecard resume {run.path} --set "
            + " ".join(f"{name}={shown(wanted[name])}" for name in later),
        )
    before = _before(run)
    done = [{"name": name, "old": before.get(name), "new": value} for name, value in wanted.items()]
    for entry in done:
        control.ask(run.path, entry["name"], entry["new"], old=entry["old"])
    when = "from the next update on" if run.runs else "when it goes on"
    for entry in done:
        console.result(f"{entry['name']}: {shown(entry['old'])} -> {shown(entry['new'])} {when}")
    if not run.runs:
        console.result(f"Go on with:  onecard resume {run.path}")
    return {"run": str(run.path), "state": run.state, "changes": done}


def _check_changeable(run: Standing) -> None:
    if not run.plan:
        raise ArtifactError(
            f"{run.path} has no plan yet, so nothing can change in it.",
            "Wait until it trains." if run.runs else "Run the original command, with other settings as you like.",
        )
    if run.verb == "heal":
        raise ArtifactError(
            f"{run.path} is the healing of a pruning.",
            "Run the `onecard prune` command that began it again: it goes on.",
        )
    if run.verb not in KINDS:
        raise ArtifactError(f"{run.path} was made by {run.verb}, which this version does not know.", "Update onecard.")


def _check_goes_on(run: Standing, wanted: Mapping[str, Any]) -> None:
    """ArtifactError unless a finished run has updates left to make under what is wanted, and the state to make them."""
    from onecard.train import checkpoint

    settings = {**_before(run), **wanted}
    done = describe(run)["step"]
    early = done < in_force(run)["max_steps"]
    if settings["max_steps"] <= done:
        raise ArtifactError(
            f"{run.path} is finished: its {done:,} updates are made, and nothing of them can change any more.",
            f"Train it longer: onecard resume {run.path} --set max_steps={2 * done} (or begin another from its model).",
        )
    if early and "early_stopping" not in wanted:
        raise ArtifactError(
            f"{run.path} is finished: early_stopping = {settings['early_stopping']} ended it after update {done:,}.",
            f"Go on in spite of it: onecard resume {run.path} --set early_stopping=none",
        )
    if checkpoint.newest_whole(run.path) is None:
        raise ArtifactError(
            f"{run.path} is finished and has no whole checkpoint any more: it cannot be trained longer.",
            "Begin another run from its model (onecard finetune), or make it anew with its original command.",
        )


def _open_again(run: Standing) -> None:
    """A finished run is one to go on with from here; its model stays until the new one takes its place."""
    with locked(run.path), artifact.disk_faults(run.path):
        (run.path / artifact.MANIFEST).unlink()
        artifact.flush_directory(run.path)


def _before(run: Standing) -> dict[str, Any]:
    """The settings in force, with what was asked for and is not done yet."""
    asked = {request.name: request.value for _, request in control.waiting(run.path)}
    return in_force(run) | asked


def _checked(run: Standing, texts: Sequence[str]) -> dict[str, Any]:
    """New values by name, each valid for itself and with the others. ConfigError says why one cannot be."""
    kind, before = KINDS[run.verb], _before(run)
    wanted = dict(assignment(text) for text in texts)
    if not wanted:
        raise ConfigError("No setting is given.", "Such as learning_rate=1e-5.")
    fields = [name for name in kind.model_fields if name not in FIXED]
    for name, value in wanted.items():
        if name in FIXED and name in kind.model_fields:
            raise ConfigError(
                f"{name} cannot change: {FIXED[name]}.",
                _INSTEAD.get(name, "Begin another run for that, with another --output."),
            )
        if name not in fields:
            hint = nearest(name, kind.model_fields).strip() or f"Those that can change: {', '.join(sorted(fields))}."
            raise ConfigError(f"{run.verb} has no setting {name}.", hint)
        if value == "auto" and name in run.plan:
            raise ConfigError(f"{name} = auto was resolved when the run was planned.", "Give a value.")
    made = build(kind, {**before, **wanted, "output": str(run.path)}).plain()
    new = {name: made[name] for name in wanted}
    _check_together(run, made)
    if "max_steps" in new:
        _check_length(run, new["max_steps"])
    if "mix" in new:
        _check_mix(run, new["mix"])
    _say_idle(made, new)
    return new


def _check_together(run: Standing, settings: dict[str, Any]) -> None:
    """The combinations that a running loop would trip over; `resume` looks at all."""
    if settings["optimizer_in_backward"]:
        for name, only in (("max_grad_norm", 0), ("gradient_accumulation_steps", 1)):
            if settings[name] != only:
                raise ConfigError(
                    f"{name} = {settings[name]} cannot be with optimizer_in_backward, which keeps no gradient.",
                    f"Set {name} = {only}, or optimizer_in_backward = false (onecard resume {run.path} --set ...).",
                )


def _check_length(run: Standing, max_steps: int) -> None:
    """ConfigError for an end that lies behind. Updates after the last checkpoint of a run that broke off do not."""
    done = describe(run)["step"]
    if not run.runs and run.state != "finished":
        done = min(done, (last_checkpoint(run.path) or (0,))[0])
    if max_steps <= done:
        raise ConfigError(
            f"max_steps = {max_steps} lies behind: update {done} is done.",
            f"Give more than {done}{f'; or stop here with: onecard pause {run.path}' if run.runs else ''}.",
        )


def _check_mix(run: Standing, mix: dict[str, float]) -> None:
    try:
        meta = artifact_json(run.path / "tokens" / "train" / "meta.json")
    except (OSError, ValueError):
        return  # the store is made again at the start, and the mix looked at there
    sources = meta["sources"]
    for name in mix:
        if name not in sources:
            hint = nearest(name, sources).strip() or f"Sources: {', '.join(sources)}."
            raise ConfigError(f"mix names a source {name} that the run does not have.", hint)
    if all(mix.get(name, 1.0) == 0 for name in sources):
        raise ConfigError("mix gives every source a weight of 0.", "Give at least one source a positive weight.")


def artifact_json(path: Path) -> dict[str, Any]:
    """A JSON file that onecard wrote."""
    import json

    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def _say_idle(settings: dict[str, Any], new: dict[str, Any]) -> None:
    """Warn of what changes nothing as the other settings are."""
    if "muon_learning_rate" in new and settings["optimizer"] != "muon":
        console.warn(f"muon_learning_rate changes nothing here: the optimizer is {settings['optimizer']}.")
    if "decay_ratio" in new and settings["schedule"] != "wsd":
        console.warn(f"decay_ratio changes nothing here: the schedule is {settings['schedule']}.")


# --- resume -------------------------------------------------------------------------------------------------------


def resume(config: ResumeConfig) -> dict[str, Any]:
    """Go on with a run, after changing settings of it if asked; returns what its verb returns."""
    run = find(config.run)
    settings = prepare_resume(run, config.set)
    module = f"onecard.train.{run.verb}"
    function = getattr(importlib.import_module(module), run.verb)
    with _working_directory(run):
        answer: dict[str, Any] = function(settings)
    return answer


def prepare_resume(run: Standing, changes: Sequence[str]) -> TrainingConfig:
    """The settings that the run began with, as its verb takes them; makes `changes` first."""
    if run.runs:
        raise ArtifactError(
            f"{run.path} is running already (process {run.process}).",
            f"See: onecard status {run.path}; change settings with: onecard set {run.path} KEY=VALUE",
        )
    _check_changeable(run)
    kind = KINDS[run.verb]
    values = {**run.plan.get("free", {}), **run.plan["asked"], "output": str(_seen_from(run))}
    settings = build(kind, {name: value for name, value in values.items() if name in kind.model_fields})
    wanted = _checked(run, changes) if changes else {}
    if run.state == "finished":
        _check_goes_on(run, wanted)
    if wanted:
        _amend(run, wanted)
    if run.state == "finished":
        _open_again(run)
    return settings


def _amend(run: Standing, wanted: dict[str, Any]) -> None:
    """Write down what shall be different from the next start on. ConfigError where it cannot be with the rest."""
    from onecard.train import precision, session

    before = _before(run)
    together = build(KINDS[run.verb], {**before, **wanted, "output": str(run.path)})
    if "precision" in wanted:
        precision.choose(wanted["precision"])
    session.check(together, together.precision)
    if wanted.get("optimizer_in_backward") and before["gradient_accumulation_steps"] != 1:
        raise ConfigError(
            "optimizer_in_backward takes each update in one micro-batch; this run has "
            f"{before['gradient_accumulation_steps']}.",
            "Set gradient_accumulation_steps = 1 too, and max_grad_norm = 0.",
        )
    newest = last_checkpoint(run.path)
    step = 0 if newest is None else newest[0]
    with locked(run.path):
        plan, amended = dict(run.plan), list(run.plan.get("amended", []))
        log = RunLog(run.path)
        for name, value in wanted.items():
            if name in control.MEANWHILE or name in _ASKED_AT_START:
                control.ask(run.path, name, value, old=before.get(name))
                continue
            entry = {"name": name, "old": before.get(name), "new": value, "step": step, "who": control.caller()}
            amended.append(entry | {"time": control.now()})
            log.event("set", restart=True, **entry)
            key = "compiled" if name == "compile" else name
            if key in plan:
                plan[key] = value
        artifact.write_json_atomically(run.path / PLAN, plan | {"amended": amended})


def _seen_from(run: Standing) -> Path:
    """The run's path as it is from where it is gone on with."""
    here = Path(run.plan.get("working_directory", ".")).absolute() == Path.cwd()
    return run.path if here else run.path.absolute()


def _working_directory(run: Standing) -> contextlib.AbstractContextManager[None]:
    """Relative paths of the inputs are meant from where the run was started."""
    began = Path(run.plan.get("working_directory", "."))
    return contextlib.chdir(began) if began.is_dir() else contextlib.nullcontext()
