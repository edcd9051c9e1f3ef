"""`onecard clean`: text in any encoding becomes a corpus directory.

Rows -> documents -> tidied -> language -> refused or not -> exact and near-duplicates -> split -> Parquet. Duplicates
go before the split, so that no held-out document repeats a training one. One pass over the input; texts wait in a file
on disk, so memory grows with the number of documents, not with their length.

Out: documents-*.parquet, rejected-00000.jsonl (the start of each refused text), report.json, report.html.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import CleanConfig
from onecard.data import clean_report, rules
from onecard.data.corpus import Document, write_documents
from onecard.data.dedup import NearDuplicates, TextFile, digest
from onecard.data.documents import RawDocument, read_raw_documents
from onecard.data.records import Rejection
from onecard.data.rows import RejectionWriter
from onecard.data.sources import readable_label, source_files
from onecard.data.split import held_out
from onecard.errors import DataError
from onecard.settings import Source

LONGEST_REJECTED_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is remembered of a kept document; its text has the same number in the TextFile."""

    id: str
    source: str
    language: str
    characters: int
    bytes: int


@dataclass
class _Tally:
    """Counts and examples that the report is made of."""

    kept: list[_Kept] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_by_source: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    changed: list[clean_report.Change] = field(default_factory=list)
    changed_count: int = 0


class _Aside:
    """Writes rejected-00000.jsonl and keeps count."""

    def __init__(self, writer: RejectionWriter, tally: _Tally) -> None:
        self._writer = writer
        self._tally = tally

    def add(self, reason: str, source: str, file: str, line: int, name: str, detail: str, text: str) -> None:
        """Record one refused row or document."""
        row: dict[str, Any] = {
            "reason": reason,
            "source": source,
            "file": file,
            "line": line,
            "id": name,
            "detail": detail,
            "text": text[:LONGEST_REJECTED_CHARACTERS],
        }
        row = self._writer.add(row)
        self._tally.rejected[reason] += 1
        self._tally.rejected_by_source[source] += 1
        if len(self._tally.examples[reason]) < clean_report.EXAMPLES:
            self._tally.examples[reason].append(row)


class _Cleaner:
    """Takes documents one by one and decides."""

    def __init__(self, config: CleanConfig, texts: TextFile, aside: _Aside, tally: _Tally) -> None:
        self._config = config
        self._texts = texts
        self._aside = aside
        self._tally = tally
        self._seen: dict[bytes, int] = {}
        self._near = NearDuplicates(config.near_duplicate_threshold, texts) if config.near_duplicates else None

    def take(self, raw: RawDocument, label: str, language: str) -> None:
        """Tidy, judge and keep (or set aside) one document."""
        config = self._config
        text = rules.normalise(raw.text)
        verdict = rules.refusal(
            text,
            minimum_characters=config.minimum_characters,
            maximum_repetition=config.maximum_repetition,
            maximum_symbol_ratio=config.maximum_symbol_ratio,
        ) or self._duplicate(text)
        if verdict is not None:
            self._aside.add(verdict[0], label, raw.file, raw.line, raw.id, verdict[1], raw.text)
            return
        number = self._texts.append(text)
        self._seen[digest(text)] = number
        if self._near is not None:
            self._near.keep(number)
        found = rules.language_of(text) if language == "auto" else language
        self._tally.kept.append(_Kept(raw.id, label, found, len(text), len(text.encode())))
        if text != raw.text:
            self._tally.changed_count += 1
            if len(self._tally.changed) < clean_report.CHANGES:
                self._tally.changed.append(clean_report.Change(raw.id, raw.text, text))

    def _duplicate(self, text: str) -> tuple[str, str] | None:
        earlier = self._seen.get(digest(text))
        if earlier is not None:
            return "exact_duplicate", self._tally.kept[earlier].id
        near = self._near.find(text) if self._near is not None else None
        if near is None:
            return None
        return "near_duplicate", f"{self._tally.kept[near[0]].id} (similarity {near[1]:.3f})"


def clean(config: CleanConfig) -> dict[str, Any]:
    """Make a corpus directory; returns report.json's content and the output path.

    `read` counts documents, and rows that were refused before they became one: read = kept + sum of rejected.
    DataError if nothing is left, for a source that is missing, and (with `strict`) at the first unreadable row.
    """
    sources = _distinct(config.sources)
    files = [source_files(source) for source in sources]
    # A folder too, not its files alone: what is written into it would be read as text the next time.
    folders = [path for source in sources if (path := Path(source.path).expanduser()).is_dir()]
    inputs = [*folders, *(path for source in files for path in source)]
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
        tally = _Tally()
        waiting = directory / ".texts"
        with (
            TextFile(waiting) as texts,
            RejectionWriter(directory / "rejected-00000.jsonl") as writer,
        ):
            _clean_sources(config, sources, files, texts, _Aside(writer, tally), tally)
            if not tally.kept:
                raise _nothing_left(tally)
            by_source: dict[str, list[str]] = {source.name: [] for source in sources}
            for item in tally.kept:
                by_source[item.source].append(item.id)
            chosen = held_out(by_source, config.held_out, config.seed)
            write_documents(directory, _documents(tally, texts, chosen))
        waiting.unlink()
        report = _report(tally, [source.name for source in sources], chosen)
        artifact.write_json_atomically(directory / "report.json", report)
        clean_report.page(report, tally.examples, tally.changed, [item.characters for item in tally.kept]).save(
            directory / "report.html"
        )
        parents = [path for source in files for path in source]
        artifact.write_manifest(directory, "corpus", settings=config.plain(), parents=parents, result=report)
    _show(config, report)
    return {**report, "output": str(config.output)}


def _distinct(sources: list[Source]) -> list[Source]:
    """Give each source its name for reports; equal ones get a number, so that ids stay unique."""
    used: Counter[str] = Counter()
    made: list[Source] = []
    for source in sources:
        name = readable_label(source)
        used[name] += 1
        count = used[name]
        made.append(source.model_copy(update={"name": name if count == 1 else f"{name} ({count})"}))
    return made


def _clean_sources(
    config: CleanConfig,
    sources: list[Source],
    files: list[list[Path]],
    texts: TextFile,
    aside: _Aside,
    tally: _Tally,
) -> None:
    cleaner = _Cleaner(config, texts, aside, tally)
    sizes = {str(path): path.stat().st_size for paths in files for path in paths}
    with console.progress("cleaning", sum(sizes.values()), "bytes") as bar:
        done: Counter[str] = Counter()
        for source in sources:

            def reject(rejection: Rejection, name: str = source.name) -> None:
                place = f"{name}:{rejection.line}" if rejection.line else name
                aside.add(rejection.reason, name, rejection.file, rejection.line, place, "", rejection.text)

            for raw in read_raw_documents(source, strict=config.strict, reject=reject):
                cleaner.take(raw, source.name, source.language)
                # Bytes of text stand in for bytes of the file, which may be compressed or hold more than text.
                advance = min(len(raw.text.encode("utf-8", "replace")), sizes[raw.file] - done[raw.file])
                done[raw.file] += advance
                bar.advance(advance, f"{len(tally.kept):,} kept")
        bar.advance(sum(sizes.values()) - done.total(), f"{len(tally.kept):,} kept")


def _documents(tally: _Tally, texts: TextFile, chosen: set[str]) -> Iterator[Document]:
    for item, text in zip(tally.kept, texts):
        yield Document(item.id, text, item.source, item.language, "held_out" if item.id in chosen else "train")


def _nothing_left(tally: _Tally) -> DataError:
    if not tally.rejected:
        return DataError("The sources hold no text.", "Give files with text.")
    reason, count = max(tally.rejected.items(), key=lambda pair: (pair[1], pair[0]))
    example = tally.examples[reason][0]
    remedies = {
        "too_short": "Lower minimum_characters, or join rows with group_by or split.",
        "too_repetitive": "Raise maximum_repetition.",
        "too_many_symbols": "Raise maximum_symbol_ratio.",
        "unsupported_file": "Give text in one of the formats that `onecard clean --help` names.",
        "unknown_encoding": "Name the encoding of the source in a recipe, such as encoding = 'gb18030'.",
    }
    return DataError(
        f"No document is left: {reason} took {count:,} of {tally.rejected.total():,}, such as line "
        f"{example['line']} of {example['file']}.",
        remedies.get(reason, "Look at that place and mend it."),
    )


def _report(tally: _Tally, labels: list[str], chosen: set[str]) -> dict[str, Any]:
    empty = {"read": 0, "kept": 0, "rejected": 0, "characters": 0, "bytes": 0, "held_out": 0}
    by_source: dict[str, dict[str, int]] = {label: dict(empty) for label in labels}
    by_language: dict[str, dict[str, int]] = {}
    for label, count in tally.rejected_by_source.items():
        by_source[label]["rejected"] = by_source[label]["read"] = count
    for item in tally.kept:
        by_source[item.source]["read"] += 1
        language = by_language.setdefault(item.language, {"kept": 0, "characters": 0, "bytes": 0, "held_out": 0})
        for group in (by_source[item.source], language):
            group["kept"] += 1
            group["characters"] += item.characters
            group["bytes"] += item.bytes
            group["held_out"] += item.id in chosen
    return {
        "read": len(tally.kept) + tally.rejected.total(),
        "kept": len(tally.kept),
        "rejected": dict(sorted(tally.rejected.items(), key=lambda pair: (-pair[1], pair[0]))),
        "characters": sum(item.characters for item in tally.kept),
        "bytes": sum(item.bytes for item in tally.kept),
        "held_out": len(chosen),
        "changed": tally.changed_count,
        "by_source": by_source,
        "by_language": dict(sorted(by_language.items())),
    }


def _show(config: CleanConfig, report: dict[str, Any]) -> None:
    keys = ("read", "kept", "rejected", "held_out", "characters")
    rows = [[label, *(counts[key] for key in keys)] for label, counts in report["by_source"].items()]
    console.table(f"Corpus {config.output}", ["source", *(key.replace("_", " ") for key in keys)], rows)
    if report["rejected"]:
        console.table("Rejected (see rejected-00000.jsonl)", ["reason", "rows"], list(report["rejected"].items()))
    console.result(f"{report['kept']:,} documents, {report['characters']:,} characters. {config.output}/report.html")
    if config.held_out > 0 and not report["held_out"]:
        console.warn(
            "no document is held out (fewer than 10 in each source): nothing is kept back to measure with. "
            "Split long texts (split = 'paragraph'), or raise held_out."
        )
