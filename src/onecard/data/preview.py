"""`onecard clean --dry-run N`: what each step would do to N documents spread over the sources. Writes nothing.

In: a configuration of `clean`. Out: counts by step and by reason, with examples. Duplicates are not looked for: they
are a matter of all documents together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from onecard import console
from onecard.config import CleanConfig
from onecard.data import excerpts
from onecard.data.documents import RawDocument, read_raw_documents
from onecard.data.records import Rejection
from onecard.data.sources import readable_label
from onecard.data.steps import Change, Steps
from onecard.errors import DataError

_EXAMPLES = 3
# A look ahead need not read everything: so much of each source (about 100 MB of Chinese), so much of each document.
_MOST_CHARACTERS_OF_A_SOURCE = 40_000_000
_LONGEST_DOCUMENT_CHARACTERS = 200_000
_EXCERPT_CHARACTERS = 100

Item = TypeVar("Item")


@dataclass
class _StepTally:
    """What one step did."""

    changed: int = 0
    changes: int = 0
    rejected: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def dry_run(config: CleanConfig, count: int) -> dict[str, Any]:
    """Apply the steps to `count` documents, evenly spread over each source, and show what they did.

    DataError if the sources hold no document.
    """
    steps = Steps(config)
    tallies: dict[str, _StepTally] = {name: _StepTally() for name in config.steps}
    reasons: Counter[str] = Counter()
    unreadable: Counter[str] = Counter()
    read = looked_at = changed = 0

    def reject(rejection: Rejection) -> None:
        unreadable[rejection.reason] += 1

    for number, source in enumerate(config.sources):
        share = count * (number + 1) // len(config.sources) - count * number // len(config.sources)
        documents = _beginning(read_raw_documents(source, strict=False, reject=reject))
        chosen, seen = spread(documents, share)
        read += seen
        for document in chosen:
            looked_at += 1
            made = list(steps.trace(document.text[:_LONGEST_DOCUMENT_CHARACTERS], source.language))
            changed += any(change.count for change in made)
            for change in made:
                _record(tallies[change.step], change, f"{readable_label(source)}:{document.line}")
                if change.reason is not None:
                    reasons[change.reason] += 1
    if not looked_at:
        raise DataError("The sources hold no text to look at.", "Give files with text.")
    result = {
        "read": read,
        "looked_at": looked_at,
        "kept": looked_at - reasons.total(),
        "changed": changed,
        "rejected": dict(reasons.most_common()),
        "unreadable_rows": dict(unreadable.most_common()),
        "steps": {
            name: {"changed": tally.changed, "changes": tally.changes, "rejected": tally.rejected}
            for name, tally in tallies.items()
        },
        "examples": {name: tally.examples for name, tally in tallies.items() if tally.examples},
    }
    _show(result)
    return result


def spread(items: Iterable[Item], count: int) -> tuple[list[Item], int]:
    """At most `count` items, evenly spread over the stream (all if there are no more), and how many it had.

    Holds twice as many at most: every item at first, then every second one, every fourth ...
    """
    kept: list[Item] = []
    step, seen = 1, 0
    for item in items:
        if count and seen % step == 0:
            kept.append(item)
            if len(kept) == 2 * count:
                kept = kept[::2]
                step *= 2
        seen += 1
    if len(kept) > count:
        kept = [kept[i * len(kept) // count] for i in range(count)]
    return kept, seen


def _beginning(documents: Iterator[RawDocument]) -> Iterator[RawDocument]:
    characters = 0
    for document in documents:
        yield document
        characters += len(document.text)
        if characters >= _MOST_CHARACTERS_OF_A_SOURCE:
            return


def _record(tally: _StepTally, change: Change, place: str) -> None:
    tally.changed += change.count > 0
    tally.changes += change.count
    tally.rejected += change.reason is not None
    if len(tally.examples) >= _EXAMPLES:
        return
    example = {"place": place, "reason": change.reason, "detail": change.detail}
    if change.reason is not None:
        example |= {"before": excerpts.shortened(change.before, _EXCERPT_CHARACTERS), "after": ""}
    else:
        before, after = excerpts.differences(change.before, change.after, _EXCERPT_CHARACTERS)
        example |= {"before": excerpts.bracketed(before), "after": excerpts.bracketed(after)}
    tally.examples.append(example)


def _show(result: dict[str, Any]) -> None:
    looked_at = result["looked_at"]
    rows = [
        [name, counts["changed"], counts["changes"], counts["rejected"], f"{counts['rejected'] / looked_at:.1%}"]
        for name, counts in result["steps"].items()
    ]
    console.table(
        f"What the steps would do to {looked_at:,} of {result['read']:,} documents",
        ["step", "documents changed", "changes", "rejected", "share"],
        rows,
    )
    if result["rejected"]:
        console.table("Reasons", ["reason", "documents"], list(result["rejected"].items()))
    if result["unreadable_rows"]:
        console.table("Rows that cannot be read", ["reason", "rows"], list(result["unreadable_rows"].items()))
    for name, examples in result["examples"].items():
        console.result(f"{name}")
        for example in examples:
            if example["reason"] is not None:
                console.result(f"  {example['place']}: {example['reason']} {example['detail']}".rstrip())
                console.result(f"    {excerpts.visible(example['before'])}")
            else:
                console.result(f"  {example['place']}")
                console.result(f"    - {example['before']}")
                console.result(f"    + {example['after']}")
        console.result()
    console.result(
        f"{result['kept']:,} of {looked_at:,} would be kept, {result['changed']:,} would be changed. "
        "Duplicates were not looked for, and nothing was written."
    )
