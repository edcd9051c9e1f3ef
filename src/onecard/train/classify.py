"""The verb `classify`: a model and labelled texts in, a run directory with a classifier out.

Works on encoders and on language models alike. What the classifier is worth is measured on held-out texts before it is
saved; what turns its logits into honest probabilities (a temperature, thresholds) is found on them and saved with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onecard import artifact, console
from onecard.config import ClassifyConfig
from onecard.data.labelled import Labelled, read_labelled
from onecard.data.packing import PackedRows
from onecard.data.records import Rejection
from onecard.data.rows import RejectionWriter
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.errors import ArtifactError, DataError
from onecard.model.classifier import encode_texts, head_names, load_classifier
from onecard.model.load import tokenizer_file, vocabulary_rows
from onecard.train.base import SPLITS, Base, kept_rows, open_run, say_rows
from onecard.train.class_report import examine
from onecard.train.classification import Classify
from onecard.train.directory import RunDirectory
from onecard.train.session import train
from onecard.train.task import Defaults, Task

USUAL_LENGTH = 512


def classify(config: ClassifyConfig) -> dict[str, Any]:
    """Train a classifier. Resumes an unfinished run with the same settings and inputs."""
    return train(prepare(config))


def prepare(config: ClassifyConfig) -> Task:
    """Everything that is decided before the run: inputs, rows, classes, model, what auto becomes."""
    opened = open_run(config, USUAL_LENGTH, chats=False)
    config, base, run, precision = opened.config, opened.base, opened.run, opened.precision
    found, stores = _stores(config, run, base)
    labels, weights = found["labels"], found["class_weights"]
    rows = PackedRows(stores["train"], config.row_tokens)
    held_out = PackedRows(stores["held_out"], config.row_tokens) if stores["held_out"].count else None

    def build() -> Any:
        model = load_classifier(base.directory, labels, several=config.several_labels)
        model.config.pad_token_id = base.tokenizer.pad_token_id
        model.config.class_tokens = config.row_tokens
        return base.adapted(model, config, precision, head_names(model)).train()

    return Task(
        verb="classify",
        config=config,
        run=run,
        precision=precision,
        tokenizer=base.tokenizer,
        architecture=base.architecture,
        build_model=build,
        rows=rows,
        held_out=held_out,
        weights=[1.0] * len(rows.per_source),
        packing=config.packing,
        objective=lambda padded: Classify(several=config.several_labels, weights=weights, padded=padded),
        takes_rows_apart=True,
        writes=False,
        defaults=_defaults(config, base.width),
        parents=opened.parents,
        sample_prompts=[],
        facts={"rows": found, "labels": labels},
        complete=base.completion(
            config, run, head_names, lambda path: load_classifier(path, labels, several=config.several_labels)
        ),
        examine=lambda model: examine(
            model, base.tokenizer, stores["held_out"], labels, run.path, several=config.several_labels
        ),
    )


def _defaults(config: ClassifyConfig, width: int) -> Defaults:
    """Devlin et al. 2018 take 2e-5 to 5e-5 at a width of 768 and three passes; narrower models are moved faster."""
    rate = 3e-5 * 768 / width
    if config.lora_rank:
        return Defaults(min(2e-3, 10 * rate), 0.015, 3.0, "adamw", 4096)
    return Defaults(min(1e-3, rate), 0.015, 3.0, "adamw", 4096)


# --- rows ---------------------------------------------------------------------------------------------------------


@dataclass
class _Tally:
    """What became of the rows: read = kept + dropped; truncated are among the kept."""

    read: int
    kept: int
    truncated: int
    dropped: dict[str, int]
    held_out: int


def _stores(config: ClassifyConfig, run: RunDirectory, base: Base) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    """What became of the rows, and the stores of train and held_out: those of an earlier process if they are whole."""
    try:
        kept = kept_rows(run)
        if kept is not None:
            return kept
    except ArtifactError:
        console.note("  the token store is incomplete and is made again")
    written, stores = _write_stores(config, run, base)
    return (run.plan["rows"] if run.plan is not None else written), stores


def _write_stores(
    config: ClassifyConfig, run: RunDirectory, base: Base
) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    rejected = run.path / "rejected-00000.jsonl"
    dropped: Counter[str] = Counter()
    with artifact.disk_faults(rejected), RejectionWriter(rejected) as rejections:

        def reject(rejection: Rejection) -> None:
            dropped[rejection.reason] += 1
            rejections.add(asdict(rejection))

        rows = list(
            read_labelled(
                config.sources,
                label_field=config.label_field,
                several=config.several_labels,
                strict=config.strict,
                reject=reject,
                split_field=config.split_field,
            )
        )
        read = len(rows) + dropped.total()
        kept = _agreed(rows, reject)
    labels = _in_order({label for row in kept for label in row.labels})
    if len(labels) < 2:
        raise DataError(
            f"All texts have the same label ({', '.join(labels) or 'none'}): there is nothing to tell apart.",
            "Give rows of at least two classes; name the field of the labels with label_field.",
        )
    splits = _split(config, kept)
    stores, truncated = {}, 0
    for name, items in splits.items():
        documents, cut = encode_texts(base.tokenizer, [row.text for row in items], config.row_tokens)
        truncated += cut
        stores[name] = _write_store(run, base, name, items, documents, labels, several=config.several_labels)
    tally = _Tally(read, len(kept), truncated, dict(dropped), len(splits["held_out"]))
    counts = Counter(label for row in splits["train"] for label in row.labels)
    say_rows(asdict(tally))
    _say(counts, labels)
    return {
        **asdict(tally),
        "labels": labels,
        "texts_of_label": {label: counts[label] for label in labels},
        "class_weights": _class_weights(config, counts, labels, len(splits["train"])),
    }, stores


def _agreed(rows: list[Labelled], reject: Any) -> list[Labelled]:
    """Each text once; those that stand there with different labels are left out altogether."""
    said: dict[str, set[tuple[str, ...]]] = {}
    marks = [artifact.hash_bytes(" ".join(row.text.split()).encode("utf-8", "surrogatepass")) for row in rows]
    for mark, row in zip(marks, rows):
        said.setdefault(mark, set()).add(tuple(sorted(row.labels)))
    kept: list[Labelled] = []
    seen: set[str] = set()
    for mark, row in zip(marks, rows):
        if len(said[mark]) > 1:
            reject(Rejection("conflicting_labels", row.file, row.line, row.text))
        elif mark in seen:
            reject(Rejection("exact_duplicate", row.file, row.line, row.text))
        else:
            seen.add(mark)
            kept.append(row)
    return kept


def _in_order(labels: set[str]) -> list[str]:
    """Numbers by their value, other names by their characters: the same order in every process."""
    if all(label.lstrip("-").isdigit() for label in labels):
        return sorted(labels, key=int)
    return sorted(labels)


def _split(config: ClassifyConfig, rows: list[Labelled]) -> dict[str, list[Labelled]]:
    """As the rows say it, else by the text; rows of a class that would have none to learn from are learned from."""
    splits: dict[str, list[Labelled]] = {name: [] for name in SPLITS}
    for row in rows:
        held_out = row.held_out
        if held_out is None:
            held_out = int(artifact.hash_json([config.seed, row.text])[:8], 16) / 16**8 < config.held_out
        splits["held_out" if held_out else "train"].append(row)
    learned = {label for row in splits["train"] for label in row.labels}
    unseen = [row for row in splits["held_out"] if not set(row.labels) <= learned]
    splits["train"] += unseen
    splits["held_out"] = [row for row in splits["held_out"] if set(row.labels) <= learned]
    return splits


def _write_store(
    run: RunDirectory,
    base: Base,
    name: str,
    rows: list[Labelled],
    documents: list[list[int]],
    labels: list[str],
    *,
    several: bool,
) -> TokenStore:
    number = {label: place for place, label in enumerate(labels)}
    store = write_store(
        run.tokens / name,
        (Encoded(row.source, ids) for row, ids in zip(rows, documents)),
        vocabulary=vocabulary_rows(base.tokenizer),
        tokenizer_hash=artifact.hash_file(tokenizer_file(base.directory)),
    )
    values = np.zeros((len(rows), len(labels) if several else 1))
    for place, row in enumerate(rows):
        for label in row.labels:
            if several:
                values[place, number[label]] = 1.0
            else:
                values[place, 0] = number[label]
    store.write_values(values)
    return store


def _class_weights(config: ClassifyConfig, counts: Counter[str], labels: list[str], texts: int) -> list[float] | None:
    """So that all classes count alike: 1 in the mean over the texts; for several labels that of a class's presence."""
    if config.class_weights == "none":
        return None
    if config.several_labels:
        return [(texts - counts[label]) / max(1, counts[label]) for label in labels]
    return [texts / (len(labels) * counts[label]) for label in labels]


def _say(counts: Counter[str], labels: list[str]) -> None:
    shown = ", ".join(f"{label} {counts[label]:,}" for label in labels[:20])
    console.note(f"  {len(labels)} classes: {shown}{' ...' if len(labels) > 20 else ''}")
    if min(counts[label] for label in labels) * 5 < max(counts.values()):
        console.note("  the classes differ much in size: class_weights = balanced lets the rare ones count as much")
