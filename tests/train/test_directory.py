from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.errors import ArtifactError
from onecard.train.directory import RunDirectory

SETTINGS = {"max_steps": 10, "learning_rate": 0.1}


def opened(path: Path, fingerprint: str = "f", *, overwrite: bool = False, **changes: Any) -> RunDirectory:
    return RunDirectory.open(path, fingerprint=fingerprint, settings=SETTINGS | changes, overwrite=overwrite)


def test_a_new_run_is_reopened_with_its_plan(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    assert run.plan is None
    run.write_plan({"steps": 7})
    again = opened(tmp_path / "run")
    assert again.plan is not None
    assert again.plan["steps"] == 7


def test_changed_settings_are_named(tmp_path: Path) -> None:
    opened(tmp_path / "run").write_plan({})
    with pytest.raises(ArtifactError, match=r"learning_rate: 0\.1 -> 0\.2") as fault:
        opened(tmp_path / "run", "g", learning_rate=0.2)
    assert "max_steps" not in fault.value.what
    assert "--overwrite" in fault.value.remedy
    with pytest.raises(ArtifactError, match="the input data or the version"):
        opened(tmp_path / "run", "g")


def test_overwrite_begins_anew(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    run.write_plan({})
    (run.path / "checkpoints").mkdir()
    again = opened(tmp_path / "run", "g", overwrite=True, learning_rate=0.2)
    assert again.plan is None
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "tokens"]


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    run.write_plan({})
    (run.path / "model").mkdir()
    (run.path / "model" / "config.json").write_text("{}")
    run.finish(parents=[], result={"updates": 1})
    assert sorted(p.name for p in run.path.iterdir()) == ["model", "onecard.json", "plan.json"]
    assert list(artifact.read_manifest(run.path, "run").files) == ["model/config.json"]
    with pytest.raises(ArtifactError, match="holds a finished run"):
        opened(tmp_path / "run")
    assert not (run.path / ".lock").exists()
    assert opened(tmp_path / "run", overwrite=True).plan is None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "corpus", "file"])
def test_what_is_no_run_is_never_touched(tmp_path: Path, overwrite: bool, kind: str) -> None:
    path = tmp_path / "home"
    if kind == "file":
        path.write_text("x")
    else:
        path.mkdir()
        (path / "photo.jpg").write_text("x")
        if kind == "corpus":
            artifact.write_manifest(path, "corpus", settings={})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match="is not a run"):
        opened(path, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_ended_before_its_plan_is_taken_up(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    (run.path / "rejected-00000.jsonl").write_text("{}\n")
    (run.tokens / "train").mkdir()
    assert opened(tmp_path / "run").tokens.joinpath("train").is_dir()
    # With other inputs its tokens are of no use.
    assert not opened(tmp_path / "run", "g").tokens.joinpath("train").exists()


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    run = opened(tmp_path / "run")
    run.write_plan({})
    folder = run.path / "checkpoints"
    for name in (".step-00000003.1a.part", ".step-00000002.1a.old", ".step-00000001.1a.old", "step-00000002"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (run.path / ".plan.json.1a.part").write_text("{")
    opened(tmp_path / "run")
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert (folder / "step-00000002" / "file").read_text() == "step-00000002"
    assert not (run.path / ".plan.json.1a.part").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_a_damaged_plan_is_said(tmp_path: Path, text: str) -> None:
    run = opened(tmp_path / "run")
    (run.path / "plan.json").write_text(text)
    with pytest.raises(ArtifactError, match="is damaged"):
        opened(tmp_path / "run")


def test_two_processes_do_not_train_in_one_directory(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import fcntl, sys\n"
        f"file = open({str(tmp_path / 'run' / '.lock')!r}, 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    opened(tmp_path / "run").write_plan({})
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        # The lock of this process is given up with its files.
        import gc

        gc.collect()
        assert other.stdout.readline() == b"held\n"
        for overwrite in (False, True):
            with pytest.raises(ArtifactError, match="Another process is training"):
                opened(tmp_path / "run", overwrite=overwrite)
        assert json.loads((tmp_path / "run" / "plan.json").read_text())["fingerprint"] == "f"
        other.communicate()
    assert opened(tmp_path / "run").plan is not None
