"""status, pause, set and resume: what they say, what they refuse, and that the run ends as it should."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import cut, during, events, lines, quicken, tiny_pretrain

from onecard import artifact, cli
from onecard.config import PauseConfig, PretrainConfig, ResumeConfig, SetConfig, StatusConfig
from onecard.errors import ConfigError, Interrupted, OnecardError
from onecard.settings import build
from onecard.train import control, reach, status
from onecard.train.directory import holder, locked
from onecard.train.loop import Loop
from onecard.train.pretrain import pretrain

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("quick")


def paused(folder: Path, tokenizer: Path, output: Path, step: int, **changes: Any) -> PretrainConfig:
    """A run that was paused after update `step`; returns its settings."""
    made = tiny_pretrain(folder, tokenizer, output, **changes)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        during(patch, step, lambda loop: control.ask(loop.run_directory, control.PAUSE))
        pretrain(made)
    return made


@pytest.fixture(scope="module")
def stopped(folder: Path, tiny_tokenizer_directory: Path) -> Path:
    """A paused run that the tests which use it leave as it is."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        paused(folder, tiny_tokenizer_directory, folder / "stopped", 6)
    return folder / "stopped"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def ask_status(run: Path) -> dict[str, Any]:
    return status.status(StatusConfig(run=run))


# --- status -------------------------------------------------------------------------------------------------------


def test_status_of_a_paused_run(stopped: Path, capsys: Capture) -> None:
    said = ask_status(stopped)
    rows = lines(stopped / "metrics.jsonl")
    assert (said["state"], said["verb"], said["process"]) == ("paused", "pretrain", None)
    assert (said["step"], said["max_steps"], said["tokens"]) == (6, 12, rows[-1]["tokens"])
    assert said["loss"] == rows[-1]["loss"] and said["learning_rate"] == rows[-1]["lr"]
    assert said["checkpoint"]["step"] == 6 and 0 <= said["checkpoint"]["age_seconds"] < 600
    pace = (rows[-1]["seconds"] - rows[0]["seconds"]) / 5
    assert said["seconds_left"] == pytest.approx(6 * pace)
    assert said["settings"]["batch_size"] == 2 and said["settings"]["learning_rate"] > 0
    text = capsys.readouterr().out
    assert "paused; everything is saved" in text and "6 of 12" in text and f"onecard resume {stopped}" in text


def test_status_tells_states_apart(stopped: Path, tmp_path: Path) -> None:
    def state(*kinds: dict[str, Any], finished: bool = False) -> str:
        run = tmp_path / str(len(list(tmp_path.iterdir())))
        run.mkdir()
        (run / "plan.json").write_text((stopped / "plan.json").read_text())
        (run / "events.jsonl").write_text("".join(json.dumps({"step": 1} | kind) + "\n" for kind in kinds))
        if finished:
            (run / "onecard.json").write_text("{}")
        return status.find(run).state

    start, resume = {"event": "start"}, {"event": "resume"}
    assert state() == state(start, {"event": "checkpoint"}) == "crashed"
    assert state(start, {"event": "pause", "reason": "SIGTERM"}) == "interrupted"
    assert state(start, {"event": "pause", "reason": "asked for by me@box"}, {"event": "checkpoint"}) == "paused"
    assert state(start, {"event": "pause", "reason": "SIGTERM"}, resume) == "crashed"
    assert state(start, {"event": "oom", "reason": "no memory"}) == "stopped"
    assert state(start, {"event": "end"}, finished=True) == "finished"


def test_the_run_at_work_is_found_below_the_output_of_a_recipe(stopped: Path) -> None:
    assert status.find(stopped.parent).path == stopped
    with pytest.raises(OnecardError, match="holds no run"):
        status.find(stopped / "checkpoints")
    with pytest.raises(OnecardError, match="There is no run"):
        status.find(stopped / "nowhere")


def test_a_trend_stands_out_of_the_noise_or_is_level() -> None:
    falling = status.trend([(step, 3.0 - 0.01 * step) for step in range(20)])
    assert falling is not None and falling["direction"] == "falling"
    assert falling["per_hundred_updates"] == pytest.approx(-1.0)
    noise = status.trend([(step, 3.0 + (-1) ** step) for step in range(20)])
    assert noise is not None and noise["direction"] == "level"
    assert status.trend([(1, 2.0)] * 3) is None


def test_time_left_is_the_pace_of_late_with_evaluations() -> None:
    # An update takes 1 s, an evaluation (every fourth) 2 s more; the first update took a minute.
    rows, seconds = [], 59.0
    for step in range(1, 13):
        seconds += 1 + 2 * (step % 4 == 0)
        rows.append({"step": step, "seconds": seconds} | ({"held_out_loss": 1.0} if step % 4 == 0 else {}))
    assert status.seconds_left(rows, 22) == pytest.approx(10 * 12 / 8)
    assert status.seconds_left(rows[:2], 22) is None
    # So it is with 3 s of cooling after each update.
    hot = [row | {"cooling_seconds": 3.0 * row["step"]} for row in rows]
    assert status.seconds_left(hot, 22) == pytest.approx(10 * (12 / 8 + 3))


def test_a_lock_is_seen_from_another_process_and_not_after_it(tmp_path: Path) -> None:
    code = (
        f"from onecard.train.directory import holder; from pathlib import Path; print(holder(Path({str(tmp_path)!r})))"
    )
    with locked(tmp_path):
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(os.getpid())
    assert holder(tmp_path) is None


# --- set ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ("size=4M", "architecture", "another --output"),
    ("tokenizer=other", "ids", "another --output"),
    ("seed=3", "order of the rows", "another --output"),
    ("max_length=64", "rows are cut", "another --output"),
    ("num_epochs=3", "made updates of it", "max_steps"),
    ("batch_size=4", "within a process", "--set batch_size=4"),
    ("compile=true", "within a process", "--set compile=true"),
    ("learning_rat=1", "no setting learning_rat", "learning_rate"),
    ("learning_rate=-1", "greater than 0", "peak learning rate"),
    ("schedule=linear", "schedule", "cosine"),
    ("save_every=auto", "was resolved", "Give a value"),
    ("max_steps=6", "lies behind", "Give more than 6."),
    ("mix={poem=2}", "poem", "poems"),
    ("mix={poems=0, news=0}", "weight of 0", "positive"),
    ("learning_rate", "KEY=VALUE", "learning_rate=1e-5"),
]


@pytest.mark.parametrize(("text", "what", "remedy"), REFUSED, ids=[text for text, _, _ in REFUSED])
def test_what_cannot_be_set_is_refused_with_the_reason(stopped: Path, text: str, what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as fault:
        reach.change(SetConfig(run=stopped, changes=["weight_decay=0.5", text]))
    assert what in fault.value.what and remedy in fault.value.remedy
    assert control.waiting(stopped) == []  # not the valid one either


def test_what_changes_nothing_is_said(stopped: Path, capsys: Capture) -> None:
    reach._checked(status.find(stopped), ["muon_learning_rate=0.01"])
    assert "changes nothing" not in capsys.readouterr().err
    plan = {**status.find(stopped).plan, "optimizer": "adamw"}
    run = status.Standing(stopped, plan, "paused", "", None)
    reach._checked(run, ["muon_learning_rate=0.01"])
    assert "changes nothing here: the optimizer is adamw" in capsys.readouterr().err


def test_a_change_waits_for_the_next_start_and_is_shown(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, capsys: Capture
) -> None:
    made = paused(folder, tiny_tokenizer_directory, tmp_path / "a", 5)
    said = reach.change(SetConfig(run=tmp_path / "a", changes=["weight_decay=0.5", "max_steps=8"]))
    assert [(e["name"], e["old"], e["new"]) for e in said["changes"]] == [
        ("weight_decay", 0.1, 0.5),
        ("max_steps", 12, 8),
    ]
    assert [entry["new"] for entry in ask_status(tmp_path / "a")["waiting"]] == [0.5, 8]
    assert "weight_decay = 0.5 from the next start on" in capsys.readouterr().out
    pretrain(made)  # the original command
    after = ask_status(tmp_path / "a")
    assert (after["state"], after["step"], after["max_steps"], after["seconds_left"]) == ("finished", 8, 8, 0.0)
    assert [(e["name"], e["old"], e["new"], e["step"]) for e in after["changes"]] == [
        ("weight_decay", 0.1, 0.5, 5),
        ("max_steps", 12, 8, 5),
    ]
    page = (tmp_path / "a" / "report.html").read_text()
    assert "Changed on the way" in page and "weight_decay" in page
    with pytest.raises(OnecardError, match="finished"):
        reach.change(SetConfig(run=tmp_path / "a", changes=["weight_decay=0.1"]))
    with pytest.raises(OnecardError, match="finished"):
        reach.resume(ResumeConfig(run=tmp_path / "a"))


# --- longer than planned ------------------------------------------------------------------------------------------


def test_a_finished_run_is_trained_longer_as_if_it_had_been_asked_for_in_its_last_update(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, capsys: Capture
) -> None:
    pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a"))
    with pytest.MonkeyPatch.context() as patch:
        during(patch, 12, lambda loop: control.ask(loop.run_directory, "max_steps", 16))
        pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "b"))
    short, before = weights(tmp_path / "a"), artifact.read_manifest(tmp_path / "a")
    answer = reach.resume(ResumeConfig(run=tmp_path / "a", set=["max_steps=16"]))
    assert answer["updates"] == 16
    long, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(long[name], tensor) for name, tensor in other.items())
    assert any(not torch.equal(long[name], tensor) for name, tensor in short.items())
    after = artifact.verify(tmp_path / "a")
    assert after.fingerprint == before.fingerprint and after.content_hash != before.content_hash
    assert after.result["updates"] == 16
    said = ask_status(tmp_path / "a")
    assert (said["state"], said["step"], said["max_steps"]) == ("finished", 16, 16)
    assert [(e["name"], e["old"], e["new"], e["step"]) for e in said["changes"]] == [("max_steps", 12, 16, 12)]
    assert [row["step"] for row in lines(tmp_path / "a" / "metrics.jsonl")] == list(range(1, 17))


def test_what_a_finished_run_is_set_to_is_done_when_it_goes_on(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, capsys: Capture
) -> None:
    made = tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a")
    pretrain(made)
    model = (tmp_path / "a" / "model" / "model.safetensors").read_bytes()
    said = reach.change(SetConfig(run=tmp_path / "a", changes=["max_steps=14", "weight_decay=0.5"]))
    assert said["state"] == "finished" and len(said["changes"]) == 2
    assert "max_steps: 12 -> 14 when it goes on" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        during(patch, 13, lambda loop: control.ask(loop.run_directory, control.PAUSE))
        reach.resume(ResumeConfig(run=tmp_path / "a"))
    # Until the end of the longer run the model of the shorter one stays.
    assert (tmp_path / "a" / "model" / "model.safetensors").read_bytes() == model
    assert ask_status(tmp_path / "a")["state"] == "paused"
    assert pretrain(made)["updates"] == 14  # the original command goes on with it too
    assert (tmp_path / "a" / "model" / "model.safetensors").read_bytes() != model


def test_a_finished_run_is_left_as_it_is_where_it_cannot_go_on(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a"
    pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, run))
    for changes, what, remedy in (
        ([], "its 12 updates are made", "--set max_steps=24"),
        (["weight_decay=0.1"], "its 12 updates are made", "--set max_steps=24"),
        (["max_steps=12"], "lies behind: update 12 is done", "Give more than 12"),
        (["max_steps=8"], "lies behind", "Give more than 12"),
    ):
        with pytest.raises(OnecardError) as fault:
            reach.resume(ResumeConfig(run=run, set=changes))
        assert what in fault.value.what and remedy in fault.value.remedy
    shutil.rmtree(run / "checkpoints")
    for verb in (
        lambda: reach.resume(ResumeConfig(run=run, set=["max_steps=20"])),
        lambda: reach.change(SetConfig(run=run, changes=["max_steps=20"])),
    ):
        with pytest.raises(OnecardError, match="has no whole checkpoint any more"):
            verb()
    assert artifact.verify(run).result["updates"] == 12 and control.waiting(run) == []


def test_a_run_that_was_stopped_early_goes_on_when_that_is_taken_back(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "evaluate", lambda self: 1.0 + self.step)  # worse and worse
    made = tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a", early_stopping=1, evaluate_every=3)
    assert pretrain(made)["updates"] == 6
    with pytest.raises(OnecardError, match="early_stopping = 1 ended it after update 6"):
        reach.resume(ResumeConfig(run=tmp_path / "a", set=["max_steps=14"]))
    answer = reach.resume(ResumeConfig(run=tmp_path / "a", set=["early_stopping=none"]))
    assert answer["updates"] == 12


def test_a_run_that_broke_off_may_end_between_its_checkpoint_and_where_it_was(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Checkpoint 3, lines to update 4: an end after 4 lies behind what was seen, and before what goes on."""
    made = tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        during(patch, 5, cut)
        pretrain(made)
    with pytest.raises(ConfigError, match="max_steps = 3 lies behind: update 3 is done"):
        reach.change(SetConfig(run=tmp_path / "a", changes=["max_steps=3"]))
    assert reach.resume(ResumeConfig(run=tmp_path / "a", set=["max_steps=4"]))["updates"] == 4


# --- resume -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_like_an_undisturbed_one_whatever_the_micro_batch(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(folder)  # relative paths are meant from here, wherever it is gone on
    places = {"corpus": "corpus", "output": "whole", "keep_last": 5, "max_grad_norm": 0.5}
    pretrain(build(PretrainConfig, tiny_pretrain(folder, tiny_tokenizer_directory, folder).plain() | places))
    broken = build(PretrainConfig, tiny_pretrain(folder, tiny_tokenizer_directory, folder).plain() | places)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        during(patch, 5, lambda loop: control.ask(loop.run_directory, control.PAUSE))
        pretrain(broken.model_copy(update={"output": Path("broken")}))
    monkeypatch.chdir(tmp_path)
    sizes = []
    original = Loop.micro_batches
    monkeypatch.setattr(
        Loop, "micro_batches", lambda self, n: sizes.append(self.settings.batch_size) or original(self, n)
    )
    # 3 does not divide the 4 rows of an update.
    answer = reach.resume(ResumeConfig(run=folder / "broken", set=["batch_size=3"]))
    assert answer["updates"] == 12 and 3 in sizes
    assert len(list((folder / "broken" / "checkpoints").iterdir())) > 2  # keep_last was remembered
    whole, other = weights(folder / "whole"), weights(folder / "broken")
    assert all(torch.allclose(other[name], tensor, atol=2e-5) for name, tensor in whole.items())
    rows, plain = (lines(folder / name / "metrics.jsonl") for name in ("broken", "whole"))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in plain]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], abs=1e-4)
    [event] = events(folder / "broken", "set")
    assert (event["name"], event["old"], event["new"], event["step"]) == ("batch_size", 2, 3, 5)


def test_another_optimizer_drops_the_old_state_and_stays_in_force(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, capsys: Capture
) -> None:
    made = paused(folder, tiny_tokenizer_directory, tmp_path / "a", 4)
    fingerprint = json.loads((tmp_path / "a" / "plan.json").read_text())["fingerprint"]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        during(patch, 7, lambda loop: control.ask(loop.run_directory, control.PAUSE))
        reach.resume(ResumeConfig(run=tmp_path / "a", set=["optimizer=adamw", "activation_checkpointing=full"]))
    said = capsys.readouterr().err
    assert "optimizer muon -> adamw (after update 4" in said and "what it remembered is dropped" in said
    plan = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert (plan["fingerprint"], plan["asked"]["optimizer"], plan["optimizer"]) == (fingerprint, "muon", "adamw")
    assert [(e["name"], e["old"], e["new"]) for e in plan["amended"]] == [
        ("optimizer", "muon", "adamw"),
        ("activation_checkpointing", "none", "full"),
    ]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        during(patch, 9, lambda loop: seen.extend(loop.optimizers.kinds()))
        pretrain(made)  # the original command: what was changed stays so
    assert seen == ["AdamW"]
    assert "differs from the original plan: optimizer muon -> adamw" in capsys.readouterr().err


def test_what_a_new_process_cannot_do_is_refused_before_anything_is_written(stopped: Path) -> None:
    before = (stopped / "plan.json").read_text()
    for change, what in (
        (["optimizer_in_backward=true"], "max_grad_norm"),
        (["optimizer_in_backward=true", "max_grad_norm=0"], "gradient_accumulation_steps"),
        (["optimizer=adafactor", "optimizer_states=8bit"], "adafactor"),
        (["precision=float8"], "float8"),
        (["seed=1"], "seed cannot change"),
    ):
        with pytest.raises(OnecardError, match=what):
            reach.resume(ResumeConfig(run=stopped, set=change))
    assert (stopped / "plan.json").read_text() == before and control.waiting(stopped) == []


def test_pausing_what_does_not_run_says_so(stopped: Path, capsys: Capture) -> None:
    assert reach.pause(PauseConfig(run=stopped))["state"] == "paused"
    assert "is not running: it is paused" in capsys.readouterr().out
    assert control.waiting(stopped) == []


def test_a_pause_that_nobody_obeyed_does_not_stop_the_next_process(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path
) -> None:
    made = paused(folder, tiny_tokenizer_directory, tmp_path / "a", 3)
    control.ask(tmp_path / "a", control.PAUSE)
    assert pretrain(made)["updates"] == 12


# --- with real processes ------------------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "onecard.cli", *words]


def test_a_detached_run_outlives_its_terminal_and_is_paused_and_resumed(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["finetune", str(tiny_model_directory), "--sources", "chats.jsonl", "--max-length", "32", "--max-steps"]
    words += ["100000", "--no-compile", "--precision", "fp32", "--held-out", "0", "--batch-size", "1", "--detach"]
    words += ["--gradient-accumulation-steps", "1", "--save-every", "1000", "--evaluate-every", "100000"]

    def done(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, check=False)

    master, slave = os.openpty()
    # A session with this terminal, as a shell has; its end sends SIGHUP to all that belong to it.
    shell = subprocess.Popen(
        command(*words, "--json"),
        cwd=tmp_path,
        start_new_session=True,
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    started = json.loads(shell.communicate(timeout=120)[0])
    os.close(slave)
    os.close(master)
    try:
        assert (started["state"], started["log"]) == ("started", "finetune.log")
        said = json.loads(done("status", "finetune", "--json").stdout)
        assert (said["state"], said["process"]) == ("running", started["process"])
        assert os.getsid(started["process"]) == started["process"]
        again = done(*words)
        assert again.returncode == 2 and "Another process is training" in again.stderr
        assert done("set", "finetune", "weight_decay=0.25").returncode == 0
        halted = json.loads(done("pause", "finetune", "--json").stdout)
        assert halted["state"] == "paused"
        changed = json.loads((tmp_path / "finetune" / "changes.jsonl").read_text().splitlines()[0])
        assert (changed["name"], changed["value"], changed["old"]) == ("weight_decay", 0.25, 0.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started["process"], signal.SIGKILL)
    until = time.monotonic() + 20
    while holder(tmp_path / "finetune") is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert "Paused after update" in (tmp_path / "finetune.log").read_text()


def test_what_fails_at_once_is_said_in_the_foreground(tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "nowhere", "--tokenizer", "nowhere", "--size", "2M", "--detach"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "error: nowhere is not a directory" in said and "fix: " in said
    assert not (tmp_path / "pretrain").exists()
    # Wrong settings do not even start a process.
    assert cli.main([*words, "--seed", "-1"]) == 2
    assert "seed" in capsys.readouterr().err
