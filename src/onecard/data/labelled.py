"""Texts with labels from rows: what a classifier learns from.

In: sources, and which field holds the label (`auto` recognises the usual names; where no row has one, the names of
the sources are the labels: a file for each class). Out: a stream of `Labelled`; a row without text or label is
refused with a reason. Labels are text: 1 and "1" are the same, and `null`, `NA` or `None` in a table are words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onecard.data.documents import text_of
from onecard.data.records import Rejection, Row, read_rows, refuse
from onecard.errors import DataError
from onecard.settings import Source

LABEL_FIELDS = (
    "label", "labels", "class", "category", "categories", "sentiment", "topic", "tag", "tags", "target",
    "标签", "类别", "分类", "情感",
)  # fmt: skip


# What a column calls the rows that measure, and those that are learned.
_SPLITS = {"held_out": True, "test": True, "dev": True, "valid": True, "validation": True, "eval": True, "train": False}


@dataclass(frozen=True, slots=True)
class Labelled:
    """One text, its labels (one where classes exclude each other), and where it stands.

    `held_out` is what the row itself says of that, if it does.
    """

    text: str
    labels: tuple[str, ...]
    file: str
    line: int
    source: str
    held_out: bool | None = None


def read_labelled(
    sources: Sequence[Source],
    *,
    label_field: str,
    several: bool,
    strict: bool,
    reject: Callable[[Rejection], None],
    split_field: str | None = None,
) -> Iterator[Labelled]:
    """Stream the rows of all sources in order; DataError at the end if not one could be used.

    `several`: a row may have several labels (a list) or none; else it has exactly one. `split_field`: where a row says
    whether it is held out.
    """
    kept = 0
    columns: dict[str, None] = {}
    by_source = label_field == "auto" and len(sources) > 1 and all(source.name for source in sources)
    for source in sources:
        for row in read_rows(source, strict=strict, reject=reject):
            columns.update(dict.fromkeys(map(str, row.values)))
            found = labels_of_row(row.values, label_field, several=several)
            if found is None and by_source:
                found = (source.name,)
            text = text_of(row.values, source.field)
            reason = _fault(text, found, several=several)
            held_out = None
            if split_field is not None:
                held_out = _SPLITS.get(str(row.values.get(split_field)).strip().lower())
                if held_out is None:
                    reason = reason or "unknown_split"
            if reason is not None:
                refuse(Rejection(reason, row.file, row.line, _shown(row)), strict=strict, reject=reject)
                continue
            assert text is not None and found is not None
            kept += 1
            yield Labelled(text, found, row.file, row.line, source.label, held_out)
    if not kept:
        raise DataError(
            f"No labelled text is left; the fields are: {', '.join(list(columns)[:20]) or 'none'}.",
            "Give rows with text and label; name others with label_field, and field of the source. Or give a file for "
            "each class, each source with the name of its class.",
        )


def _fault(text: str | None, labels: tuple[str, ...] | None, *, several: bool) -> str | None:
    if text is None:
        return "missing_text"
    if not text.strip():
        return "empty_text"
    if labels is None:
        return "missing_label"
    return "not_one_label" if not several and len(labels) != 1 else None


def labels_of_row(values: Mapping[str, Any], field: str, *, several: bool) -> tuple[str, ...] | None:
    """The labels of a row, each once, in their order; None without the field or with nothing in it."""
    by_name = {str(key).strip().lower(): value for key, value in values.items()}
    names = LABEL_FIELDS if field == "auto" else (field.lower(),)
    value = next((by_name[name] for name in names if by_name.get(name) is not None), None)
    if value is None:
        return None
    parts = value if isinstance(value, list) else [value]
    found = [text for part in parts if (text := _as_label(part)) is not None]
    if len(found) != len(parts):
        return None
    return tuple(dict.fromkeys(found)) if found or (several and isinstance(value, list)) else None


def _as_label(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # a table of numbers
    if isinstance(value, int | float | str):
        return str(value).strip() or None
    return None


def _shown(row: Row) -> str:
    return str(row.values)
