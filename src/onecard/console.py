"""The only module that prints.

Results (what a person asked for) go to stdout; progress, notes and warnings go to stderr, so that a pipe stays clean.
With `--json` stdout carries one JSON document, printed once at the end by `cli`, and every other result is silenced.
All output survives a terminal that cannot encode it (unknown characters are replaced, never raised) and a reader that
goes away (`onecard run ... | head` works on to its end, unseen).
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.text import Text


# 1,234 or 0.5, with a sign before and a unit after it; or nothing.
_NUMBER = re.compile(r"([+-]?[\d.,]+( ?[^\d\s]\S{0,5})?)?( \d\d s)?|nan|[+-]?inf")


@dataclass
class _State:
    """Set once by `cli` before a verb runs."""

    json: bool = False
    quiet: bool = False
    rich: dict[str, RichConsole] = field(default_factory=dict)
    bar_covers_stdout: bool = False


_state = _State()


def configure(*, json_output: bool = False, quiet: bool = False) -> None:
    """Choose the form of the output and make both streams safe for any text, whatever the locale."""
    _state.json, _state.quiet = json_output, quiet
    _state.rich.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Under LC_ALL=C Python may choose ASCII; the terminals of today read UTF-8, and a log file should be UTF-8.
            encoding = "utf-8" if (stream.encoding or "ascii").lower() in ("ascii", "ansi_x3.4-1968") else None
            stream.reconfigure(encoding=encoding, errors="replace")


def _rich(name: str) -> RichConsole:
    if _state.bar_covers_stdout:
        name = "stderr"  # one terminal: what is printed belongs above the bar
    stream: TextIO = sys.stdout if name == "stdout" else sys.stderr
    # While a bar is drawn, rich stands in for the streams.
    stream = getattr(stream, "rich_proxied_file", stream)
    console = _state.rich.get(name)
    if console is None or console.file is not stream:  # pytest swaps the streams between tests
        from rich.console import Console

        class Survivor(Console):
            def on_broken_pipe(self) -> None:
                reader_gone(self.file)

        width = None if stream.isatty() else 120
        console = Survivor(file=stream, soft_wrap=True, highlight=False, width=width)
        _state.rich[name] = console
    return console


def reader_gone(stream: IO[str]) -> None:
    """What is still written to `stream` goes nowhere: its reader left, and the work matters more."""
    with suppress(OSError, ValueError):  # a stream without a file of the system (as in tests) needs nothing
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush() -> None:
    """Write out what waits, so that nothing is left to fail when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            reader_gone(stream)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_gone(sys.stdout)


def result(text: str = "") -> None:
    """Print one line (or block) of what the user asked for; plain text, no markup."""
    if not _state.json:
        from rich.text import Text

        _say("stdout", Text(text), hanging=0)


def result_set_in(text: str, indent: int) -> None:
    """Print text of any script set in by `indent` columns; on a terminal its lines are broken at the width."""
    if _state.json:
        return
    from rich.cells import chop_cells
    from rich.text import Text

    console = _rich("stdout")
    for line in text.split("\n"):
        parts = chop_cells(line, max(console.width - indent, 1)) if console.is_terminal else [line]
        for part in parts or [""]:
            console.print(Text(" " * indent + part if part else ""))


def result_fragment(text: str) -> None:
    """Print part of a line of the result at once, as a model writes it."""
    if not _state.json:
        _write(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table of results; numbers (with their units) are right-aligned."""
    if _state.json:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    texts = [[format_number(cell) if isinstance(cell, int | float) else str(cell) for cell in row] for row in rows]
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        cells = [row[index] for row in texts]
        numeric = any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        drawn.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in texts:
        drawn.add_row(*map(Text, row))
    console = _rich("stdout")
    console.print(Text(title, style="bold"))
    if console.is_terminal:
        console.print(drawn, soft_wrap=False)
    else:
        with console.capture() as captured:
            console.print(drawn, soft_wrap=False)
        console.print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n", markup=False)
    console.print()


def document(value: Any) -> None:
    """Print the one JSON document of `--json`; numbers that JSON cannot hold (nan, inf) become null."""
    _write(json.dumps(_finite(value), ensure_ascii=False, indent=2, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def note(text: str) -> None:
    """Say something useful while working (stderr)."""
    if not _state.quiet:
        from rich.text import Text

        _say("stderr", Text(text))


def _say(stream: str, text: Text, hanging: int = 2) -> None:
    """Print lines; on a terminal too narrow for one, break it between words and set the further parts in."""
    console = _rich(stream)
    for line in text.split("\n", allow_blank=True):
        if console.is_terminal and line.cell_len > console.width:
            _print_broken(console, line, hanging)
        else:
            console.print(line)


def _print_broken(console: RichConsole, text: Text, hanging: int) -> None:
    from rich.cells import cell_len

    indent = len(text.plain) - len(text.plain.lstrip(" "))
    breaks, column = [], indent
    for word in re.finditer(r"\S+\s*", text.plain):
        # A word that is longer than a line, such as a path, stays whole: it can still be copied.
        if column + cell_len(word[0].rstrip()) > console.width and column > indent + hanging:
            breaks.append(word.start())
            column = indent + hanging
        column += cell_len(word[0])
    for number, line in enumerate(text.divide(breaks)):
        line.rstrip()
        line.pad_left(indent + hanging if number else 0)
        console.print(line)


def learned(title: str, pieces: Sequence[tuple[str, bool]], *, as_result: bool = False) -> None:
    """Show a text of which the pieces marked True are learned: in colour, or between ⟦ ⟧ where there is none."""
    if _state.json if as_result else _state.quiet:
        return
    from rich.text import Text

    stream = "stdout" if as_result else "stderr"
    console = _rich(stream)
    coloured = console.is_terminal and not console.no_color
    shown = Text(f"{title}\n", style="bold" if coloured else "")
    for text, marked in pieces:
        if coloured:
            shown.append(text, style="not bold green" if marked else "not bold dim")
        else:
            shown.append(f"⟦{text}⟧" if marked else text)
    console.print(shown)


def heading(text: str) -> None:
    """Begin a stage of a longer work (stderr)."""
    if not _state.quiet:
        _rich("stderr").print(text, markup=False, style="bold cyan")


def warn(text: str) -> None:
    """Say what was not honoured, dropped or surprising (stderr); never silenced."""
    from rich.text import Text

    _say("stderr", Text.assemble(("warning: ", "yellow"), text))


def failure(what: str, remedy: str) -> None:
    """Print a user's error: one line what, one line what to do (stderr)."""
    from rich.text import Text

    _rich("stderr").print(Text.assemble(("error: ", "bold red"), what))
    if remedy:
        _rich("stderr").print(Text.assemble(("  fix: ", "bold green"), remedy))


def is_interactive() -> bool:
    """Whether there is a person who sees results and can be asked: a terminal on both sides, and no `--json`."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not _state.json


def ask(prompt: str) -> str:
    """Read one line from the user; EOFError at the end of input."""
    _rich("stderr").print(prompt, end="", markup=False)
    return input()


def format_number(value: float) -> str:
    """12,345 for whole numbers; three or four significant digits otherwise."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"


def short_path(path: Path) -> str:
    """A path as the user would type it here: from the working directory if it lies below it."""
    with suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


def format_bytes(count: float) -> str:
    """Binary units: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """'8.3 s', '4 min 05 s', '2 h 10 min', '3 d 4 h'."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


class Progress:
    """Counts done work and says how long the rest takes.

    The time left is the rest divided by the mean rate since the start of this process (not counting work that was
    already done when it started), so that a pause or a slow first step shows for what it is.
    """

    def __init__(self, description: str, total: float, unit: str, done: float, advance_line_seconds: float) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self._initial = done
        self._started = self._printed = time.monotonic()
        self._line_seconds = advance_line_seconds
        self._live: Any = None
        self._task: Any = None
        self._status = ""

    def advance(self, amount: float = 1, status: str | None = None) -> None:
        """Record `amount` more units as done; `status` is a short text shown beside (such as the loss)."""
        self.done += amount
        if status is not None:
            self._status = status
        if self._live is not None:
            self._live.update(self._task, completed=self.done, total=self.total, status=self._text())
            return
        now = time.monotonic()
        if not _state.quiet and now - self._printed >= self._line_seconds:
            self._printed = now
            done = f"{format_number(self.done)}/{format_number(self.total)} {self.unit}".rstrip()
            note(f"  {self.description}: {done}  {self._text()}")

    def seconds_left(self) -> float | None:
        """Seconds until the total at the mean rate so far; None before anything is measured."""
        fresh, elapsed = self.done - self._initial, time.monotonic() - self._started
        return None if fresh <= 0 else (self.total - self.done) * elapsed / fresh

    def _text(self) -> str:
        left = self.seconds_left()
        parts = [self._status] if self._status else []
        if left is not None and left > 0:
            parts.append(f"{format_duration(left)} left")
        elif left is not None:
            parts.append(f"in {format_duration(time.monotonic() - self._started)}")
        return "  ".join(parts)


@contextmanager
def progress(
    description: str, total: float, unit: str = "", *, done: float = 0, line_seconds: float = 10
) -> Iterator[Progress]:
    """Show long work on stderr: a live bar on a terminal, one line every `line_seconds` elsewhere."""
    bar = Progress(description, total, unit, done, line_seconds)
    if _state.quiet or not sys.stderr.isatty():
        yield bar
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    live = RichProgress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit, markup=False),
        TextColumn("{task.fields[status]}", markup=False),
        console=_rich("stderr"),
        # Results that go to a file stay results; on the same terminal they are drawn above the bar.
        redirect_stdout=sys.stdout.isatty(),
    )
    with live:
        _state.bar_covers_stdout = sys.stdout.isatty()
        bar._live, bar._task = live, live.add_task(description, total=total, status="")
        live.update(bar._task, completed=done)
        try:
            yield bar
        finally:
            _state.bar_covers_stdout = False
