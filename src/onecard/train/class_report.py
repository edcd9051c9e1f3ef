"""What a classifier is worth on texts it has not learned from, as figures, as a page, and as settings saved with it.

In: the trained model and the store of held-out texts. Out: the temperature (and thresholds) in the model's
configuration, classification.json and classification.html in the run, and the few figures that stand in its result.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onecard import artifact, console
from onecard.data.tokens import TokenStore
from onecard.model import attention
from onecard.model.classifier import TEMPERATURE, THRESHOLDS, logits_of
from onecard.report import Page
from onecard.train import class_metrics
from onecard.train.compilation import uncompiled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST = 20
# More classes than this are not drawn: nobody could read the squares.
MOST_DRAWN = 30


def examine(
    model: Any, tokenizer: Any, store: TokenStore, labels: list[str], run: Path, *, several: bool
) -> dict[str, Any]:
    """Measure on all texts of the store; without any, the probabilities stay as the model gives them."""
    if not store.count:
        console.note("  no text is held out: how good the classifier is stays unknown")
        return {}
    attention.use_own(model)
    model.eval()
    edges = store.starts.tolist()
    documents = [store.tokens[begin:end].astype(int).tolist() for begin, end in zip(edges, edges[1:])]
    with uncompiled():
        logits_SC = logits_of(model, documents).double().numpy()
    assert store.values is not None
    wanted_SC = _wanted(store.values, len(labels), several=several)
    warmth = class_metrics.temperature(logits_SC, wanted_SC, several=several)
    setattr(model.config, TEMPERATURE, warmth)
    shares_SC = shares(logits_SC / warmth, several=several)
    limits = class_metrics.best_thresholds(shares_SC, wanted_SC) if several else None
    if limits is not None:
        setattr(model.config, THRESHOLDS, limits)
    said_SC = shares_SC >= np.array(limits) if limits is not None else _one_hot(shares_SC.argmax(1), len(labels))
    found = class_metrics.summary(wanted_SC, said_SC)
    found["classes"] = dict(zip(labels, found["classes"]))
    found |= {
        "log_loss": class_metrics.log_loss(logits_SC / warmth, wanted_SC, several=several),
        "temperature": warmth,
        "thresholds": limits,
        "calibration_error": {
            name: _calibration(shares(logits_SC / by, several=several), wanted_SC, several=several)
            for name, by in (("before", 1.0), ("after", warmth))
        },
    }
    if not several:
        found["confusion"] = class_metrics.confusion(wanted_SC.argmax(1), said_SC.argmax(1), len(labels)).tolist()
    worst = _worst(tokenizer, documents, shares_SC, wanted_SC, said_SC, labels)
    artifact.write_json_atomically(run / "classification.json", {**found, "worst": worst})
    page(found, labels, worst, run.name).save(run / "classification.html")
    show(found, labels)
    return {
        "texts": found["texts"],
        "accuracy": found["accuracy"],
        "macro_f1": found["macro_f1"],
        "calibration_error": found["calibration_error"]["after"],
    }


def shares(logits_SC: NDArray[np.float64], *, several: bool) -> NDArray[np.float64]:
    """Probabilities: of each class alone, or adding up to 1."""
    if several:
        return np.asarray(1 / (1 + np.exp(-logits_SC)))
    raised = np.exp(logits_SC - logits_SC.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


def _wanted(values: NDArray[np.float64], classes: int, *, several: bool) -> NDArray[np.bool_]:
    return values > 0.5 if several else _one_hot(values[:, 0].astype(np.int64), classes)


def _one_hot(numbers_S: NDArray[np.int64], classes: int) -> NDArray[np.bool_]:
    return np.asarray(np.arange(classes) == numbers_S[:, None])


def _calibration(shares_SC: NDArray[np.float64], wanted_SC: NDArray[np.bool_], *, several: bool) -> float:
    """Of the class that is said; where classes are several, of all of them."""
    if several:
        return class_metrics.calibration_error(shares_SC.ravel(), wanted_SC.ravel())
    said_S = shares_SC.argmax(1)
    return class_metrics.calibration_error(shares_SC.max(1), wanted_SC[np.arange(len(said_S)), said_S])


def _worst(
    tokenizer: Any,
    documents: list[list[int]],
    shares_SC: NDArray[np.float64],
    wanted_SC: NDArray[np.bool_],
    said_SC: NDArray[np.bool_],
    labels: list[str],
) -> list[dict[str, Any]]:
    """The texts about which the classifier is wrong and most sure: often it is the label that is wrong."""
    # How far the least believed of the wanted, or the most believed of the others, is off.
    off_S = np.where(wanted_SC, 1 - shares_SC, shares_SC).max(1)
    wrong_S = (wanted_SC != said_SC).any(1)
    order = [int(number) for number in np.argsort(-off_S, kind="stable") if wrong_S[number]][:WORST]
    return [
        {
            "text": tokenizer.decode(documents[number], skip_special_tokens=True)[:400],
            "label": [label for label, yes in zip(labels, wanted_SC[number]) if yes],
            "said": [label for label, yes in zip(labels, said_SC[number]) if yes],
            "probability": float(shares_SC[number].max()),
        }
        for number in order
    ]


def show(found: dict[str, Any], labels: list[str]) -> None:
    """The figures, for the terminal."""
    console.table(
        f"{found['texts']:,} held-out texts",
        ["class", "texts", "precision", "recall", "F1"],
        [
            [label, f"{each['texts']:,}", *(f"{each[key]:.3f}" for key in ("precision", "recall", "f1"))]
            for label, each in found["classes"].items()
        ],
    )
    for name, key in (("accuracy", "accuracy"), ("macro F1", "macro_f1")):
        each = found[key]
        console.result(f"{name}: {each['value']:.3f} (95 % interval {each['low']:.3f} to {each['high']:.3f})")
    if len(labels) == 2 and found["texts"] < 200:
        console.note("  so few held-out texts say little: see the width of the intervals")


def page(found: dict[str, Any], labels: list[str], worst: list[dict[str, Any]], name: str) -> Page:
    """The figures as a page: classes, confusion as a picture, calibration, and the worst mistakes."""
    made = Page(f"classify: {name}", f"{len(labels)} classes, measured on {found['texts']:,} held-out texts")
    made.facts(
        {
            key.replace("_", " "): f"{found[key]['value']:.3f} ({found[key]['low']:.3f} to {found[key]['high']:.3f})"
            for key in ("accuracy", "macro_f1")
        }
        | {"log loss (nats)": f"{found['log_loss']:.3f}", "temperature": f"{found['temperature']:.2f}"}
    )
    made.heading("Classes")
    made.table(
        ["class", "texts", "precision", "recall", "F1"],
        [
            [label, each["texts"], *(f"{each[key]:.3f}" for key in ("precision", "recall", "f1"))]
            for label, each in found["classes"].items()
        ],
    )
    if "confusion" in found and len(labels) <= MOST_DRAWN:
        made.heading("What is taken for what")
        made.figure(
            functools.partial(_draw_confusion, counts=np.array(found["confusion"]), labels=labels),
            "Rows: the class of the text. Columns: what was said.",
            height=1.2 + 0.35 * len(labels),
        )
    made.heading("Whether its probabilities can be believed")
    errors = found["calibration_error"]
    made.paragraph(
        f"Stated and true frequencies differ by {errors['before']:.3f} in the mean as the model gives them, and by "
        f"{errors['after']:.3f} at the temperature of {found['temperature']:.2f} that is saved with the model. (It was "
        "found on these same texts, so on others the second figure will be a little larger.)"
    )
    if found["thresholds"]:
        made.table(
            ["class", "said from this probability on"],
            [[label, f"{limit:.3f}"] for label, limit in zip(labels, found["thresholds"])],
            caption="Each is the threshold with the highest F1 on these texts.",
        )
    if worst:
        made.heading("Mistakes of which it was most sure")
        made.table(
            ["text", "label", "said", "probability"],
            [[w["text"], ", ".join(w["label"]), ", ".join(w["said"]), f"{w['probability']:.2f}"] for w in worst],
            caption="Look at the labels first: where the model is so sure, they are often the ones that are wrong.",
        )
    return made


def _draw_confusion(axes: Axes, counts: NDArray[np.int64], labels: list[str]) -> None:
    sums = counts.sum(1, keepdims=True)
    rates = np.divide(counts, sums, out=np.zeros(counts.shape), where=sums > 0)
    axes.imshow(rates, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(counts.tolist()):
        for column, count in enumerate(line):
            dark = rates[row, column] > 0.5
            axes.text(column, row, f"{count:,}", ha="center", va="center", color="white" if dark else "#344054")
    axes.set_xticks(range(len(labels)), labels, rotation=45 if len(labels) > 6 else 0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("said")
    axes.set_ylabel("label")
