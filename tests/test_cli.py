"""The command line from outside: exit statuses, two-line errors, one JSON document; and a table of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact, cli
from onecard.data.corpus import Document, write_corpus
from onecard.errors import Interrupted, MachineError, OnecardError

Capture = pytest.CaptureFixture[str]


def everything(folder: Path) -> dict[str, int]:
    """Every path below, hidden ones too, with its size."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*"))}


def refused(capsys: Capture, words: list[str]) -> tuple[str, str]:
    """Run a verb that must be refused; returns what is wrong and what to do, one line each and nothing else."""
    capsys.readouterr()
    assert cli.main([*words, "--quiet"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    lines = [line for line in out.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 2, out.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  fix: ")
    assert len(lines[1]) > len("  fix: ") + 3
    return lines[0], lines[1]


# --- what every verb does -----------------------------------------------------------------------------------------


def with_verb(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]) -> None:
    """Put `function` behind `onecard new DIR`."""
    monkeypatch.setattr("onecard.project.new", function)


def raising(fault: BaseException) -> Callable[[Any], Any]:
    def verb(config: Any) -> Any:
        raise fault

    return verb


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (OnecardError("what.", "remedy."), 2, "error: what.\n  fix: remedy.\n"),
        (MachineError("what.", "remedy."), 3, "error: what.\n  fix: remedy.\n"),
        (Interrupted("what.", "remedy."), 130, "error: what.\n  fix: remedy.\n"),
        (KeyboardInterrupt(), 130, "error: Interrupted."),
        (OSError(28, "No space left on device"), 2, "error: The disk is full"),
        (PermissionError(13, "Permission denied", "/secret"), 2, "error: /secret cannot be used (Permission denied)."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, fault: BaseException, status: int, said: str
) -> None:
    with_verb(monkeypatch, raising(fault))
    assert cli.main(["new", "x"]) == status
    out = capsys.readouterr()
    assert said in out.err
    assert "Traceback" not in out.err
    assert out.out == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with_verb(monkeypatch, raising(OnecardError("what.", "remedy.")))
    assert cli.main(["new", "x", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "test_cli.py" in err
    assert "error: what." in err


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), FileNotFoundError(2, "No such file", "x")])
def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    with_verb(monkeypatch, raising(fault))
    with pytest.raises(type(fault)):
        cli.main(["new", "x"])


def test_json_is_one_document_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["new", str(tmp_path / "p"), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == {"directory": str(tmp_path / "p"), "recipe": str(tmp_path / "p" / "recipe.toml")}


def test_json_prints_nothing_on_stdout_after_an_error(capsys: Capture) -> None:
    assert cli.main(["clean", "nowhere", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview(capsys: Capture, words: list[str]) -> None:
    assert cli.main(words) == 0
    assert "usage: onecard VERB" in capsys.readouterr().out


def test_version(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("onecard 0.")


def test_an_interrupted_process_exits_130(tmp_path: Path) -> None:
    code = (
        # A shell starts background jobs with SIGINT ignored, which a child would inherit.
        "import os, signal, sys\nfrom onecard import cli, project\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "project.new = lambda config: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(['new', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr.startswith("error: Interrupted.\n  fix: ")
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "onecard.cli", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "corpus"
    write_corpus(folder, [Document(str(i), f"text number {i} " * 20, "s", "en") for i in range(20)])
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some files that are in the way or of no use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "text.txt").write_text("some text that is long enough to be kept by the rules\n" * 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "chats.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "no_stage.toml").write_text('output = "out"\n')
    (tmp_path / "broken.toml").write_text("[clean]\nsources = [\n")
    (tmp_path / "typo.toml").write_text('[clean]\nsources = ["text.txt"]\n[pretrian]\n')
    (tmp_path / "typo_inside.toml").write_text('[clean]\nsources = ["text.txt"]\n[tokenizer]\nvocab_size = 3\n')
    (tmp_path / "ask_only.toml").write_text('[clean]\nsources = ["text.txt"]\n[ask]\nquestions = ["a"]\n')
    (tmp_path / "no_input.toml").write_text("[tokenizer]\n")
    (tmp_path / "not_a_table.toml").write_text("clean = 3\n")
    (tmp_path / "output_number.toml").write_text("output = 3\n[clean]\nsources = ['text.txt']\n")
    (tmp_path / "missing_text.toml").write_text("[clean]\nsources = ['texts']\n")
    (tmp_path / "ok.toml").write_text("output = 'full/mine.txt'\n[clean]\nsources = ['text.txt']\n")
    (tmp_path / "unplanned.toml").write_text("[clean]\nsources = ['text.txt']\n[tokenizer]\n[pretrain]\n")
    (tmp_path / "good.toml").write_text("[clean]\nsources = ['text.txt']\n")
    return tmp_path


BAD = [
    # words; what the error names; what the remedy names
    (["claen", "x"], "no verb claen", "clean"),
    (["tokenizer"], "second word", "tokenizer train"),
    (["clean"], "sources is missing", "Give it"),
    (["clean", "nowhere"], "nowhere", ""),
    (["clean", "nowhere/*.txt"], "nowhere", ""),
    (["clean", "empty"], "empty", ""),
    (["clean", "nothing.txt"], "no text", ""),
    (["clean", "package:no_such_package/x.txt"], "no_such_package", "pip install"),
    (["clean", "package:onecard/no/such/file.txt"], "no/such/file.txt", ""),
    (["clean", "text.txt", "--held-out", "3"], "held_out", "share"),
    (["clean", "text.txt", "--sede", "3"], "--sede", "--seed"),
    (["clean", "text.txt", "--seed"], "--seed", "--help"),
    (["clean", "text.txt", "--output", "full"], "full already exists", "another --output"),
    (["clean", "text.txt", "--output", "full", "--overwrite"], "not made by onecard", "another --output"),
    (["clean", "full", "--output", "full", "--overwrite"], "full is the input", "another --output"),
    (["clean", "full/*.txt", "--output", "full", "--overwrite"], "full contains the input", "another --output"),
    (["clean", "full", "--output", "full/corpus"], "full/corpus lies inside the input", "another --output"),
    (["clean", "text.txt", "--output", "text.txt/corpus"], "text.txt/corpus", "--output"),
    (["clean", "text.txt", "--recipe", "nowhere.toml"], "nowhere.toml", "path"),
    (["clean", "text.txt", "--recipe", "no_stage.toml"], "[clean]", "[clean]"),
    (["tokenizer", "train", "nowhere"], "nowhere", ""),
    (["tokenizer", "train", "full"], "full", ""),
    (["tokenizer", "train", "text.txt"], "text.txt", ""),
    (["tokenizer", "train", "{corpus}", "--vocabulary-size", "10"], "vocabulary_size", ""),
    (["tokenizer", "train", "{corpus}", "--output", "full"], "full already exists", "another --output"),
    (["tokenizer", "train", "{corpus}", "--output", "{corpus}/t"], "lies inside the input", "another --output"),
    (["pretrain", "nowhere", "--tokenizer", "{tokenizer}", "--size", "2M"], "nowhere", ""),
    (["pretrain", "{corpus}", "--tokenizer", "nowhere", "--size", "2M"], "nowhere", ""),
    (["pretrain", "{corpus}", "--tokenizer", "full", "--size", "2M"], "full", ""),
    (["pretrain", "{corpus}", "--tokenizer", "{tokenizer}", "--size", "27X"], "27X", "26M"),
    (["pretrain", "{corpus}", "--tokenizer", "{tokenizer}"], "size", "--size"),
    (["pretrain", "{corpus}", "--tokenizer", "{tokenizer}", "--size", "2M", "--output", "full"], "full", "--output"),
    (["pretrain", "{tokenizer}", "--tokenizer", "{tokenizer}", "--size", "2M"], "not a corpus", "corpus"),
    (["finetune", "{model}"], "sources is missing", "Give it"),
    (["finetune", "nowhere", "--sources", "chats.jsonl"], "nowhere", ""),
    (["finetune", "{model}", "--sources", "nowhere.jsonl", "--max-length", "64"], "nowhere.jsonl", ""),
    (["finetune", "{model}", "--sources", "chats.jsonl", "--output", "full", "--max-length", "64"], "full", "--output"),
    (["finetune", "{other}", "--sources", "chats.jsonl", "--output", "o", "--max-length", "64"], "belong together", ""),
    (["evaluate", "nowhere", "--corpus", "{corpus}"], "nowhere", ""),
    (["evaluate", "{model}", "--corpus", "nowhere"], "nowhere", ""),
    (["evaluate", "{model}", "--corpus", "none"], "nothing to measure", "--corpus"),
    (["evaluate", "{model}", "--corpus", "{corpus}"], "no held-out text", "--held-out"),
    (
        ["evaluate", "{model}", "--corpus", "none", "--questions", "chats.jsonl", "--output", "{model}/e"],
        "lies inside the input",
        "another --output",
    ),
    (["chat", "nowhere"], "nowhere", ""),
    (["chat", "full"], "full", ""),
    (["serve", "nowhere"], "nowhere", ""),
    (["serve", "{model}", "--port", "70000"], "port", ""),
    (["new"], "directory is missing", ""),
    (["new", "full"], "full already exists", ""),
    (["new", "text.txt/project"], "text.txt/project", ""),
    (["run"], "recipe is missing", ""),
    (["run", "nowhere.toml"], "nowhere.toml", "onecard new"),
    (["run", "empty"], "empty is a folder", ""),
    (["run", "text.txt"], "not valid TOML", "line"),
    (["run", "broken.toml"], "not valid TOML", "line"),
    (["run", "no_stage.toml"], "no stage", "[clean]"),
    (["run", "typo.toml"], "pretrian", "pretrain"),
    (["run", "typo_inside.toml"], "vocab_size", "vocabulary_size"),
    (["run", "ask_only.toml"], "no model to ask", "[pretrain]"),
    (["run", "no_input.toml"], "corpus", "[clean]"),
    (["run", "not_a_table.toml"], "clean is not a table", "[clean]"),
    (["run", "output_number.toml"], "output", "run"),
    (["run", "missing_text.toml"], "texts", ""),
    (["run", "ok.toml"], "mine.txt is a file", "--output"),
    (["run", "good.toml", "--set", "clean.seed"], "clean.seed", "--set"),
    (["run", "good.toml", "--set", "claen.seed=3"], "claen", "clean"),
    (["run", "good.toml", "--set", "clean.sead=3"], "sead", "seed"),
    (["run", "unplanned.toml"], "size = auto", "time_limit_minutes"),
    (["run", "good.toml", "--set", "output.x=3"], "output", "clean"),
]


@pytest.mark.parametrize(("words", "what", "remedy"), BAD, ids=[" ".join(words) for words, _, _ in BAD])
def test_bad_input_is_refused_in_two_lines_and_leaves_nothing(
    place: Path,
    capsys: Capture,
    corpus: Path,
    tiny_tokenizer_directory: Path,
    tiny_model_directory: Path,
    mismatched_model_directory: Path,
    words: list[str],
    what: str,
    remedy: str,
) -> None:
    names = {
        "corpus": corpus,
        "tokenizer": tiny_tokenizer_directory,
        "model": tiny_model_directory,
        "other": mismatched_model_directory,
    }
    before = everything(place)
    said = refused(capsys, [word.format(**names) if "{" in word else word for word in words])
    assert what in said[0]
    assert remedy in said[1]
    # A run keeps what it needs to go on, and the folder it was told to write into.
    left = {name for name in everything(place) if name.split("/")[0] not in ("runs", "o")}
    assert left == set(before)


@pytest.fixture(scope="session")
def mismatched_model_directory(tmp_path_factory: pytest.TempPathFactory, tiny_model_directory: Path) -> Path:
    """The tiny model with a vocabulary of fewer rows than its tokenizer has ids."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_model_directory)
    config.vocab_size = 100
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mismatched")
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_directory).save_pretrained(folder)
    return folder


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(place: Path, capsys: Capture) -> None:
    (place / "text.txt").chmod(0)
    assert "text.txt" in refused(capsys, ["clean", "text.txt"])[0]


def test_a_corpus_of_another_version_is_named(place: Path, capsys: Capture, corpus: Path) -> None:
    write_corpus(place / "corpus", [Document("1", "text", "s", "en")])
    path = place / "corpus" / artifact.MANIFEST
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 2}))
    what, remedy = refused(capsys, ["tokenizer", "train", "corpus"])
    assert "format 2" in what
    assert "reads format 1" in what
    assert "0.1.0" in remedy


def test_a_program_told_to_end_says_so_and_ends_with_130() -> None:
    code = (
        "import sys, time; from onecard import cli\n"
        "def work(words):\n"
        "    sys.stderr.write('working\\n'); sys.stderr.flush(); time.sleep(60)\n"
        "cli._run = work; sys.exit(cli.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "working\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "Interrupted." in said
