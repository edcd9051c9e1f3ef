"""The verb `predict`: a classifier and texts in, the class of every text out.

Out: predictions.jsonl, a line for each row in the order of the sources: text, label, probability, and the probabilities
of all classes; report.json with how often each class was said and, where rows have labels, how good that is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from onecard import artifact, console
from onecard.config import PredictConfig
from onecard.data.documents import text_of
from onecard.data.labelled import labels_of_row
from onecard.data.records import Rejection, Row, read_rows, refuse
from onecard.data.rows import RejectionWriter, encodable
from onecard.data.sources import source_files
from onecard.errors import DataError
from onecard.train import class_metrics

# Rows that are read, sorted by length and classified at a time: memory stays bounded.
ROWS_AT_A_TIME = 4096


class Classifier:
    """A classifier and its tokenizer, ready for texts."""

    def __init__(self, path: Path, *, device: str | None = None) -> None:
        from onecard.machine.calibrate import default_device
        from onecard.model.classifier import labels_of, load_classifier
        from onecard.model.encoder import readable_tokens
        from onecard.model.load import load_tokenizer

        self.model = load_classifier(path).to(device or default_device())
        self.tokenizer = load_tokenizer(path)
        self.labels = labels_of(self.model)
        self.several = self.model.config.problem_type == "multi_label_classification"
        config = self.model.config
        # Texts that were longer than what it reads.
        self.cut = 0
        longest = int(getattr(config, "class_tokens", 0) or getattr(config, "max_position_embeddings", 512))
        self.longest = readable_tokens(self.model, longest)

    def __call__(self, texts: list[str]) -> list[dict[str, Any]]:
        """Of each text: `label` (a list where classes are several), its `probability`, and all `probabilities`."""
        from onecard.model.classifier import chosen_labels, encode_texts, logits_of, probabilities

        documents, cut = encode_texts(self.tokenizer, texts, self.longest)
        self.cut += cut
        shares = probabilities(logits_of(self.model, documents), self.model.config)
        found = []
        for chosen, row in zip(chosen_labels(shares, self.model.config), shares.tolist()):
            names = [self.labels[number] for number in chosen]
            found.append(
                {
                    "label": names if self.several else names[0],
                    "probability": [row[number] for number in chosen] if self.several else row[chosen[0]],
                    "probabilities": dict(zip(self.labels, row)),
                }
            )
        return found


def predict(config: PredictConfig) -> dict[str, Any]:
    """Classify every row with text; rows without one are set aside and counted. DataError if there is none."""
    classifier = Classifier(config.model)
    inputs = [config.model, *(path for source in config.sources for path in source_files(source))]
    said: Counter[str] = Counter()
    aside: Counter[str] = Counter()
    count = 0
    compared: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
        lines = directory / "predictions.jsonl"
        with (
            artifact.disk_faults(lines),
            lines.open("w", encoding="utf-8", newline="\n") as opened,
            RejectionWriter(directory / "rejected-00000.jsonl") as rejections,
        ):

            def reject(rejection: Rejection) -> None:
                aside[rejection.reason] += 1
                rejections.add(asdict(rejection))

            for rows in _batches(_rows(config, reject)):
                count += len(rows)
                for (row, text), made in zip(rows, classifier([text for _, text in rows])):
                    names = tuple(made["label"]) if classifier.several else (made["label"],)
                    said.update(names)
                    wanted = labels_of_row(row.values, config.label_field, several=classifier.several)
                    if wanted is not None:
                        compared.append((wanted, names))
                    written = {"text": encodable(text), **made, "file": row.file, "line": row.line}
                    opened.write(json.dumps(written, ensure_ascii=False) + "\n")
        if not count:
            raise DataError("No row has text to classify.", "Name the field that holds it: field of the source.")
        result = {"read": count + aside.total(), "predicted": count, "rejected": dict(aside), "labels": dict(said)}
        result["truncated"] = classifier.cut
        result |= _comparison(classifier.labels, compared)
        artifact.write_json_atomically(directory / "report.json", result)
        artifact.write_manifest(directory, "predictions", settings=config.plain(), parents=inputs, result=result)
    _show(config, result, classifier)
    return {**result, "output": str(config.output)}


def _rows(config: PredictConfig, reject: Any) -> Iterator[tuple[Row, str]]:
    for source in config.sources:
        for row in read_rows(source, strict=config.strict, reject=reject):
            text = text_of(row.values, source.field)
            if text is None or not text.strip():
                rejection = Rejection("missing_text", row.file, row.line, str(row.values))
                refuse(rejection, strict=config.strict, reject=reject)
                continue
            yield row, text


def _batches(rows: Iterator[tuple[Row, str]]) -> Iterator[list[tuple[Row, str]]]:
    batch: list[tuple[Row, str]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_AT_A_TIME:
            yield batch
            batch = []
    if batch:
        yield batch


def _comparison(labels: list[str], compared: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> dict[str, Any]:
    """How good the predictions are where the rows had labels that the classifier knows."""
    known = [(wanted, said) for wanted, said in compared if set(wanted) <= set(labels)]
    unknown = Counter(name for wanted, _ in compared for name in wanted if name not in labels)
    if unknown:
        name, _ = unknown.most_common(1)[0]
        console.warn(
            f"{len(compared) - len(known):,} rows have a label that the classifier never learned, such as {name}: they "
            "are not compared."
        )
    if not known:
        return {}
    wanted, said = (np.array([[label in each[side] for label in labels] for each in known]) for side in (0, 1))
    found = class_metrics.summary(wanted, said)
    return {"compared": found.pop("texts"), **found, "classes": dict(zip(labels, found["classes"]))}


def _show(config: PredictConfig, result: dict[str, Any], classifier: Classifier) -> None:
    labels = classifier.labels
    classes = result.get("classes")
    columns = ["class", "said of", *(["precision", "recall", "F1"] if classes else [])]
    console.table(
        f"{result['predicted']:,} texts: {config.output}/predictions.jsonl",
        columns,
        [
            [
                label,
                f"{result['labels'].get(label, 0):,}",
                *([f"{classes[label][key]:.3f}" for key in ("precision", "recall", "f1")] if classes else []),
            ]
            for label in labels
        ],
    )
    if result["truncated"]:
        console.warn(
            f"{result['truncated']:,} texts are longer than the {classifier.longest} tokens that the model reads: they "
            "are judged by their beginning."
        )
    if classes:
        each = result["accuracy"]
        console.result(
            f"accuracy: {each['value']:.3f} (95 % interval {each['low']:.3f} to {each['high']:.3f}) on "
            f"{result['compared']:,} rows with labels"
        )
