"""Directories are whole or absent, damage is found, and remains of killed processes do no harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onecard
from onecard import artifact
from onecard.errors import ArtifactError

WRITER = """
import sys, time
from pathlib import Path
from onecard import artifact
with artifact.new_directory(Path(sys.argv[1]), replace=True) as temporary:
    (temporary / "half").write_text("half")
    sys.stdout.write("writing\\n"); sys.stdout.flush()
    time.sleep(60)
"""


def make(directory: Path, text: str = "content") -> None:
    with artifact.new_directory(directory, replace=True) as temporary:
        (temporary / "inside").mkdir()
        (temporary / "inside" / "file.txt").write_text(text, encoding="utf-8")
        artifact.write_manifest(temporary, "corpus", settings={"a": 1}, result={"kept": 2})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_directory_reads_back(tmp_path: Path) -> None:
    make(tmp_path / "d")
    manifest = artifact.verify(tmp_path / "d")
    assert (manifest.kind, manifest.settings, manifest.result) == ("corpus", {"a": 1}, {"kept": 2})
    assert list(manifest.files) == ["inside/file.txt"]
    assert manifest.files["inside/file.txt"]["bytes"] == 7
    assert manifest.versions["onecard"] == onecard.__version__
    assert names(tmp_path) == ["d"]


def test_an_error_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), artifact.new_directory(tmp_path / "a" / "d") as temporary:
        (temporary / "file").write_text("x")
        raise RuntimeError
    assert names(tmp_path / "a") == []


def test_what_exists_is_refused_unless_empty_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with artifact.new_directory(tmp_path / "empty") as temporary:
        (temporary / "file").write_text("x")
    assert names(tmp_path / "empty") == ["file"]
    with pytest.raises(ArtifactError, match="already exists"), artifact.new_directory(tmp_path / "empty"):
        raise AssertionError("the body must not run")
    with artifact.new_directory(tmp_path / "empty", replace=True) as temporary:
        (temporary / "other").write_text("x")
    assert names(tmp_path / "empty") == ["other"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="already exists"), artifact.new_directory(tmp_path / "file"):
        raise AssertionError("the body must not run")


def test_what_onecard_did_not_make_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / artifact.MANIFEST).write_text("{")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "broken", "file"):
        for overwrite in (False, True):
            with (
                pytest.raises(ArtifactError, match="was not made by onecard") as caught,
                artifact.new_output(tmp_path / name, overwrite=overwrite, inputs=[]),
            ):
                raise AssertionError("the body must not run")
            assert caught.value.remedy == "Choose another --output."
    assert (tmp_path / "mine" / "text.txt").read_text() == "mine"
    assert names(tmp_path) == ["broken", "file", "mine"]


def test_what_onecard_made_is_replaced_where_the_user_says_so(tmp_path: Path) -> None:
    make(tmp_path / "d", "old")
    with (
        pytest.raises(ArtifactError, match="pass --overwrite"),
        artifact.new_output(tmp_path / "d", overwrite=False, inputs=[]),
    ):
        raise AssertionError("the body must not run")
    with artifact.new_output(tmp_path / "d", overwrite=True, inputs=[]) as temporary:
        (temporary / "new").write_text("new")
    assert names(tmp_path / "d") == ["new"]
    (tmp_path / "empty").mkdir()
    with artifact.new_output(tmp_path / "empty", overwrite=False, inputs=[tmp_path / "d"]) as temporary:
        (temporary / "new").write_text("new")
    assert names(tmp_path / "empty") == ["new"]


@pytest.mark.parametrize(
    ("output", "relation"),
    [("in", "is"), ("link", "is"), (".", "contains"), ("in/new", "lies inside"), ("link/new", "lies inside")],
)
def test_an_output_that_touches_an_input_is_refused(tmp_path: Path, output: str, relation: str) -> None:
    make(tmp_path / "here" / "in", "kept")
    artifact.write_manifest(tmp_path / "here", "run", settings={})
    (tmp_path / "here" / "link").symlink_to("in")
    inputs = [tmp_path / "other", tmp_path / "here" / "in"]
    with (
        pytest.raises(ArtifactError, match=f"{relation} the input {inputs[1]}"),
        artifact.new_output(tmp_path / "here" / output, overwrite=True, inputs=inputs),
    ):
        raise AssertionError("the body must not run")
    artifact.verify(tmp_path / "here" / "in")
    assert names(tmp_path / "here") == ["in", "link", artifact.MANIFEST]


def test_replace_keeps_the_old_one_when_the_work_fails(tmp_path: Path) -> None:
    make(tmp_path / "d", "old")
    with pytest.raises(RuntimeError), artifact.new_directory(tmp_path / "d", replace=True):
        raise RuntimeError
    assert (tmp_path / "d" / "inside" / "file.txt").read_text() == "old"
    assert names(tmp_path) == ["d"]


def test_replace_keeps_the_old_one_when_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "d", "old")
    rename = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".part") and Path(target).name == "d":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(ArtifactError):
        make(tmp_path / "d", "new")
    assert (tmp_path / "d" / "inside" / "file.txt").read_text() == "old"
    assert names(tmp_path) == ["d"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "d")
    make(tmp_path / "link", "one")
    make(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "d" / "inside" / "file.txt").read_text() == "two"


def killed_writer(target: Path) -> int:
    """Let a process begin to write `target`, and kill it in the middle; returns its number."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    child.wait()
    return child.pid


def test_a_killed_writer_leaves_no_half_directory_and_its_remains_go_at_the_next_write(tmp_path: Path) -> None:
    make(tmp_path / "d", "old")
    killed_writer(tmp_path / "d")
    assert (tmp_path / "d" / "inside" / "file.txt").read_text() == "old"
    artifact.verify(tmp_path / "d")
    assert len(names(tmp_path)) == 2
    make(tmp_path / "d", "new")
    assert names(tmp_path) == ["d"]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        make(tmp_path / "d", "mine")
        assert (tmp_path / "d" / "inside" / "file.txt").read_text() == "mine"
        assert sorted(name.rpartition(".")[2] for name in names(tmp_path)) == ["d", "part"]
    finally:
        child.kill()
        child.communicate()


def test_remains_of_other_names_and_other_machines_are_left_alone(tmp_path: Path) -> None:
    dead = killed_writer(tmp_path / "other")
    foreign = tmp_path / f".d.ffffff-{dead}-01234567.part"
    foreign.mkdir()
    before = set(names(tmp_path))
    make(tmp_path / "d")
    assert set(names(tmp_path)) == before | {"d"}


def test_a_kill_between_the_two_renames_puts_the_old_one_back(tmp_path: Path) -> None:
    dead = killed_writer(tmp_path / "other")
    make(tmp_path / "d", "old")
    machine = next(tmp_path.glob(".other.*")).name.split(".")[2].split("-")[0]
    (tmp_path / "d").rename(tmp_path / f".d.{machine}-{dead}-01234567.old")
    with pytest.raises(RuntimeError), artifact.new_directory(tmp_path / "d", replace=True):
        raise RuntimeError
    assert (tmp_path / "d" / "inside" / "file.txt").read_text() == "old"


def flip(path: Path) -> None:
    path.write_text("c0ntent", encoding="utf-8")


def truncate(path: Path) -> None:
    path.write_text("conten", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"), [(flip, "damaged"), (truncate, "damaged"), (Path.unlink, "missing")], ids=lambda x: str(x)[:12]
)
def test_verify_finds_damage(tmp_path: Path, damage: object, said: str) -> None:
    make(tmp_path / "d")
    damage(tmp_path / "d" / "inside" / "file.txt")  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=rf"file\.txt is {said}"):
        artifact.verify(tmp_path / "d")


def test_another_format_names_both_versions(tmp_path: Path) -> None:
    make(tmp_path / "d")
    path = tmp_path / "d" / artifact.MANIFEST
    raw = json.loads(path.read_text())
    raw["format"], raw["versions"]["onecard"] = 99, "9.8.7"
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError) as caught:
        artifact.read_manifest(tmp_path / "d")
    assert "format 99" in caught.value.what
    assert onecard.__version__ in caught.value.what
    assert "9.8.7" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', '{"format": "x"}', "null"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    make(tmp_path / "d")
    (tmp_path / "d" / artifact.MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match=r"onecard\.json is damaged"):
        artifact.read_manifest(tmp_path / "d")


def test_what_is_no_finished_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a directory"):
        artifact.read_manifest(tmp_path / "none")
    (tmp_path / "d").mkdir()
    with pytest.raises(ArtifactError, match=r"has no onecard\.json"):
        artifact.read_manifest(tmp_path / "d")
    make(tmp_path / "e")
    with pytest.raises(ArtifactError, match="holds a corpus, not a tokenizer"):
        artifact.read_manifest(tmp_path / "e", "tokenizer")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ArtifactError, match="disk is full"),
        artifact.new_directory(tmp_path / "d"),
        Path("/dev/full").open("w") as full,
    ):
        full.write("x")
    assert names(tmp_path) == []


def test_a_path_through_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ArtifactError, match="a part of its path is a file"),
        artifact.new_directory(tmp_path / "file" / "d"),
    ):
        raise AssertionError("the body must not run")


def test_an_unreadable_input_is_not_called_an_unwritable_output(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught, artifact.new_directory(tmp_path / "d"):
        raise PermissionError(13, "Permission denied", "/data/secret.txt")
    assert "/data/secret.txt" in caught.value.what


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    artifact.write_json_atomically(path, {"文": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"文": 1}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="disk is full"):
        artifact.write_json_atomically(path, {"文": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"文": 1}
    assert names(tmp_path) == ["f.json"]


def test_text_that_utf8_cannot_hold_is_written_all_the_same(tmp_path: Path) -> None:
    artifact.write_text_atomically(tmp_path / "f", "a\ud83db")
    assert (tmp_path / "f").read_text(encoding="utf-8") == "a?b"
    assert artifact.hash_json({"a": "\ud83d"})


def test_hashes_follow_the_content_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("same")
    (tmp_path / "b" / "report.html").write_text("for a person")
    os.utime(tmp_path / "b" / "file", (1, 1))
    assert artifact.hash_tree(tmp_path / "a") == artifact.hash_tree(tmp_path / "b")
    (tmp_path / "b" / "file").rename(tmp_path / "b" / "other")
    assert artifact.hash_tree(tmp_path / "a") != artifact.hash_tree(tmp_path / "b")
    assert artifact.hash_json({"a": 1, "b": 2}) == artifact.hash_json({"b": 2, "a": 1})


def test_times_of_a_manifest_are_utc(tmp_path: Path) -> None:
    make(tmp_path / "d")
    created = artifact.read_manifest(tmp_path / "d").created
    assert created.endswith("+00:00")
    assert created[:4] == str(time.gmtime().tm_year)
