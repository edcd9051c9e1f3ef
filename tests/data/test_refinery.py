"""The way from sources to shards: the same on any number of workers, and after a kill; files large, broken and rare."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.config import CleanConfig
from onecard.data import contamination, refinery, shards, steps
from onecard.data.clean import clean
from onecard.data.corpus import read_documents
from onecard.data.workers import Workers
from onecard.errors import ArtifactError, DataError
from onecard.settings import Source

SENTENCES = [
    "话说天下大势，分久必合，合久必分。", "周末七国分争，并入于秦。", "及秦灭之后，楚汉分争，又并入于汉。",
    "汉朝自高祖斩白蛇而起义，一统天下。", "后来光武中兴，传至献帝，遂分为三国。", "推其致乱之由，殆始于桓、灵二帝。",
    "桓帝禁锢善类，崇信宦官。", "及桓帝崩，灵帝即位，大将军窦武、太傅陈蕃共相辅佐。",
]  # fmt: skip


def text(draw: random.Random, sentences: int = 6) -> str:
    return "".join(draw.choice(SENTENCES).replace("。", f"{draw.randrange(10**6)}。") for _ in range(sentences))


def write_rows(path: Path, texts: list[str]) -> Path:
    lines = (json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def many(folder: Path, files: int = 6, rows: int = 40, seed: int = 0) -> Path:
    draw = random.Random(seed)
    folder.mkdir()
    earlier: list[str] = []
    for number in range(files):
        texts = []
        for _ in range(rows):
            kind = draw.random()
            made = text(draw) if kind < 0.7 or not earlier else draw.choice(earlier)
            texts.append(made + ("改" if kind > 0.85 else ""))
        earlier += texts
        write_rows(folder / f"{number}.jsonl", [*texts, "短"])
    (folder / "bad.jsonl").write_text('{"text": "cut o', encoding="utf-8")
    return folder


def run(source: Path, output: Path, **settings: Any) -> dict[str, Any]:
    return clean(CleanConfig(sources=[Source(path=str(source))], output=output, **settings))


def content(output: Path) -> dict[str, bytes]:
    names = [path for path in sorted(output.iterdir()) if path.suffix in (".parquet", ".jsonl", ".json")]
    return {path.name: path.read_bytes() for path in names if path.name != artifact.MANIFEST}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinery, "BATCH_CHARACTERS", 4000)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("settings", [{}, {"keep": "longest", "repeated_paragraphs": True}])
def test_the_same_to_the_byte_with_any_number_of_workers(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = many(tmp_path / "texts")
    one = run(source, tmp_path / "one", workers=1, **settings)
    run(source, tmp_path / "three", workers=3, **settings)
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert one["rejected"]["near_duplicate"] > 10
    assert one["rejected"]["exact_duplicate"] > 10
    assert one["read"] == 6 * 41 + 1 == one["kept"] + sum(one["rejected"].values())
    # Rejections stand in the order of reading.
    lines = (tmp_path / "one/rejected-00000.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    places = [(row["file"], row["line"]) for row in map(json.loads, lines)]
    assert places == sorted(places)
    assert len(places) == sum(one["rejected"].values())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


KILLED = """
import os, sys
from onecard.data import refinery, shards
from onecard.data.clean import clean
from onecard.config import CleanConfig
refinery.BATCH_CHARACTERS = 4000
step, after = sys.argv[3], int(sys.argv[4])
done = 0
def dying(function):
    def call(*arguments, **named):
        global done
        made = function(*arguments, **named)
        done += 1
        if done == after:
            os.kill(os.getpid(), 9)
        return made
    return call
if step == "tidy":
    refinery.tidy = dying(refinery.tidy)
elif step == "manifest":
    from onecard import artifact
    artifact.write_manifest = dying(artifact.write_manifest)
else:
    from onecard.data import publish
    publish.write_part = dying(publish.write_part)
clean(CleanConfig(sources=[sys.argv[1]], output=sys.argv[2], workers=1))
"""


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(("step", "after"), [("tidy", 1), ("tidy", 7), ("publish", 1), ("manifest", 1)])
def test_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str, after: int
) -> None:
    source = many(tmp_path / "texts")
    run(source, tmp_path / "whole", workers=1)
    output = tmp_path / "killed"
    dead = subprocess.run([sys.executable, "-c", KILLED, str(source), str(output), step, str(after)], check=False)
    assert dead.returncode == -signal.SIGKILL
    assert not output.exists()
    made: list[int] = []

    def counted(folder: Path, settings: bytes, batch: shards.Batch) -> dict[str, Any]:
        made.append(batch.number)
        return shards.tidy(folder, settings, batch)

    monkeypatch.setattr(refinery, "tidy", counted)
    total = len(list(tmp_path.glob(".killed.*.clean/*.npz")))
    run(source, output, workers=1)
    assert content(output) == content(tmp_path / "whole")
    assert made == ([] if step in ("publish", "manifest") else list(range(after, after + len(made))))
    assert total == (after if step == "tidy" else total)
    if after == 7:
        assert "Going on after" in capsys.readouterr().err
    assert not list(tmp_path.glob(".killed.*"))


@pytest.mark.usefixtures("small_batches")
def test_a_changed_input_begins_anew(tmp_path: Path) -> None:
    source = many(tmp_path / "texts")
    output = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(output), "tidy", "5"], check=False)
    assert len(list(tmp_path.glob(".out.*.clean"))) == 1
    write_rows(source / "0.jsonl", [text(random.Random(99))])
    answer = run(source, output, workers=1)
    assert answer["read"] == 5 * 41 + 1 + 1
    assert not list(tmp_path.glob(".out.*"))


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom onecard.data.workers import Workers\nimport os\n"
        "with Workers(2) as workers:\n"
        "    print(list(workers.map(os.getpid, [(), (), (), ()])), flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = {int(word) for word in parent.stdout.readline().strip("[]\n").split(", ")}
    assert len(children) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not any(_is_running(child) for child in children):
            return
        time.sleep(0.1)
    raise AssertionError("a worker lives on")


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_faults_of_workers_are_raised_in_order() -> None:
    with Workers(2) as workers:
        answers = workers.map(int, [("1",), ("x",), ("3",)])
        assert next(answers) == 1
        with pytest.raises(ValueError, match="invalid literal"):
            next(answers)


def test_what_a_user_can_mend_comes_whole_from_a_worker(tmp_path: Path) -> None:
    reference = tmp_path / "reference.txt"
    reference.write_text("太短", encoding="utf-8")
    settings = CleanConfig(sources=[Source(path="x")], reference=reference)
    with Workers(2) as workers, pytest.raises(DataError) as fault:
        list(workers.map(steps.Steps, [(settings,)]))
    with pytest.raises(DataError) as same:
        steps.Steps(settings)
    assert vars(fault.value) | {"__notes__": 0} == vars(same.value) | {"__notes__": 0}
    assert str(fault.value) == str(same.value)


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    with refinery.working_folder(tmp_path / "out", "0" * 16) as folder:
        assert folder.is_dir()
        with (
            pytest.raises(ArtifactError, match="Another `onecard clean`"),
            refinery.working_folder(tmp_path / "out", "0" * 16),
        ):
            pass
        with refinery.working_folder(tmp_path / "out", "1" * 16):
            assert folder.is_dir()
    assert not list(tmp_path.iterdir())


# --- decontamination ----------------------------------------------------------------------------------------------


def test_documents_with_text_of_evaluation_files_go(tmp_path: Path) -> None:
    draw = random.Random(5)
    letters = "".join(chr(0x4E00 + at) for at in range(200))
    words = [f"word{at}" for at in range(60)]
    test = write_rows(tmp_path / "test.jsonl", [letters[:60], " ".join(words[:20]), "小而完整的一句话啊！", "短"])
    rows = [
        text(draw) + letters[10:40] + text(draw),  # 0: 30 characters of the first
        text(draw) + letters[10:39] + text(draw),  # 1: 29
        text(draw) + "，".join(letters[20:50]) + text(draw),  # 2: the 30 with marks between
        "some other text " * 2 + "Word3, " + " ".join(words[4:16]) + " and so on",  # 3: 13 words
        "another text here " * 2 + " ".join(words[4:16]) + " and so on again",  # 4: 12 words
        "小而完整的一句话啊",  # 5: the whole of a short one
        "这里有小而完整的一句话啊，还有别的内容在后面。",  # 6: a part of a longer one
        "短短短短长长长长短短短",  # 7
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    answer = run(
        source, tmp_path / "out", minimum_characters=1, maximum_repetition=1, decontaminate=[Source(path=str(test))]
    )
    kept = {int(item.id.rpartition(":")[2]) - 1 for item in read_documents(tmp_path / "out")}
    assert kept == {1, 4, 6, 7}
    assert answer["rejected"] == {"contaminated": 4}
    lines = (tmp_path / "out/rejected-00000.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["detail"] for line in lines] == [
        "test.jsonl:1", "test.jsonl:1", "test.jsonl:2", "test.jsonl:3",
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13, 30, 31])
def test_window_hashes_are_of_the_window_alone(length: int) -> None:
    import numpy as np

    draw = random.Random(length)
    values = np.array([draw.randrange(50) for _ in range(200)], dtype=np.uint64)
    whole = contamination._windows(values, length)
    assert len(whole) == 200 - length + 1
    for start in (0, 17, 200 - length):
        assert contamination._windows(values[start : start + length], length)[0] == whole[start]
    windows = {tuple(values[at : at + length].tolist()) for at in range(len(whole))}
    assert len(np.unique(whole)) == len(windows)


# --- paragraphs ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_batches")
def test_repeated_paragraphs_go_and_their_first_stays(tmp_path: Path) -> None:
    draw = random.Random(3)
    notice = "本站所有内容均由用户自行上传分享仅供网友学习交流之用，转载请一定注明。"
    own = [text(draw) for _ in range(4)]
    rows = [
        f"{own[0]}\n{notice}",  # 1: the first that has it
        f"{notice}\n{own[1]}",  # 2
        f"{own[2]}\n短句\n{notice}\n短句",  # 3: short lines stay
        notice,  # 4: nothing is left
        f"{notice}\n{own[1]}",  # 5: a copy of 2 stays one
        f"{own[3]}\n{own[3]}",  # 6: its own repetition is not this step's
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    answer = run(source, tmp_path / "out", repeated_paragraphs=True, maximum_repetition=1)
    assert answer["rejected"] == {"exact_duplicate": 1, "repeated_paragraphs": 1}
    assert [item.text for item in read_documents(tmp_path / "out")] == [
        rows[0], own[1], f"{own[2]}\n短句\n短句", rows[5],
    ]  # fmt: skip
    lines = (tmp_path / "out/rejected-00000.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [(row["line"], row["reason"]) for row in map(json.loads, lines)] == [
        (4, "repeated_paragraphs"), (5, "exact_duplicate"),
    ]  # fmt: skip


# --- size ---------------------------------------------------------------------------------------------------------

MEASURED = """
import resource, sys
from onecard import console
from onecard.config import CleanConfig
from onecard.data.clean import clean
console.configure(json_output=True, quiet=True)
answer = clean(CleanConfig(sources=[sys.argv[1]], output=sys.argv[2], workers=1, near_duplicates=False))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, answer["kept"], answer["characters"])
"""


def test_one_line_of_many_megabytes_in_bounded_memory(tmp_path: Path) -> None:
    draw = random.Random(0)
    sentences = 1_200_000
    with (tmp_path / "one.txt").open("w", encoding="utf-8") as file:
        for _ in range(sentences):
            file.write(f"第{draw.randrange(10**9)}句话是真的。")
    size = (tmp_path / "one.txt").stat().st_size
    assert size > 30_000_000
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "one.txt"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peak_mib, kept, characters = map(int, done.stdout.split())
    assert kept > 15
    assert peak_mib < 800  # of which the programs are 200; how much of it the C library gives back varies
    texts = [item.text for item in read_documents(tmp_path / "out")]
    assert characters == sum(map(len, texts))
    assert all(len(one) <= 1_000_000 and one.endswith("。") for one in texts)
    assert "".join(texts) == (tmp_path / "one.txt").read_text(encoding="utf-8")


def test_a_corpus_that_ends_empty_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ["短", "短短"])
    with pytest.raises(DataError, match="too_short took 2 of 2"):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
