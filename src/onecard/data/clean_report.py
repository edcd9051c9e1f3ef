"""The page on which a person sees what cleaning did: counts, reasons with examples, lengths, texts before and after."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onecard import report
from onecard.console import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLES = 3
CHANGES = 3
_EXCERPT_CHARACTERS = 200
_MARKS = {"\n": "⏎", "\t": "⇥", "\u3000": "▢", " ": "·", "\r": "␍"}


@dataclass(frozen=True, slots=True)
class Change:
    """One document whose text was changed."""

    id: str
    before: str
    after: str


def page(
    result: Mapping[str, Any],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    changed: Sequence[Change],
    lengths_characters: Sequence[int],
) -> report.Page:
    """Lay out the report of one cleaning; `result` is report.json's content."""
    made = report.Page("Corpus", "What was read, what was kept, what was set aside and why.")
    rejected = sum(result["rejected"].values())
    made.facts(
        {
            "read": result["read"],
            "kept": result["kept"],
            "rejected": rejected,
            "held out": result["held_out"],
            "characters": result["characters"],
            "text": format_bytes(result["bytes"]),
        }
    )
    made.heading("Sources and languages")
    columns = ("read", "kept", "rejected", "held_out", "characters", "bytes")
    made.table(
        ["source", *(name.replace("_", " ") for name in columns)],
        [[label, *(counts[name] for name in columns)] for label, counts in result["by_source"].items()],
    )
    made.table(
        ["language", "kept", "held out", "characters", "bytes"],
        [
            [label, counts["kept"], counts["held_out"], counts["characters"], counts["bytes"]]
            for label, counts in result["by_language"].items()
        ],
    )
    if rejected:
        made.heading("What was set aside")
        made.paragraph("Each stands in rejected-00000.jsonl with file and line; here are the first of each kind.")
        for reason, count in result["rejected"].items():
            made.paragraph(f"{reason}: {count:,}")
            rows = [
                [f"{_place(row)}: {row['detail']}".rstrip(": "), _shortened(row["text"])] for row in examples[reason]
            ]
            made.table(["where", "text"], rows)
    made.heading("Lengths")
    made.figure(lambda axes: _draw_lengths(axes, lengths_characters), "Characters in a document (logarithmic).")
    if changed:
        made.heading("Before and after")
        made.paragraph(
            f"{result['changed']:,} kept documents were tidied. From the first place that changed: line ends are shown "
            "as ⏎, tabs as ⇥, spaces as ·, ideographic spaces as ▢, other invisible characters by their number."
        )
        for change in changed:
            made.table(["before", "after"], [_excerpts(change)], caption=change.id)
    return made


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']}, line {row['line']}" if row["line"] else str(row["file"])


def _shortened(text: str) -> str:
    return text[:_EXCERPT_CHARACTERS] + (" …" if len(text) > _EXCERPT_CHARACTERS else "")


def _excerpts(change: Change) -> tuple[str, str]:
    """Both texts from shortly before the first place that differs."""
    shorter = min(len(change.before), len(change.after))
    same = next((i for i in range(shorter) if change.before[i] != change.after[i]), shorter)
    start = max(same - 20, 0)
    before, after = (text[start : start + _EXCERPT_CHARACTERS] for text in (change.before, change.after))
    return _visible(before), _visible(after)


def _visible(text: str) -> str:
    return "".join(_MARKS.get(character) or _name_if_invisible(character) for character in text)


def _name_if_invisible(character: str) -> str:
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp")
    return f"[U+{ord(character):04X}]" if invisible else character


def _draw_lengths(axes: Axes, lengths_characters: Sequence[int]) -> None:
    import math

    edges = [2**power for power in range(max(2, math.ceil(math.log2(max(lengths_characters) + 1))) + 1)]
    edges = [edge for edge in edges if edge * 2 > min(lengths_characters)]
    axes.hist(lengths_characters, bins=edges, color="#2f5fd0", edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=30)
    axes.set_xlabel("characters")
    axes.set_ylabel("documents")
