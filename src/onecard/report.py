"""One self-contained HTML page for a person: text, tables, figures, samples. No script, no network, everything escaped.

Figures are drawn by matplotlib as SVG inside the page, so that a report can be mailed as one file. Their labels stay
text, which the browser draws in whatever script they are; a dollar sign in them is a dollar sign.
"""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact
from onecard.console import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e3e7ee; --page: #fbfcfe; --card: #fff;
  --accent: #2f5fd0; --good: #18794e; --bad: #b42318; --mark: #fff1b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b3342; --page: #12161e;
  --card: #1a202b; --accent: #8fb0ff; --good: #5dd39e; --bad: #ff8a80; --mark: #574a12; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--line); }
.lead, .caption { color: var(--soft); }
.caption { font-size: .9rem; margin: .3rem 0 1rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.fact b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.fact span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; background: var(--card); font-size: .93rem; }
th, td { text-align: left; padding: .45rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .5rem; }
figure svg { width: 100%; height: auto; display: block; }
.sample { background: var(--card); border: 1px solid var(--line); border-left: 3px solid var(--accent);
  border-radius: .4rem; padding: .7rem 1rem; margin: .6rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.sample small { display: block; color: var(--soft); }
.pieces i { font-style: normal; border-radius: .2rem; } .pieces i:nth-of-type(odd) { background: var(--mark); }
.pieces i:nth-of-type(even) { background: var(--line); } .pieces sup { color: var(--soft); font-size: .65em; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; margin: .4rem 0 1rem; }
@media (max-width: 40rem) { .sides { grid-template-columns: 1fr; } }
.sides .sample { margin: 0; font-size: .93rem; } .sides small { margin-bottom: .2rem; }
.sides .before { border-left-color: var(--bad); } .sides .after { border-left-color: var(--good); }
mark { background: var(--mark); color: inherit; border-radius: .2rem; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
"""


class Page:
    """Collects parts in order; `save` writes them. All strings given are plain text."""

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{html.escape(lead)}</p>')

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """A paragraph of plain text."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def facts(self, values: Mapping[str, Any]) -> None:
        """The few numbers that matter, large: label -> value."""
        cells = (
            f'<div class="fact"><b>{html.escape(_text(value))}</b><span>{html.escape(label)}</span></div>'
            for label, value in values.items()
        )
        self._parts.append(f'<div class="facts">{"".join(cells)}</div>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
        """A table; a column whose cells are all numbers is right-aligned."""
        numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
        marks = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(f"<th{mark}>{html.escape(name)}</th>" for mark, name in zip(marks, columns))
        body = "".join(
            "<tr>" + "".join(f"<td{mark}>{html.escape(_text(cell))}</td>" for mark, cell in zip(marks, row)) + "</tr>"
            for row in rows
        )
        self._parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )
        self._caption(caption)

    def sample(self, text: str, caption: str = "") -> None:
        """A piece of text as it is, line breaks kept."""
        small = f"<small>{html.escape(caption)}</small>" if caption else ""
        self._parts.append(f'<div class="sample">{small}{html.escape(text)}</div>')

    def pieces(self, pieces: Sequence[tuple[str, int]], caption: str = "") -> None:
        """A text cut into (piece, number of units in it): neighbours are coloured in turn, counts above 1 raised."""
        small = f"<small>{html.escape(caption)}</small>" if caption else ""
        spans = "".join(
            f"<i>{html.escape(piece)}{f'<sup>{count}</sup>' if count > 1 else ''}</i>" for piece, count in pieces
        )
        self._parts.append(f'<div class="sample pieces">{small}{spans}</div>')

    def sides(self, before: Sequence[tuple[str, bool]], after: Sequence[tuple[str, bool]], caption: str = "") -> None:
        """Two texts side by side, each cut into (piece, whether it is marked as different)."""
        columns = []
        for name, pieces in (("before", before), ("after", after)):
            columns.append(f'<div class="sample {name}"><small>{name}</small>{_with_marks(pieces)}</div>')
        self._caption(caption)
        self._parts.append(f'<div class="sides">{"".join(columns)}</div>')

    def marked(self, pieces: Sequence[tuple[str, bool]], caption: str = "") -> None:
        """A text cut into (piece, whether it is marked)."""
        small = f"<small>{html.escape(caption)}</small>" if caption else ""
        self._parts.append(f'<div class="sample">{small}{_with_marks(pieces)}</div>')

    def details(self, summary: str, text: str) -> None:
        """Text that is folded away until asked for."""
        self._parts.append(
            f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>"
        )

    def figure(self, draw: Callable[[Axes], None], caption: str = "", *, height: float = 3.2) -> None:
        """A picture: `draw` fills one matplotlib Axes, 9 inches wide."""
        # The object interface, not pyplot: safe without a display.
        import matplotlib
        from matplotlib.figure import Figure

        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}), warnings.catch_warnings():
            # The width of a Chinese label is estimated without its font.
            warnings.filterwarnings("ignore", message=".*missing from font")
            picture = Figure(figsize=(9, height), layout="constrained")
            axes = picture.add_subplot()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, color="#e6e9ef", linewidth=0.8)
            axes.set_axisbelow(True)
            draw(axes)
            picture.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        svg = buffer.getvalue()
        self._parts.append(
            f'<figure role="img" aria-label="{html.escape(caption)}">{svg[svg.index("<svg") :]}</figure>'
        )
        self._caption(caption)

    def _caption(self, caption: str) -> None:
        if caption:
            self._parts.append(f'<p class="caption">{html.escape(caption)}</p>')

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self._title)}</title><style>{_STYLE}</style></head>"
            f"<body><main>{''.join(self._parts)}</main></body></html>\n"
        )

    def save(self, path: Path) -> None:
        """Write the page (atomically)."""
        artifact.write_text_atomically(path, self.html())


def _with_marks(pieces: Sequence[tuple[str, bool]]) -> str:
    return "".join(f"<mark>{html.escape(text)}</mark>" if marked else html.escape(text) for text, marked in pieces)


def _text(value: Any) -> str:
    return format_number(value) if isinstance(value, int | float) else str(value)
