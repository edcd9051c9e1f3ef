"""From raw text to an answer over HTTP, as a user does it: on a path with spaces, offline, in the C locale, and killed.

The runs are real and tiny: 2M parameters, six updates. Settings that measure the machine are fixed, so that two runs
are equal to the bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact, cli
from onecard.project import recipe_text

ZH = "话说天下大势分久必合合久必分周末七国分争并入于秦及秦灭之后楚汉分争又并入于汉汉朝自高祖斩白蛇而起义一统天下"
EN = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "river",
    "mountain",
    "stone",
    "king",
    "said",
    "unto",
    "them",
    "people",
    "house",
    "light",
]
# A module that Python imports at its start: connections to other machines fail, and are noted.
OFFLINE = """
import os, socket
_connect, _resolve = socket.socket.connect, socket.getaddrinfo
def _refuse(what):
    with open(os.environ["CONNECTIONS"], "a") as file:
        file.write(f"{what}\\n")
    raise OSError(f"a connection to {what} was tried")
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
        _refuse(address)
    return _connect(self, address)
def getaddrinfo(host, *arguments, **named):
    if host not in (None, "127.0.0.1", "::1", "localhost"):
        _refuse(host)
    return _resolve(host, *arguments, **named)
socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
"""
SETTINGS = {
    "tokenizer": {"vocabulary_size": 400},
    "pretrain": {"size": "2M"},
    "finetune": {},
    "evaluate": {"question_count": 2, "max_new_tokens": 6},
    "ask": {"max_new_tokens": 8},
}
TRAINING = {
    "time_limit_minutes": "none", "max_steps": 6, "max_length": 64, "batch_size": 2, "gradient_accumulation_steps": 2,
    "precision": "fp32", "compile": False, "save_every": 2, "evaluate_every": 3,
}  # fmt: skip


def write_texts(project: Path) -> None:
    """A GBK file of Chinese lines and a JSONL file of English rows, both read-only."""
    source = random.Random(1)
    lines = ["".join(source.choices(ZH, k=120)) + "。" for _ in range(60)]
    (project / "data" / "text" / "小说.txt").write_bytes("\n".join(lines).encode("gbk"))
    rows = [json.dumps({"text": " ".join(source.choices(EN, k=60))}) for _ in range(60)]
    (project / "data" / "text" / "rows.jsonl").write_text("\n".join(rows))
    for path in (project / "data" / "text").iterdir():
        path.chmod(0o444)
    (project / "data" / "text").chmod(0o555)


def write_chats(project: Path) -> None:
    source = random.Random(2)
    chats = [{"question": f"{source.choice(EN)} {n}?", "answer": "好。"} for n in range(40)]
    text = "\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats)
    (project / "data" / "chats" / "chats.jsonl").write_text(text, encoding="utf-8")


def cut_down(project: Path) -> None:
    """Make the settings of the project's recipe tiny, by editing it as a person would."""
    text = recipe_text()
    for stage, settings in SETTINGS.items():
        start = text.index(f"[{stage}]")
        for name, value in {**settings, **(TRAINING if stage in ("pretrain", "finetune") else {})}.items():
            line = f"{name} = {json.dumps(value)}"
            head, tail = text[:start], text[start:]
            changed = re.sub(rf"(?m)^#?{name} = .*$", line, tail, count=1)
            text = head + (changed if changed != tail else tail.rstrip() + f"\n{line}\n")
    (project / "recipe.toml").write_text(text, encoding="utf-8")


def run_as_a_user(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`onecard run` in a process of its own that cannot leave this machine."""
    offline = project.parent / "offline"
    offline.mkdir(exist_ok=True)
    (offline / "sitecustomize.py").write_text(OFFLINE)
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONPATH": str(offline),
        "CONNECTIONS": str(project.parent / "connections.txt"),
    }
    for name in ("HF_HUB_OFFLINE", "PYTHONUTF8"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "onecard.cli", "run", "recipe.toml", *words],
        cwd=project, env=environment, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip


def weights(project: Path) -> dict[str, str]:
    """The hash of each file of weights of the models that a run made."""
    return {
        str(path.relative_to(project)): artifact.hash_file(path)
        for stage in ("pretrain", "finetune")
        for path in sorted((project / "run" / stage / "model").glob("*.safetensors"))
    }


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A project on a difficult path, walked once."""
    project = tmp_path_factory.mktemp("whole-way") / "数据 集" / "模型　一"
    assert cli.main(["new", str(project)]) == 0
    write_texts(project)
    write_chats(project)
    cut_down(project)
    return project, run_as_a_user(project)


Walked = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_from_raw_text_to_an_answer(walked: Walked) -> None:
    project, done = walked
    assert done.returncode == 0, done.stderr
    assert "Q: 你好" in done.stdout
    assert re.search(r"A: .*\[(stop|length)\]", done.stdout, re.DOTALL)
    assert "onecard chat run/finetune" in done.stdout
    assert "Traceback" not in done.stderr
    for name in ("corpus", "tokenizer", "pretrain", "finetune", "evaluation"):
        artifact.verify(project / "run" / name)
        assert (project / "run" / name / "report.html").exists()
    # The GBK file was read as Chinese.
    kept = artifact.read_manifest(project / "run" / "corpus").result
    assert (kept["kept"], sum(kept["rejected"].values())) == (kept["read"], 0)
    assert len(weights(project)) == 2


@pytest.mark.slow
def test_nothing_outside_this_machine_was_called(walked: Walked) -> None:
    project, done = walked
    assert done.returncode == 0
    assert not (project.parent / "connections.txt").exists()


def test_the_guard_against_connections_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    code = "import urllib.request\nurllib.request.urlopen('http://onecard.invalid')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CONNECTIONS": str(tmp_path / "connections.txt")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    assert (tmp_path / "connections.txt").read_text() == "onecard.invalid\n"


@pytest.mark.slow
def test_nothing_was_written_outside_the_output_folder(walked: Walked) -> None:
    project, _ = walked
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "data", "recipe.toml", "run"]
    assert sorted(path.name for path in (project / "data" / "text").iterdir()) == ["rows.jsonl", "小说.txt"]
    remains = [path for path in project.rglob(".*") if path.name.endswith((".part", ".old"))]
    assert remains == []


@pytest.mark.slow
def test_the_second_run_skips_all_and_gives_the_same_answer(walked: Walked) -> None:
    project, _ = walked
    done = run_as_a_user(project, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["states"].values()) == {"skipped"}
    assert document["stages"]["ask"][0]["question"] == "你好"
    assert document["seconds"] < 10


def copy_of(project: Path, target: Path) -> Path:
    shutil.copytree(project, target)
    (target / "data" / "text").chmod(0o755)
    return target


@pytest.mark.slow
def test_one_changed_setting(walked: Walked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = copy_of(walked[0], tmp_path / "copy")
    capsys.readouterr()
    assert cli.main(["run", str(project / "recipe.toml"), "--json", "--set", "evaluate.question_count=1"]) == 0
    states = json.loads(capsys.readouterr().out)["states"]
    assert [name for name, state in states.items() if state == "done"] == ["evaluate"]
    assert artifact.read_manifest(project / "run" / "previous" / "evaluation-1").settings["question_count"] == 2


@pytest.mark.slow
def test_without_chats_the_model_still_is_measured_and_asked(
    walked: Walked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copy_of(walked[0], tmp_path / "copy")
    (project / "data" / "chats" / "chats.jsonl").unlink()
    shutil.rmtree(project / "run" / "finetune")
    capsys.readouterr()
    assert cli.main(["run", str(project / "recipe.toml"), "--json"]) == 0
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert list(document["states"].values()) == ["skipped", "skipped", "skipped", "left out", "done", "done"]
    assert "finetune is left out" in out.err
    assert document["stages"]["ask"][0]["text"]


# --- kills --------------------------------------------------------------------------------------------------------

# What is written last in each stage: there the process is killed, at the given time that it is written.
KILLS = [
    ("corpus", 1), ("tokenizer", 1), ("checkpoint", 2), ("model", 1), ("run", 1), ("checkpoint", 1), ("run", 1),
    ("evaluation", 1), ("answer", 1),
]  # fmt: skip

# Imported once by the server that the killed processes are forked from.
PRELOAD = [
    "torch._dynamo", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils", "pyarrow.parquet", "matplotlib.figure", "fastapi", "openai", "uvicorn",
    "onecard.data.clean", "onecard.tokenizer.train", "onecard.train.pretrain", "onecard.train.finetune",
    "onecard.evaluate.evaluate", "onecard.serve.server",
]  # fmt: skip


def run_until(recipe: str, log: str, kind: str, count: int) -> None:
    """Walk the recipe in this process, and kill it when a thing of this kind is about to be finished."""
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    left = [count]

    def strike(found: str) -> None:
        left[0] -= found == kind
        if found == kind and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    write = artifact.write_manifest

    def write_manifest(directory: Path, found: str, **named: Any) -> artifact.Manifest:
        strike(found)
        return write(directory, found, **named)

    artifact.write_manifest = write_manifest
    from onecard.serve import client

    ask = client.ask

    def counted(*arguments: Any) -> client.Answer:
        answer = ask(*arguments)
        strike("answer")
        return answer

    client.ask = counted
    sys.exit(cli.main(["run", recipe]))


@pytest.mark.slow
def test_kills_in_every_stage_change_nothing(walked: Walked, tmp_path: Path) -> None:
    project = tmp_path / "killed"
    project.mkdir()
    shutil.copytree(walked[0] / "data", project / "data")
    shutil.copy(walked[0] / "recipe.toml", project)
    log = tmp_path / "log.txt"
    # Forked from one process that has imported the libraries: nine starts take no longer than one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, __name__])
    for kind, count in KILLS:
        child = context.Process(target=run_until, args=(str(project / "recipe.toml"), str(log), kind, count))
        child.start()
        child.join(timeout=120)
        assert child.exitcode == -signal.SIGKILL, f"{kind}: {child.exitcode}\n{log.read_text(encoding='utf-8')}"
        # Whatever stands under its final name is whole.
        for path in (project / "run").glob("*/" + artifact.MANIFEST):
            artifact.verify(path.parent)
    child = context.Process(target=run_until, args=(str(project / "recipe.toml"), str(log), "nothing", 1))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == 0, log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert "resuming after update 2 of 6" in text
    assert weights(project) == weights(walked[0])
    assert [path for path in project.rglob(".*") if path.name.endswith((".part", ".old"))] == []
    assert not (project / "run" / "previous").exists()
