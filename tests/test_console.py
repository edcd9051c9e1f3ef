"""What is printed: safe in any locale, honest about time, and nothing but one document under --json."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onecard import console


def child(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, script], capture_output=True, check=False, env={**os.environ, **environment})


TALK = """
from onecard import console
console.configure()
console.result("数据 \\U0001f44d")
console.warn("警告")
console.table("表", ["列", "n"], [["三国", 1234567]])
console.failure("坏 \\ud83d", "改")
with console.progress("训练", 10, "步", line_seconds=0) as bar:
    bar.advance(5, "损失 1.0")
"""


@pytest.mark.parametrize("utf8_mode", ["0", "1"])
def test_chinese_survives_the_c_locale(tmp_path: Path, utf8_mode: str) -> None:
    done = child(tmp_path, TALK, LC_ALL="C", PYTHONUTF8=utf8_mode, PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr.decode()
    out, err = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    assert "数据 👍" in out
    assert "1,234,567" in out
    assert "警告" in err
    assert "坏 ?" in err
    assert "训练: 5/10 步  损失 1.0" in err


def test_another_encoding_replaces_what_it_cannot_say(tmp_path: Path) -> None:
    done = child(tmp_path, TALK, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr.decode()
    assert b"?? ?" in done.stdout


def test_json_silences_results_and_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(json_output=True)
    try:
        console.result("text")
        console.result_fragment("text")
        console.table("t", ["a"], [[1]])
        console.note("a note")
        console.document({"nan": float("nan"), "list": [float("inf"), 1.5], "path": Path("a"), "文": "文"})
    finally:
        console.configure()
    out = capsys.readouterr()
    assert json.loads(out.out) == {"nan": None, "list": [None, 1.5], "path": "a", "文": "文"}
    assert "文" in out.out
    assert "a note" in out.err


def test_quiet_keeps_warnings_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True)
    try:
        console.note("a note")
        console.heading("a heading")
        console.warn("a warning")
        console.result("a result")
    finally:
        console.configure()
    out = capsys.readouterr()
    assert "note" not in out.err
    assert "heading" not in out.err
    assert "a warning" in out.err
    assert "a result" in out.out


def test_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.result("[bold]a[/bold] [1/6]")
    console.warn("[red]b")
    console.table("[c]", ["[d]"], [["[/e]"]])
    out = capsys.readouterr()
    assert "[bold]a[/bold] [1/6]" in out.out
    assert all(text in out.out for text in ("[c]", "[d]", "[/e]"))
    assert "[red]b" in out.err


def test_a_reader_that_leaves_does_not_stop_the_work(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from onecard import console
console.configure()
for number in range(20000):
    console.result("a line of some length, to fill the pipe " * 2)
console.table("t", ["a"], [[1]])
console.result_fragment("x")
console.document({{"a": 1}})
console.flush()
Path({str(tmp_path / "done")!r}).write_text("done")
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    error = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait() == 0
    assert error == b""
    assert (tmp_path / "done").exists()


def test_the_time_left_counts_only_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("resumed", 1000, done=900) as bar:
        assert bar.seconds_left() is None
        now[0] += 20
        bar.advance(10)
    # 10 in 20 s, 90 to go: 180 s. Counting the 900 done before would say 2 s.
    assert bar.seconds_left() == pytest.approx(180)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1234567, "1,234,567"), (-5, "-5"), (True, "yes"), (0.5, "0.5"), (0.01234, "0.0123"),
        (3.14159, "3.142"), (1234.5, "1,234"), (float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf"),
        (0.0, "0"), (2.0, "2"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert console.format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (8.34, "8.3 s"), (9.96, "10 s"), (59.4, "59 s"), (59.7, "1 min 00 s"), (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"), (7800, "2 h 10 min"), (48 * 3600, "2 d 0 h"), (100 * 3600, "4 d 4 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert console.format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")])
def test_bytes(count: int, text: str) -> None:
    assert console.format_bytes(count) == text


def test_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert console.short_path(tmp_path / "a" / "b") == "a/b"
    assert console.short_path(Path("a")) == "a"
    assert console.short_path(Path("/elsewhere")) == "/elsewhere"


TERMINAL = """
from onecard import console
console.configure()
with console.progress("working", 10) as bar:
    bar.advance(5)
    console.note("  a note of several words that does not fit /a/path/that/is/longer/than/forty/columns/of/it")
    console.result("a result")
    console.table("a title longer than the table", ["a", "b"], [["x", "4 min 05 s"]])
    bar.advance(5, "loss 1.0")
"""


def test_a_bar_on_a_terminal_leaves_nothing_behind(tmp_path: Path) -> None:
    import pty

    script = tmp_path / "script.py"
    script.write_text(TERMINAL, encoding="utf-8")
    main, other = pty.openpty()
    environment = {**os.environ, "COLUMNS": "40", "LINES": "30", "TERM": "xterm"}
    subprocess.run([sys.executable, script], stdin=other, stdout=other, stderr=other, env=environment, check=True)
    os.close(other)
    screen = b""
    while chunk := read_some(main):
        screen += chunk
    os.close(main)
    lines = drawn(screen.decode())
    assert lines == [
        "  a note of several words that does not",
        "    fit",
        "    /a/path/that/is/longer/than/forty/columns/of/it",
        "a result",
        "a title longer than the table",
        "a            b",
        "──────────────",
        "x   4 min 05 s",
        "",
        lines[-1],
    ]
    assert lines[-1].startswith("  working ━━━")
    assert "10/10" in lines[-1]


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the end, on Linux
        return b""


def drawn(stream: str) -> list[str]:
    """What a terminal of endless width shows after these characters (the few sequences that rich uses)."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", stream):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines[:-1]]


def test_text_that_is_set_in_is_broken_at_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.result_set_in("一二三四五六七\n\nab", 2)
    assert capsys.readouterr().out == "  一二三四五六七\n\n  ab\n"
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setattr(Console, "width", property(lambda self: 10))
    console.configure()
    console.result_set_in("一二三四五六七\n\nab", 2)
    # Eight columns are left, and a Chinese character takes two.
    assert capsys.readouterr().out.split("\n")[:4] == ["  一二三四", "  五六七", "", "  ab"]
