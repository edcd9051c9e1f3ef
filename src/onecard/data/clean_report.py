"""The page on which a person sees what cleaning did: counts, reasons with examples, duplicates, lengths, changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onecard import report
from onecard.console import format_bytes
from onecard.data import excerpts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from onecard.data.clusters import Cluster

CHANGES = 3
_COLORS = ("#2f5fd0", "#e0803c", "#2f9e6e", "#8a63c9", "#98a2b3")
_LANGUAGES_DRAWN = 4

MEANINGS = {
    "empty": "no text in it",
    "garbled": "was read in a wrong encoding before, beyond repair",
    "other_language": "not in one of the languages that are kept",
    "boilerplate": "nothing but navigation and notices",
    "forum_filler": "nothing but the filler of forums",
    "advertisement": "too much of it advertises",
    "too_short": "fewer characters than minimum_characters",
    "too_many_symbols": "more symbols than maximum_symbol_ratio",
    "too_much_punctuation": "more punctuation than maximum_punctuation_ratio",
    "too_repetitive": "repeats itself more than maximum_repetition",
    "personal_data": "holds personal data, and such documents are dropped",
    "unlike_reference": "unlike the reference",
    "exact_duplicate": "the same text as an earlier document (named beside it)",
    "contaminated": "shares a passage with an evaluation file",
    "repeated_paragraphs": "too little is left without the paragraphs of earlier documents",
    "near_duplicate": "nearly the same text as an earlier document (named beside it)",
    "missing_text": "the row has no text",
}


@dataclass(frozen=True, slots=True)
class Change:
    """What one step changed in one document: "step: id", and both texts from before the first place that differs."""

    caption: str
    before: str
    after: str


def page(
    result: Mapping[str, Any],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    changes: Sequence[Change],
    lengths_characters: Mapping[str, NDArray[Any] | Sequence[int]],
    clusters: Sequence[Cluster] = (),
) -> report.Page:
    """Lay out the report of one cleaning.

    `result` is report.json's content, `examples` are rejected rows by reason, `lengths_characters` the lengths of the
    kept documents by language.
    """
    made = report.Page("Corpus", "What was read, what was kept, what was set aside and why.")
    rejected = sum(result["rejected"].values())
    made.facts(
        {
            "read": result["read"],
            "kept": result["kept"],
            "set aside": rejected,
            "held out": result["held_out"],
            "characters": result["characters"],
            "text": format_bytes(result["bytes"]),
        }
    )
    _sources(made, result)
    _languages(made, result)
    made.figure(
        lambda axes: _draw_lengths(axes, lengths_characters),
        "Characters in a kept document (logarithmic), by language.",
    )
    if rejected:
        _set_aside(made, result["rejected"], examples, rejected, result["read"])
    if clusters:
        _duplicates(made, clusters)
    if changes:
        _changes(made, result, changes)
    return made


def _sources(made: report.Page, result: Mapping[str, Any]) -> None:
    made.heading("Sources")
    columns = ("read", "kept", "rejected", "held_out", "characters", "bytes")
    made.table(
        ["source", *(name.replace("_", " ") for name in columns)],
        [[label, *(counts[name] for name in columns)] for label, counts in result["by_source"].items()],
    )


def _languages(made: report.Page, result: Mapping[str, Any]) -> None:
    made.heading("Languages and lengths")
    made.table(
        ["language", "kept", "held out", "characters", "bytes"],
        [
            [label, counts["kept"], counts["held_out"], counts["characters"], counts["bytes"]]
            for label, counts in result["by_language"].items()
        ],
    )


def _set_aside(
    made: report.Page,
    reasons: Mapping[str, int],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    rejected: int,
    read: int,
) -> None:
    made.heading("What was set aside")
    made.paragraph(
        f"{rejected:,} of {read:,} ({rejected / max(read, 1):.1%}). Nothing is gone: each stands in rejected-*.jsonl "
        "with file and line, and `onecard inspect` pages through them."
    )
    made.table(
        ["reason", "rows", "share", "meaning"],
        [
            [reason, count, f"{count / max(read, 1):.1%}", MEANINGS.get(reason, reason.replace("_", " "))]
            for reason, count in reasons.items()
        ],
    )
    for reason in reasons:
        rows = examples.get(reason, ())
        if rows:
            made.paragraph(f"{reason}, {'the first of ' if reasons[reason] > len(rows) else ''}{reasons[reason]:,}:")
        for row in rows:
            text = excerpts.visible(excerpts.shortened(row["text"])) or "(no text)"
            made.sample(text, caption=" · ".join(part for part in (_place(row), row["detail"]) if part))


def _duplicates(made: report.Page, clusters: Sequence[Cluster]) -> None:
    made.heading("The most repeated documents")
    made.paragraph("Of each one is kept; the others were set aside, here with their similarity (1: equal).")
    for cluster in clusters:
        some = ", ".join(f"{name} ({similarity:.2f})" for name, similarity in cluster.some)
        more = ", ..." if cluster.repeated_by > len(cluster.some) else ""
        times = "once" if cluster.repeated_by == 1 else f"{cluster.repeated_by:,} times"
        made.sample(
            excerpts.visible(excerpts.shortened(cluster.text)), caption=f"{cluster.id} · repeated {times}: {some}{more}"
        )


def _changes(made: report.Page, result: Mapping[str, Any], changes: Sequence[Change]) -> None:
    made.heading("Before and after")
    made.paragraph(
        f"{result['changed']:,} kept documents were changed. Each example begins shortly before the first place that "
        "changed; what differs is marked. Line ends are shown as ⏎, tabs as ⇥, ideographic spaces as ▢, changed spaces "
        "as ·, other invisible characters by their number."
    )
    counts = result.get("changes", {})
    if counts:
        made.table(["step", "changes, in rejected documents too"], list(counts.items()))
    by_step: dict[str, list[Change]] = {}
    for change in changes:
        by_step.setdefault(change.caption.partition(":")[0], []).append(change)
    for some in by_step.values():
        for change in some[:CHANGES]:
            before, after = excerpts.differences(change.before, change.after)
            made.sides(excerpts.visible_pieces(before), excerpts.visible_pieces(after), caption=change.caption)


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['source']}, line {row['line']}" if row["line"] else str(row["file"])


def _draw_lengths(axes: Axes, lengths_characters: Mapping[str, NDArray[Any] | Sequence[int]]) -> None:
    import math

    import numpy as np

    there = [(name, lengths) for name, lengths in lengths_characters.items() if len(lengths)]
    by_size = sorted(there, key=lambda item: (-len(item[1]), item[0]))
    drawn = [(name, np.asarray(lengths)) for name, lengths in by_size[:_LANGUAGES_DRAWN]]
    rest = [np.asarray(lengths) for _, lengths in by_size[_LANGUAGES_DRAWN:]]
    if rest:
        drawn.append(("others", np.concatenate(rest)))
    everything = np.concatenate([lengths for _, lengths in drawn])
    lowest = max(int(math.log2(max(everything.min(), 1))), 0)
    highest = max(math.ceil(math.log2(everything.max() + 1)), lowest + 1)
    edges = [2**power for power in range(lowest, highest + 1)]
    axes.hist(
        [lengths for _, lengths in drawn],
        bins=edges,
        stacked=True,
        color=_COLORS[: len(drawn)],
        edgecolor="white",
        label=[name for name, _ in drawn],
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=30)
    axes.set_xlabel("characters")
    axes.set_ylabel("documents")
    axes.legend(frameon=False)
