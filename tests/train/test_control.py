"""Reaching into a run: changes at the next update, exact again after a crash; pauses; places in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import cut, during, events, lines, tiny_pretrain

from onecard.errors import Interrupted
from onecard.train import control
from onecard.train.loop import Loop
from onecard.train.pretrain import pretrain

pytestmark = pytest.mark.usefixtures("quick")


CHANGES: list[tuple[str, Any]] = [
    ("learning_rate", 1e-4),
    ("muon_learning_rate", 1e-4),
    ("weight_decay", 0.9),
    ("max_grad_norm", 0.01),
    ("gradient_accumulation_steps", 1),
    ("mix", {"poems": 2.0, "news": 0.5}),
    ("schedule", "cosine"),
    ("decay_ratio", 0.1),
    ("max_steps", 9),
]


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=str)
def test_a_change_holds_from_the_next_update_on_and_again_after_a_crash(
    folder: Path,
    tiny_tokenizer_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
) -> None:
    """Asked for in update 4, so from update 5 on; the second run loses updates 4 and 5 and makes them again."""
    whole, broken = (tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / n, decay_ratio=0.3) for n in "ab")
    with monkeypatch.context() as patch:
        during(patch, 4, lambda loop: control.ask(loop.run_directory, name, value))
        pretrain(whole)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        during(patch, 4, lambda loop: control.ask(loop.run_directory, name, value))
        during(patch, 6, cut)
        pretrain(broken)
    pretrain(broken)
    made = [load_file(tmp_path / n / "model" / "model.safetensors") for n in "ab"]
    assert all(torch.equal(made[1][key], tensor) for key, tensor in made[0].items())
    [event] = events(tmp_path / "a", "set")
    assert (event["step"], event["name"], event["new"]) == (4, name, value) and "@" in event["who"]
    assert len(list(events(tmp_path / "b", "set"))) == 1
    untouched = tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "c", decay_ratio=0.3)
    pretrain(untouched)
    rows, plain = (lines(tmp_path / n / "metrics.jsonl") for n in "ac")
    assert [row["loss"] for row in rows[:4]] == [row["loss"] for row in plain[:4]]
    last = load_file(tmp_path / "c" / "model" / "model.safetensors")
    assert any(not torch.equal(last[key], tensor) for key, tensor in made[0].items())
    if name == "learning_rate":
        # The peak of AdamW, which metrics show where no Muon stands before it.
        assert len(rows) == 12
    if name == "max_steps":
        assert len(rows) == 9 and rows[-1]["lr"] < rows[4]["lr"]
    if name == "gradient_accumulation_steps":
        assert rows[4]["tokens"] - rows[3]["tokens"] < 0.7 * (plain[4]["tokens"] - plain[3]["tokens"])


def test_a_pause_saves_and_the_run_goes_on_as_if_nothing_was(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, whole = (tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / n, save_every=100) for n in "ab")
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="Paused after update 5 of 12"):
        during(patch, 5, lambda loop: control.ask(loop.run_directory, control.PAUSE))
        pretrain(paused)
    assert [event["step"] for event in events(tmp_path / "a", "pause")] == [5]
    assert not list((tmp_path / "a" / "requests").iterdir())
    pretrain(paused)
    pretrain(whole)
    made = [load_file(tmp_path / n / "model" / "model.safetensors") for n in "ab"]
    assert all(torch.equal(made[1][key], tensor) for key, tensor in made[0].items())


def test_what_is_no_request_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "1.json").write_text("{")
    (folder / "2.json").write_text(json.dumps({"other": 1}))
    (folder / ".3.json.part").write_text("not yet whole")
    control.ask(tmp_path, "weight_decay", 0.5)
    control.ask(tmp_path, "weight_decay", 0.25)
    asked = control.Control(tmp_path).due(7)
    assert [(request.name, request.value, request.step) for request in asked] == [
        ("weight_decay", 0.5, 7),
        ("weight_decay", 0.25, 7),
    ]
    assert [path.name for path in folder.iterdir()] == [".3.json.part"]
    again = control.Control(tmp_path)
    assert again.due(6) == [] and len(again.due(7)) == 2 and again.due(7) == []
    again.reach(8)
    assert again.due(8) == []


def test_a_mix_without_any_row_changes_nothing(
    folder: Path,
    tiny_tokenizer_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = {"poems": 0.0, "news": 0.001}
    with monkeypatch.context() as patch:
        during(patch, 4, lambda loop: control.ask(loop.run_directory, "mix", nothing))
        pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a"))
    assert "leaves no row of any source" in capsys.readouterr().err
    pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "b"))
    made = [load_file(tmp_path / n / "model" / "model.safetensors") for n in "ab"]
    assert all(torch.equal(made[1][key], tensor) for key, tensor in made[0].items())
    assert not list(events(tmp_path / "a", "set")) and not (tmp_path / "a" / "changes.jsonl").exists()


# --- the end moves ------------------------------------------------------------------------------------------------


def test_an_end_that_is_moved_during_the_last_update_is_moved_and_again_after_a_crash(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update 12 of 12 is at work: the run goes on to 16, with the learning rates of a run of 16."""
    whole, broken, plain = (tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / n) for n in "abc")

    def longer(loop: Loop) -> None:
        control.ask(loop.run_directory, "max_steps", 16)

    with monkeypatch.context() as patch:
        during(patch, 12, longer)
        assert pretrain(whole)["updates"] == 16
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        during(patch, 12, longer)
        during(patch, 14, cut)
        pretrain(broken)
    assert pretrain(broken)["updates"] == 16
    made = [load_file(tmp_path / n / "model" / "model.safetensors") for n in "ab"]
    assert all(torch.equal(made[1][key], tensor) for key, tensor in made[0].items())
    pretrain(plain)
    rows, before = (lines(tmp_path / n / "metrics.jsonl") for n in "ac")
    assert [row["loss"] for row in rows[:12]] == [row["loss"] for row in before]
    # Muon's peak is 0.02; a run of 16 with decay_ratio 0.6 decays over its last 10: 4, 3, 2 and 1 tenths are left.
    assert [row["lr"] for row in rows[12:]] == pytest.approx([0.02 * tenths / 10 for tenths in (4, 3, 2, 1)])
    assert "held_out_loss" in rows[11] and "held_out_loss" in rows[15]
    assert not list((tmp_path / "a" / "requests").iterdir())


def test_an_end_that_lies_behind_comes_after_the_next_update(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for when 4 updates were done, heard of after 5: it ends after 6, evaluated and saved as any end."""
    with monkeypatch.context() as patch:
        during(patch, 5, lambda loop: control.ask(loop.run_directory, "max_steps", 5))
        result = pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a", evaluate_every=100))
    assert (
        result["updates"] == 6
        and result["held_out_loss"] == lines(tmp_path / "a" / "metrics.jsonl")[5]["held_out_loss"]
    )
    [event] = events(tmp_path / "a", "set")
    assert (event["step"], event["new"]) == (5, 6)
    assert (tmp_path / "a" / "checkpoints" / "step-00000006").is_dir()


def test_at_the_end_nothing_can_be_shortened_and_a_pause_is_not_needed(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(loop: Loop) -> None:
        control.ask(loop.run_directory, "max_steps", 7)
        control.ask(loop.run_directory, control.PAUSE)

    with monkeypatch.context() as patch:
        during(patch, 12, ask)
        assert pretrain(tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a"))["updates"] == 12
    assert not list(events(tmp_path / "a", "set")) and not list(events(tmp_path / "a", "pause"))


def test_a_pause_beside_a_moved_end_is_a_pause(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(loop: Loop) -> None:
        control.ask(loop.run_directory, "max_steps", 14)
        control.ask(loop.run_directory, control.PAUSE)

    made = tiny_pretrain(folder, tiny_tokenizer_directory, tmp_path / "a")
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="Paused after update 12 of 14"):
        during(patch, 12, ask)
        pretrain(made)
    assert pretrain(made)["updates"] == 14
