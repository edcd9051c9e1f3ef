"""`onecard clean`: text in any encoding becomes a corpus directory.

Rows -> documents -> steps (shards.py, on all cores) -> exact and near-duplicates (duplicates.py) -> split -> Parquet
(publish.py). Duplicates go before the split, so that no held-out document repeats a training one. What is worked on
lies in a hidden folder beside the output; after a kill the same command goes on there. Memory grows with the number
of documents (about 100 bytes each), not with their length.

Out: documents-*.parquet, rejected-*.jsonl (the start of each refused text), report.json, report.html.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import CleanConfig
from onecard.data import clean_report, contamination, paragraphs, preview, publish, refinery
from onecard.data.clusters import largest_clusters
from onecard.data.duplicates import Table, Verdicts, decide, read_table
from onecard.data.shards import arrays_of
from onecard.data.sources import readable_label, source_files
from onecard.data.split import held_out
from onecard.data.workers import Workers, available_cores
from onecard.errors import DataError
from onecard.report import Page
from onecard.settings import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Below this, starting workers takes longer than what they save.
_WORTH_WORKERS_BYTES = 4 << 20
_EMPTY = {"read": 0, "kept": 0, "rejected": 0, "characters": 0, "bytes": 0, "held_out": 0}


@dataclass(frozen=True, slots=True)
class _Found:
    """All that was decided: the documents, what they repeat, which are held out."""

    sources: list[Source]
    tally: refinery.Tally
    table: Table
    verdicts: Verdicts
    source_of: NDArray[np.int64]
    held_out: NDArray[np.bool_]

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Which documents are kept."""
        return self.verdicts.repeats < 0


def clean(config: CleanConfig) -> dict[str, Any]:
    """Make a corpus directory; returns report.json's content and the output path.

    `read` counts documents, and rows that were refused before they became one: read = kept + sum of rejected.
    DataError if nothing is left, for a source that is missing, and (with `strict`) at the first unreadable row.
    """
    if config.dry_run is not None:
        return preview.dry_run(config, config.dry_run)
    sources = _distinct(config.sources)
    files = [source_files(source) for source in sources]
    # A folder too, not its files alone: what is written into it would be read as text the next time.
    folders = [path for source in sources if (path := Path(source.path).expanduser()).is_dir()]
    inputs = [*folders, *(path for source in files for path in source)]
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=inputs)
    with (
        artifact.disk_faults(config.output),
        refinery.working_folder(config.output, refinery.fingerprint(config, files)) as folder,
    ):
        with _workers(config, files, folder) as workers:
            contamination.prepare(config.decontaminate, folder)
            tally = refinery.make_shards(config, folder, sources, files, workers)
            place = folder
            if config.repeated_paragraphs:
                place, tally = paragraphs.without_repeated(config, folder, tally, workers)
            table = read_table(place, tally.shards)
            verdicts = decide(config, table, workers)
            source_of = _source_of(tally, table)
            if not (verdicts.repeats < 0).any():
                raise _nothing_left(tally)
            chosen = _held_out(config, table, verdicts, source_of)
            found = _Found(sources, tally, table, verdicts, source_of, chosen)
            parts = list(publish.publish(table, verdicts, chosen, workers))
        examples = publish.merged_examples([tally.examples, *(part["examples"] for part in parts)])
        report = _report(found)
        with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
            for path in sorted((place / "out").iterdir()):
                if path.suffix in (".parquet", ".jsonl"):
                    _put(path, directory / path.name)
            artifact.write_json_atomically(directory / "report.json", report)
            _page(found, report, examples).save(directory / "report.html")
            parents = [path for source in files for path in source]
            artifact.write_manifest(directory, "corpus", settings=config.plain(), parents=parents, result=report)
    _show(config, report)
    return {**report, "output": str(config.output)}


def _page(found: _Found, report: dict[str, Any], examples: dict[str, list[dict[str, Any]]]) -> Page:
    changes = [clean_report.Change(*texts) for at, *texts in found.tally.changed_examples if found.kept[at]]
    language_of, languages = publish.languages_of(found.table)
    characters = found.table.characters
    lengths = {name: characters[found.kept & (language_of == number)] for number, name in enumerate(languages)}
    return clean_report.page(report, examples, changes, lengths, largest_clusters(found.table, found.verdicts))


def _put(path: Path, place: Path) -> None:
    """Have a file in another folder too, without a copy where the file system can: a kill now loses neither."""
    try:
        place.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, place)


def _workers(config: CleanConfig, files: Sequence[Sequence[Path]], folder: Path) -> Workers:
    count = None if config.workers == "auto" else config.workers
    if config.engine == "ray":
        from onecard.data.ray_workers import RayWorkers

        return RayWorkers(count, config.ray_address, folder.resolve())
    size = sum(path.stat().st_size for paths in files for path in paths)
    return Workers(count or (available_cores() if size >= _WORTH_WORKERS_BYTES else 1))


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


def _source_of(tally: refinery.Tally, table: Table) -> NDArray[np.int64]:
    """The source of each document."""
    import numpy as np

    return np.repeat(np.array(tally.shard_sources, dtype=np.int64), np.diff(table.starts))


def _held_out(config: CleanConfig, table: Table, verdicts: Verdicts, source_of: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which documents are held out: in each source those of the kept ones with the smallest ranks."""
    import numpy as np

    shards = range(len(table.starts) - 1)
    ranks = np.concatenate([arrays_of(table.folder, shard, ["ranks"])[0] for shard in shards])
    chosen = np.zeros(table.documents, dtype=bool)
    for source in np.unique(source_of).tolist():
        places = np.flatnonzero((source_of == source) & (verdicts.repeats < 0))
        chosen[places[held_out(ranks[places], config.held_out)]] = True
    return chosen


def _nothing_left(tally: refinery.Tally) -> DataError:
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


def _report(found: _Found) -> dict[str, Any]:
    import numpy as np

    rejected = found.tally.rejected + publish.rejected_counts(found.verdicts)
    language_of, languages = publish.languages_of(found.table)
    changed = np.concatenate(
        [arrays_of(found.table.folder, shard, ["changed"])[0] for shard in range(found.tally.shards)]
    )
    labels = [source.name for source in found.sources]
    by_source = _grouped(found, found.source_of, labels, {label: dict(_EMPTY) for label in labels})
    repeated = np.bincount(found.source_of[~found.kept], minlength=len(labels)).tolist()
    for label, count in zip(labels, repeated):
        group = by_source[label]
        group["rejected"] = found.tally.rejected_by_source[label] + count
        group["read"] = group["kept"] + group["rejected"]
    empty = {"kept": 0, "characters": 0, "bytes": 0, "held_out": 0}
    by_language = _grouped(found, language_of, languages, {label: dict(empty) for label in languages})
    kept = found.kept
    return {
        "read": int(kept.sum()) + rejected.total(),
        "kept": int(kept.sum()),
        "rejected": dict(sorted(rejected.items(), key=lambda pair: (-pair[1], pair[0]))),
        "characters": int(found.table.characters[kept].sum(dtype=np.int64)),
        "bytes": int(found.table.lengths[kept].sum(dtype=np.int64)),
        "held_out": int(found.held_out.sum()),
        "changed": int((changed & kept).sum()),
        "changes": dict(sorted(found.tally.changes.items())),
        "by_source": by_source,
        "by_language": dict(sorted((name, group) for name, group in by_language.items() if group["kept"])),
    }


def _grouped(
    found: _Found, group_of: NDArray[np.int64], labels: list[str], groups: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Counts of the kept documents of each group."""
    import numpy as np

    of = group_of[found.kept]
    weights: dict[str, NDArray[Any]] = {
        "kept": np.ones(len(of), dtype=np.int64),
        "characters": found.table.characters[found.kept],
        "bytes": found.table.lengths[found.kept],
        "held_out": found.held_out[found.kept],
    }
    for key, values in weights.items():
        for label, total in zip(labels, np.bincount(of, weights=values, minlength=len(labels)).tolist()):
            groups[label][key] = int(total)
    return groups


def _show(config: CleanConfig, report: dict[str, Any]) -> None:
    keys = ("read", "kept", "rejected", "held_out", "characters")
    rows = [[label, *(counts[key] for key in keys)] for label, counts in report["by_source"].items()]
    console.table(f"Corpus {config.output}", ["source", *(key.replace("_", " ") for key in keys)], rows)
    if report["rejected"]:
        console.table("Rejected (see rejected-00000.jsonl)", ["reason", "rows"], list(report["rejected"].items()))
    console.result(f"{report['kept']:,} documents, {report['characters']:,} characters. {config.output}/report.html")
    kinds = {what.partition(": ")[2]: count for what, count in report["changes"].items() if ": " in what}
    if kinds:
        found = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        console.note(f"  Personal data was masked: {found}. The report shows examples; personal_data = keep leaves it.")
    if config.held_out > 0 and not report["held_out"]:
        console.warn(
            "no document is held out (fewer than 10 in each source): nothing is kept back to measure with. "
            "Split long texts (split = 'paragraph'), or raise held_out."
        )
