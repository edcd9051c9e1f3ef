"""`onecard inspect`: pages through the kept and the rejected rows of a corpus, with filters, in bounded memory.

In: a corpus directory. Out: on a terminal page after page, elsewhere (and as JSON) the first page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import InspectConfig
from onecard.data import excerpts
from onecard.data.corpus import read_documents
from onecard.errors import ConfigError

_HELP = "Enter: next page, b: back, a number: the whole row, q: end"


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """A document that was kept (reason "kept") or a row that was rejected."""

    id: str
    source: str
    language: str
    reason: str
    detail: str
    file: str
    line: int
    text: str


def inspect(config: InspectConfig) -> dict[str, Any]:
    """Show the rows that pass the filters, page after page on a terminal; returns the first page.

    ArtifactError if there is no corpus; ConfigError if nothing passes, which names what there is.
    """
    manifest = artifact.read_manifest(config.corpus, "corpus")
    page = list(islice(rows(config), config.rows + 1))
    if not page:
        raise _nothing_found(config, manifest.result)
    result = {"rows": [asdict(row) for row in page[: config.rows]], "more": len(page) > config.rows}
    if console.is_interactive():
        _turn_pages(config)
    else:
        _show(config, page[: config.rows], 1)
        if result["more"]:
            console.result("There are more; on a terminal they come page after page (or raise --rows).")
    return result


def rows(config: InspectConfig) -> Iterator[InspectedRow]:
    """Stream the rows of a corpus that pass the filters: the documents first, then what was rejected."""
    wanted = config.search.casefold()
    for row in _all_rows(config):
        if config.source and row.source != config.source:
            continue
        if config.language and row.language != config.language and not row.language.startswith(f"{config.language}-"):
            continue
        if wanted and wanted not in row.text.casefold() and wanted not in row.id.casefold():
            continue
        yield row


def _all_rows(config: InspectConfig) -> Iterator[InspectedRow]:
    reason = config.reason
    if config.show != "rejected" and reason in ("", "kept"):
        for item in read_documents(config.corpus):
            yield InspectedRow(item.id, item.source, item.language, "kept", item.split, "", 0, item.text)
    if config.show != "kept" and reason != "kept":
        for row in _rejected_rows(config.corpus):
            if not reason or row.reason == reason:
                yield row


def _rejected_rows(corpus: Path) -> Iterator[InspectedRow]:
    for path in sorted(corpus.glob("rejected-*.jsonl")):
        # Opened so that only \n ends a line: a text may hold any other line separator.
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                values = json.loads(line)
                yield InspectedRow(
                    id=values["id"],
                    source=values["source"],
                    language=values.get("language", ""),
                    reason=values["reason"],
                    detail=values["detail"],
                    file=values["file"],
                    line=values["line"],
                    text=values["text"],
                )


def _nothing_found(config: InspectConfig, result: dict[str, Any]) -> ConfigError:
    reasons = ", ".join(f"{name} ({count:,})" for name, count in result["rejected"].items()) or "none"
    return ConfigError(
        f"No row of {config.corpus} passes the filters.",
        f"Reasons there: {reasons}; sources: {', '.join(result.get('by_source', {})) or 'unknown'}; languages: "
        f"{', '.join(result.get('by_language', {})) or 'unknown'}.",
    )


def _turn_pages(config: InspectConfig) -> None:
    """Ask after each page what to show next. Only that page is held; going back reads from the start again."""
    number = 0
    stream = rows(config)
    while True:
        page = list(islice(stream, config.rows))
        if not page:
            console.result("No more rows.")
            return
        _show(config, page, number * config.rows + 1)
        answer = _ask_until_turned(page, number * config.rows + 1)
        if answer == "q":
            return
        if answer == "b" and number > 0:
            number -= 1
            stream = islice(rows(config), number * config.rows, None)
        elif answer == "b":
            stream = rows(config)
        else:
            number += 1


def _ask_until_turned(page: list[InspectedRow], first: int) -> str:
    """Show whole rows as long as numbers are given; returns the answer that turns the page ("", "b" or "q")."""
    while True:
        try:
            answer = console.ask(f"{_HELP} > ").strip().lower()
        except EOFError:
            return "q"
        if not answer.isdecimal():
            return answer if answer in ("b", "q") else ""
        place = int(answer) - first
        if 0 <= place < len(page):
            row = page[place]
            console.result(f"{answer}  {_heading(row)}\n")
            console.result_set_in(f"{excerpts.harmless(row.text)}\n", 0)
        else:
            console.result(f"This page has the rows {first:,} to {first + len(page) - 1:,}.")


def _show(config: InspectConfig, page: list[InspectedRow], first: int) -> None:
    for number, row in enumerate(page, start=first):
        console.result(f"{number:>4}  {_heading(row)}")
        console.result_set_in(excerpts.visible(excerpts.shortened(row.text, config.characters)), 6)


def _heading(row: InspectedRow) -> str:
    parts = [row.reason, row.detail, row.language, row.id]
    return excerpts.harmless("  ".join(part for part in parts if part))
