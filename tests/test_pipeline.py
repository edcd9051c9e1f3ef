"""The walk over a recipe: what is skipped, made again, kept. Small stages, or stand-ins for the long ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact, console, pipeline
from onecard.config import ClassifyConfig, EvaluateConfig, FinetuneConfig, PretrainConfig, RunConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.pipeline import run

RECIPE = """
output = "out"
[clean]
sources = ["texts"]
near_duplicates = false
[tokenizer]
vocabulary_size = 300
"""

# Files of the run itself.
IN_MOTION = {"pipeline.json", ".lock"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "texts").mkdir(parents=True)
    (made / "texts" / "a.txt").write_text("A farmer kept twelve geese by the mill, and sold their feathers in spring.")
    (made / "texts" / "b.txt").write_text("Ships from the north brought salt, iron and stories that nobody believed.")
    (made / "recipe.toml").write_text(RECIPE)
    return made


def walk(folder: Path, *overrides: str) -> dict[str, Any]:
    return run(RunConfig(recipe=folder / "recipe.toml", set=list(overrides)))


def states(folder: Path, *overrides: str) -> list[str]:
    return list(walk(folder, *overrides)["states"].values())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_first_walk_does_all_and_the_second_nothing(folder: Path) -> None:
    first = walk(folder)
    assert first["states"] == {"clean": "done", "tokenizer": "done"}
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*") if path.name not in IN_MOTION}
    second = walk(folder)
    assert second["states"] == {"clean": "skipped", "tokenizer": "skipped"}
    assert second["stages"] == first["stages"]
    assert second["stages"]["clean"]["kept"] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert names(folder / "out") == ["corpus", "pipeline.json", "tokenizer"]


def test_a_changed_setting_makes_again_what_depends_on_it_and_keeps_the_old(folder: Path) -> None:
    walk(folder)
    old = artifact.read_manifest(folder / "out" / "tokenizer").content_hash
    assert states(folder, "tokenizer.vocabulary_size=310") == ["skipped", "done"]
    kept = folder / "out" / "previous" / "tokenizer-1"
    assert artifact.verify(kept).content_hash == old
    assert artifact.verify(folder / "out" / "tokenizer").settings["vocabulary_size"] == 310
    # And back: made anew, the second old one beside the first.
    assert states(folder) == ["skipped", "done"]
    assert artifact.read_manifest(folder / "out" / "tokenizer").content_hash == old
    assert names(folder / "out" / "previous") == ["tokenizer-1", "tokenizer-2"]


def test_of_what_changes_replaced_the_newest_two_are_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk(folder)
    hashes = []
    for size in (310, 320, 330):
        hashes.append(artifact.read_manifest(folder / "out" / "tokenizer").content_hash)
        states(folder, f"tokenizer.vocabulary_size={size}")
    previous = folder / "out" / "previous"
    assert names(previous) == ["tokenizer-2", "tokenizer-3"]
    assert [artifact.verify(previous / f"tokenizer-{n}").content_hash for n in (2, 3)] == hashes[1:]
    assert "removed" in capsys.readouterr().err
    # What somebody put there is not onecard's to remove, and numbers go on.
    (previous / "tokenizer-2").rename(previous / "keep")
    (previous / "tokenizer-1").mkdir()
    (previous / "tokenizer-1" / "notes.txt").write_text("mine")
    for size in (340, 350):
        states(folder, f"tokenizer.vocabulary_size={size}")
    assert names(previous) == ["keep", "tokenizer-1", "tokenizer-4", "tokenizer-5"]


def test_a_changed_stage_whose_result_is_the_same_leaves_the_next_alone(folder: Path) -> None:
    walk(folder)
    assert states(folder, "clean.minimum_characters=21") == ["done", "skipped"]


def test_time_stamps_mean_nothing_and_content_everything(folder: Path) -> None:
    walk(folder)
    os.utime(folder / "texts" / "a.txt", (1, 1))
    os.utime(folder / "out" / "corpus" / "documents-00000.parquet", (1, 1))
    assert states(folder) == ["skipped", "skipped"]
    with (folder / "texts" / "a.txt").open("a") as file:
        file.write("\none more line, that was not there before")
    assert states(folder) == ["done", "done"]
    (folder / "texts" / "c.txt").write_text("a new file, with a text of its own, is content too")
    assert states(folder) == ["done", "done"]


def test_the_content_of_a_file_that_a_setting_names_counts(folder: Path) -> None:
    reference = folder / "good.txt"
    reference.write_text("The mill stands by the river, and the geese know it well. " * 400)
    settings = (f"clean.reference={reference}", "clean.maximum_bits_per_byte=100")
    assert states(folder, *settings) == ["done", "done"]
    assert states(folder, *settings) == ["skipped", "skipped"]
    reference.write_text("Ships from the north are seldom seen here in winter. " * 500)
    assert states(folder, *settings) == ["done", "skipped"]


def test_a_moved_project_and_another_spelling_of_its_path_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(folder)
    moved = folder.with_name("moved")
    folder.rename(moved)
    assert states(moved) == ["skipped", "skipped"]
    monkeypatch.chdir(moved)
    assert list(run(RunConfig(recipe=Path("recipe.toml")))["states"].values()) == ["skipped", "skipped"]


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_damaged_stage_is_made_again(folder: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    walk(folder)
    file = folder / "out" / "corpus" / "documents-00000.parquet"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    elif damage == "remove":
        file.unlink()
    else:
        (folder / "out" / "corpus" / artifact.MANIFEST).write_text("{")
    capsys.readouterr()
    assert states(folder) == ["done", "skipped"]
    assert "damaged" in capsys.readouterr().err
    artifact.verify(folder / "out" / "corpus")


def test_a_stage_that_vanished_is_made_again(folder: Path) -> None:
    walk(folder)
    shutil.rmtree(folder / "out" / "corpus")
    assert states(folder) == ["done", "skipped"]


def test_a_stage_that_was_finished_just_before_a_kill_is_taken_over(folder: Path) -> None:
    walk(folder)
    path = folder / "out" / "pipeline.json"
    state = json.loads(path.read_text())
    del state["tokenizer"]["content_hash"]
    path.write_text(json.dumps(state))
    assert states(folder) == ["skipped", "skipped"]
    assert "content_hash" in json.loads(path.read_text())["tokenizer"]


def test_a_directory_of_unknown_origin_is_left_where_it_is(folder: Path) -> None:
    (folder / "out" / "corpus").mkdir(parents=True)
    (folder / "out" / "corpus" / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"corpus was not made by onecard\. Choose another output"):
        walk(folder)
    assert (folder / "out" / "corpus" / "mine.txt").read_text() == "mine"
    assert not (folder / "out" / "previous").exists()


@pytest.mark.parametrize("found", ["plan.json", "tokens", None])
def test_an_unfinished_or_empty_directory_of_a_stage_is_moved_aside(folder: Path, found: str | None) -> None:
    (folder / "out" / "corpus").mkdir(parents=True)
    if found is not None:
        (folder / "out" / "corpus" / found).write_text("{}")
    assert states(folder) == ["done", "done"]
    assert names(folder / "out" / "previous" / "corpus-1") == ([] if found is None else [found])


@pytest.mark.parametrize("text", ["{", "[]", '{"clean": 3}'])
def test_a_damaged_state_is_named(folder: Path, text: str) -> None:
    walk(folder)
    (folder / "out" / "pipeline.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"pipeline\.json is damaged"):
        walk(folder)


def test_an_error_keeps_the_finished_stages(folder: Path) -> None:
    with pytest.raises(ConfigError):
        walk(folder, "tokenizer.vocabulary_size=10")
    assert not (folder / "out").exists()  # found before the first stage
    (folder / "recipe.toml").write_text(RECIPE.replace("300", "300\ncorpus = 'texts'"))
    with pytest.raises(ArtifactError):
        walk(folder)
    (folder / "recipe.toml").write_text(RECIPE)
    assert states(folder) == ["skipped", "done"]


def test_a_second_run_at_the_same_time_is_refused(folder: Path) -> None:
    (folder / "out").mkdir()
    code = (
        "import fcntl, sys, time\nlock = open(sys.argv[1], 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
        "sys.stdout.write('locked\\n'); sys.stdout.flush(); time.sleep(60)"
    )
    lock = str(folder / "out" / ".lock")
    other = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ArtifactError, match="Another `onecard run`"):
            walk(folder)
    finally:
        other.kill()
        other.communicate()
    assert states(folder) == ["done", "done"]


def test_what_a_run_decides_is_not_a_setting_of_a_stage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "recipe.toml").write_text(RECIPE + 'overwrite = true\noutput = "elsewhere"\n')
    assert states(folder, "clean.dry_run=5") == ["done", "done"]
    assert states(folder, "clean.workers=1") == ["skipped", "skipped"]
    err = capsys.readouterr().err
    assert "overwrite in [tokenizer] is not honoured" in err
    assert "output in [tokenizer] is not honoured" in err
    assert "dry_run in [clean] is not honoured" in err
    assert not (folder / "elsewhere").exists()


def test_where_a_run_writes(folder: Path, tmp_path: Path) -> None:
    assert run(RunConfig(recipe=folder / "recipe.toml", output=tmp_path / "x"))["output"] == str(tmp_path / "x")
    (folder / "recipe.toml").write_text(RECIPE.replace('output = "out"', ""))
    assert walk(folder)["output"] == str(folder / "runs" / "recipe")


def test_the_end_shows_a_table_and_two_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk(folder)
    out = capsys.readouterr().out
    assert "Talk to it" not in out  # there is no model
    assert [line.split()[:2] for line in out.splitlines() if line.lstrip().startswith(("clean ", "tokenizer "))] == [
        ["clean", "done"],
        ["tokenizer", "done"],
    ]


# --- stand-ins for the long stages --------------------------------------------------------------------------------

LONG = """
output = "out"
[clean]
sources = ["texts"]
[tokenizer]
vocabulary_size = 300
[pretrain]
size = "2M"
[finetune]
sources = ["chats"]
[evaluate]
[ask]
questions = ["who?"]
"""


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The long recipe with stand-ins; returns the configuration that each stage was given last."""
    (folder / "recipe.toml").write_text(LONG)
    (folder / "chats").mkdir()
    (folder / "chats" / ".gitkeep").write_text("")
    given: dict[str, Any] = {}

    def stand_in(name: str) -> Any:
        def verb(config: Any) -> dict[str, Any]:
            given[name] = config
            with artifact.new_directory(config.output) as temporary:
                (temporary / "model").mkdir()
                (temporary / "model" / "weights").write_text(artifact.hash_json(config.without_places()))
                artifact.write_manifest(temporary, "run", settings=config.plain(), result={"made": name})
            return {}

        return verb

    monkeypatch.setattr("onecard.train.pretrain.pretrain", stand_in("pretrain"))
    monkeypatch.setattr("onecard.train.finetune.finetune", stand_in("finetune"))
    monkeypatch.setattr("onecard.evaluate.evaluate.evaluate", stand_in("evaluate"))

    def ask(self: Any, config: Any, directory: Path) -> list[dict[str, Any]]:
        given["ask"] = directory
        return [{"question": "who?", "text": "me", "finish_reason": "stop"}]

    monkeypatch.setattr("onecard.pipeline._Walk._ask", ask)
    return given


def test_classes_are_the_sources_of_the_text_and_held_out_is_what_was_held_out(
    folder: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onecard.data.labelled import read_labelled

    given: list[ClassifyConfig] = []

    def stand_in(config: ClassifyConfig) -> dict[str, Any]:
        given.append(config)
        with artifact.new_directory(config.output) as temporary:
            (temporary / "weights").write_text("")
            artifact.write_manifest(temporary, "run", settings={}, result={})
        return {}

    monkeypatch.setattr("onecard.train.classify.classify", stand_in)
    for name in ("good", "bad"):
        rows = "".join(f'{{"text": "This is the {name} text of the number {n}."}}\n' for n in range(20))
        (folder / f"{name}.jsonl").write_text(rows)
    sources = '[{ name = "good", path = "good.jsonl" }, { name = "bad", path = "bad.jsonl" }]'
    (folder / "recipe.toml").write_text(
        f'output = "out"\n[clean]\nsources = {sources}\nheld_out = 0.2\nnear_duplicates = false\n[tokenizer]\n'
        "vocabulary_size = 300\n[pretrain]\nsize = '2M'\n[classify]\n"
    )
    assert states(folder) == ["done"] * 4
    (config,) = given
    assert config.model == folder / "out" / "pretrain"
    found = list(
        read_labelled(
            config.sources,
            label_field=config.label_field,
            several=False,
            strict=True,
            reject=lambda rejection: None,
            split_field=config.split_field,
        )
    )
    assert {row.labels for row in found} == {("good",), ("bad",)}
    assert all(row.labels[0] in row.text for row in found)
    assert (len(found), sum(bool(row.held_out) for row in found)) == (40, 8)


def test_each_stage_takes_what_the_one_before_made(folder: Path, asked: dict[str, Any]) -> None:
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    out = folder / "out"
    assert states(folder) == ["done"] * 6
    pretrain: PretrainConfig = asked["pretrain"]
    finetune: FinetuneConfig = asked["finetune"]
    evaluate: EvaluateConfig = asked["evaluate"]
    assert (pretrain.corpus, pretrain.tokenizer) == (out / "corpus", out / "tokenizer")
    assert finetune.model == out / "pretrain"
    assert (evaluate.model, evaluate.base, evaluate.corpus) == (out / "finetune", out / "pretrain", out / "corpus")
    assert [source.path for source in evaluate.questions] == [str(folder / "chats")]
    assert asked["ask"] == out / "finetune"
    asked.clear()
    assert states(folder) == ["skipped"] * 6
    assert asked == {}


def test_rows_too_long_for_the_model_to_come_are_found_before_it_is_made(folder: Path, asked: dict[str, Any]) -> None:
    overrides = ["pretrain.max_length=256", "finetune.max_length=300"]
    assert states(folder, *overrides)[3] == "left out"  # without chats there are no rows
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    asked.clear()
    shutil.rmtree(folder / "out")
    with pytest.raises(ConfigError, match=r"max_length 300 in \[finetune\] is more than the 256 of \[pretrain\]"):
        walk(folder, *overrides)
    assert asked == {}
    assert not (folder / "out").exists()
    assert states(folder, "pretrain.max_length=300", overrides[1]) == ["done"] * 6
    # Another model has a length of its own (this one's content is that of before).
    shutil.copytree(folder / "out" / "pretrain", folder / "other")
    assert states(folder, *overrides, f"finetune.model={folder / 'other'}")[3] == "skipped"


def test_only_what_depends_on_a_change_is_made_again(folder: Path, asked: dict[str, Any]) -> None:
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    walk(folder)
    assert states(folder, "finetune.seed=1") == ["skipped", "skipped", "skipped", "done", "done", "done"]
    assert states(folder, "finetune.seed=1", "evaluate.seed=1")[3:] == ["skipped", "done", "skipped"]
    # What decides nothing about a result makes nothing again.
    assert states(folder, "finetune.seed=1", "evaluate.seed=1", "pretrain.log_every=7") == ["skipped"] * 6


def test_a_run_that_was_trained_longer_since_is_taken_as_it_is(folder: Path, asked: dict[str, Any]) -> None:
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    walk(folder)
    run_directory = folder / "out" / "pretrain"

    def made_again(fingerprint: str, weights: str) -> None:
        (run_directory / "model" / "weights").write_text(weights)
        artifact.write_manifest(run_directory, "run", settings={}, fingerprint=fingerprint)

    made_again(artifact.read_manifest(run_directory).fingerprint, "trained longer")
    # The stand-in for fine-tuning makes the same model of any other, so that it need not be asked again.
    assert states(folder) == ["skipped", "skipped", "skipped", "done", "done", "skipped"]
    assert (run_directory / "model" / "weights").read_text() == "trained longer"
    made_again("another run", "other weights")
    assert states(folder)[2] == "done"
    assert (folder / "out" / "previous" / "pretrain-1" / "model" / "weights").read_text() == "other weights"


def test_without_chats_fine_tuning_is_left_out_and_the_rest_goes_on(
    folder: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This folder's text is too little to hold any out: then evaluate has nothing to measure, and asking goes on.
    assert list(walk(folder)["states"].values()) == ["done", "done", "done", "left out", "left out", "done"]
    assert "evaluate is left out" in capsys.readouterr().err
    monkeypatch.setattr(pipeline, "_nothing_held_out", lambda corpus: False)
    found = walk(folder)
    assert list(found["states"].values()) == ["skipped", "skipped", "skipped", "left out", "done", "skipped"]
    out = capsys.readouterr()
    assert "warning: No chats in " in out.err
    assert "finetune is left out" in out.err
    evaluate: EvaluateConfig = asked["evaluate"]
    assert (evaluate.model, evaluate.base, evaluate.questions) == (folder / "out" / "pretrain", None, [])
    assert asked["ask"] == folder / "out" / "pretrain"
    assert f"onecard chat {console.short_path(folder / 'out' / 'pretrain')}" in out.out
    assert list(walk(folder)["states"].values())[4:] == ["skipped", "skipped"]
    # With chats, everything after them is made again.
    (folder / "chats" / "c.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert states(folder) == ["skipped", "skipped", "skipped", "done", "done", "done"]


def test_the_commands_at_the_end_can_be_pasted(
    folder: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = folder.with_name("a b")
    folder.rename(moved)
    monkeypatch.chdir(moved.parent)
    run(RunConfig(recipe=Path("a b/recipe.toml")))
    out = capsys.readouterr().out
    assert "Talk to it:  onecard chat 'a b/out/pretrain'\n" in out
    assert "Serve it:    onecard serve 'a b/out/pretrain'\n" in out
