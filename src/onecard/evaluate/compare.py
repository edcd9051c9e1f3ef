"""`onecard compare`: is a model better than its base? The same held-out rows to both, and intervals of the differences.

In: two models, rows, general text. Out: a directory with report.json and report.html; the result holds each measure of
both models with the 95 % interval of its difference, and a verdict in words.

Rows that one of the models learned from are left out: a run's manifest tells its files and which of their rows it held
out. How things are measured stands in `measuring` and `bootstrap`, how they are shown in `comparison`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import CompareConfig
from onecard.data.corpus import Document, Split, read_documents
from onecard.data.cutting import best_cut
from onecard.data.documents import read_raw_documents
from onecard.data.preview import spread
from onecard.data.rules import language_of
from onecard.data.sources import source_files
from onecard.errors import ConfigError, DataError
from onecard.evaluate import comparison
from onecard.evaluate.ancestry import learned_by, trainings
from onecard.evaluate.bootstrap import FEWEST_ROWS, Difference, paired, ratio
from onecard.evaluate.choices import WAYS
from onecard.evaluate.instructions import kept
from onecard.evaluate.measuring import AnswerCost, Measured, Work, measure, window, without_refused
from onecard.evaluate.questions import Question, choose
from onecard.evaluate.repetition import repeated_share, units
from onecard.evaluate.similarity import bleu, bleu_counts, chrf, chrf_counts, exact_match, f1, rouge_2, rouge_l
from onecard.settings import Source

# General text is measured in pieces of about this length: they are what is drawn anew for the intervals.
PIECE_CHARACTERS = 2000

Rows = list[list[float]]


def compare(config: CompareConfig) -> dict[str, Any]:
    """Measure both, show, and write the directory.

    The result: `measures` by name (`base`, `model`, `difference`, `low`, `high`, `rows`, `verdict`, `unit`) and
    `verdict`, sentences. ConfigError without rows and text; ArtifactError for what is no model; DataError where no row
    is left.
    """
    from onecard.model.load import model_directory

    if not config.sources and not config.text:
        raise ConfigError("There is nothing to compare on.", "Give --sources (held-out rows), --text, or both.")
    paths = {"base": config.base, "model": config.model}
    for path in paths.values():
        model_directory(path)
    rows, known, left_out = _rows(config) if config.sources else ({}, False, 0)
    rows = without_refused(rows, paths.values())
    text = _text(config)
    if not (text or any(rows.values())):
        raise DataError("No row is left to compare on.", "Give rows that the chat templates of both models take.")
    work = Work(
        window_tokens=window(config.window_tokens, list(paths.values())),
        max_new_tokens=config.max_new_tokens,
        chats=rows.get("chats", []),
        asked=rows.get("asked", []),
        choices=rows.get("choices", []),
        documents=(lambda: text) if text else None,
        document_bytes=sum(len(piece.text.encode()) for piece in text),
        template_from=config.model,
        learn=config.learn,
    )
    parents = [*paths.values(), *(path for source in config.sources for path in source_files(source))]
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=parents) as temporary:
        measured = {name: measure(name, path, work) for name, path in paths.items()}
        measures = _measures(config, work, measured["base"], measured["model"])
        result = {
            "measures": measures,
            "verdict": comparison.verdict(measures, learned_before=known),
            "learned_before": known,
            "left_out": left_out,
            "output": str(config.output),
        }
        report = {
            "result": result,
            "settings": config.plain(),
            "models": {
                name: {"path": one.path, "parameters": one.parameters, **one.behaviour()}
                for name, one in measured.items()
            },
            "rows": _row_losses(work.chats, measured),
            "answers": _answers(measured),
            "choices": _choices(measured),
        }
        artifact.write_json_atomically(temporary / "report.json", report)
        comparison.page(report).save(temporary / "report.html")
        artifact.write_manifest(temporary, "comparison", settings=config.plain(), parents=parents, result=result)
    comparison.show(report)
    return result


# --- what is compared on ------------------------------------------------------------------------------------------


def _rows(config: CompareConfig) -> tuple[dict[str, list[Question]], bool, int]:
    """Chats to score, questions to ask (some of those chats, and rows with checks), multiple choice; whether the models
    know them (only where nothing else is there); and how many rows are left out because they do."""
    found = [training for path in (config.base, config.model) for training in trainings(path)]
    learned = learned_by(found)
    left_out: set[tuple[str, int]] = set()

    def new(question: Question) -> bool:
        if not learned(question):
            return True
        left_out.add((question.file, question.line))
        return False

    def choose_of(which: Callable[[Question], bool]) -> dict[str, list[Question]]:
        chosen = choose(
            config.sources,
            config.seed,
            {
                "chats": (config.rows, lambda q: q.answer is not None and not q.checks and which(q)),
                "choices": (config.rows, lambda q: bool(q.choices) and which(q)),
                "checked": (config.question_count, lambda q: bool(q.checks) and which(q)),
            },
        )
        asked, _ = spread(chosen["chats"], config.question_count)
        return {"chats": chosen["chats"], "choices": chosen["choices"], "asked": asked + chosen["checked"]}

    rows = choose_of(new)
    if any(rows.values()):
        if left_out:
            runs = ", ".join(str(training.run) for training in found)
            console.note(f"  {len(left_out):,} rows are left out: {runs} learned from them")
        return rows, False, len(left_out)
    console.warn(
        "The models learned from all of these rows: what is measured shows what they know by heart. Rows held back "
        "(held_out of finetune) or other rows would tell more."
    )
    return choose_of(lambda _: True), True, 0


def _text(config: CompareConfig) -> list[Document]:
    """Pieces of general text, evenly spread over each language; each is its own `source`, so that it is scored apart.

    Languages with enough pieces share the characters equally; of others all few pieces are taken.
    """
    if not config.text:
        return []
    counts = Counter(language for source in config.text for _, language in _pieces(source))
    if not counts:
        raise DataError("There is no text to measure.", "Give a corpus directory with held-out text, or files of text.")
    common = [language for language, count in counts.items() if count >= FEWEST_ROWS]
    limit = config.text_characters // max(1, len(common))
    chosen: list[tuple[str, str]] = []
    for wanted in sorted(counts):
        pieces = (piece for source in config.text for piece in _pieces(source) if piece[1] == wanted)
        some, _ = spread(pieces, max(1, limit // 50))  # pieces that are short on average are many
        characters = sum(len(text) for text, _ in some)
        if characters > limit:
            some, _ = spread(some, max(1, round(len(some) * limit / characters)))
        chosen += some
    return [Document(str(number), text, str(number), language) for number, (text, language) in enumerate(chosen)]


def _pieces(source: Source) -> Iterator[tuple[str, str]]:
    """(text, language) of a corpus (its held-out documents; all of one that has none) or of files."""
    path = Path(source.path)
    documents: Iterable[tuple[str, str]]
    if (path / artifact.MANIFEST).is_file():
        split: Split = "held_out" if next(read_documents(path, "held_out"), None) else "train"
        if split == "train":
            console.warn(f"The corpus {path} holds no held-out text: what its models read in training is measured.")
        documents = ((item.text, item.language) for item in read_documents(path, split))
    else:
        raw = read_raw_documents(source, strict=False, reject=lambda _: None)
        documents = ((item.text, "") for item in raw)
    for text, language in documents:
        start = 0
        while start < len(text):
            rest = len(text) - start
            cut = len(text) if rest <= PIECE_CHARACTERS else best_cut(text, start + 1000, start + PIECE_CHARACTERS)
            if text[start:cut].strip():
                yield text[start:cut], language or language_of(text[start:cut])
            start = cut


# --- differences --------------------------------------------------------------------------------------------------


def _measures(config: CompareConfig, work: Work, base: Measured, model: Measured) -> dict[str, Any]:
    """Every measure of both, with the interval of the difference."""
    made: dict[str, Any] = {}

    def add(name: str, pair: tuple[Rows, Rows], statistic: Callable[..., Any] = ratio, unit: str = "share") -> None:
        if pair[0]:
            difference: Difference = paired(*pair, statistic, seed=config.seed)
            higher = name not in comparison.LOWER_IS_BETTER and unit == "share"
            made[name] = {"unit": unit, **difference.plain(higher_is_better=higher)}

    costs = [pair for pair in zip(base.costs, model.costs) if pair[0] is not None and pair[1] is not None]
    _say_left_out(len(base.costs) - len(costs))
    same = all(one.tokens == other.tokens for one, other in costs if one and other)
    add("loss", _cost_rows(costs, same), unit="nats a token" if same else "bits a byte")
    asked = list(zip(work.asked, base.answers, model.answers))
    referenced = [(b.text, m.text, q.reference) for q, b, m in asked if q.answer is not None]

    def each(value: Callable[[str, str], float]) -> tuple[Rows, Rows]:
        return (
            [[float(value(b, reference)), 1.0] for b, _, reference in referenced],
            [[float(value(m, reference)), 1.0] for _, m, reference in referenced],
        )

    for name, value in (("exact_match", exact_match), ("f1", f1), ("rouge_2", rouge_2), ("rouge_l", rouge_l)):
        add(name, each(value))
    for name, counts, statistic in (("bleu", bleu_counts, bleu), ("chrf", chrf_counts, chrf)):
        summed = [[[float(n) for n in counts(text[side], text[2])] for text in referenced] for side in (0, 1)]
        add(name, (summed[0], summed[1]), statistic)
    answers = (base.answers, model.answers)
    stopped = [[[float(a.finish_reason == "stop"), 1.0] for a in side] for side in answers]
    add("stopped", (stopped[0], stopped[1]))
    repeated = [[[repeated_share(units(a.text)), 1.0] for a in side] for side in answers]
    add("repetition", (repeated[0], repeated[1]))
    checked = [
        [
            [float(sum(kept(a.text, q.checks).values())), float(len(q.checks))]
            for q, a in zip(work.asked, side)
            if q.checks
        ]
        for side in answers
    ]
    add("checks", (checked[0], checked[1]))
    for way in WAYS if model.chosen and base.chosen else ():
        right = [
            [[float(found.right(q)[way]), 1.0] for q, found in zip(work.choices, side.chosen)] for side in (base, model)
        ]
        add(f"choices_{way}", (right[0], right[1]))
    _add_text(add, base, model)
    return made


def _say_left_out(count: int) -> None:
    if count > 0:
        console.warn(f"{count:,} rows do not fit into the context of one of the models and are left out of the loss.")


def _cost_rows(costs: Sequence[tuple[AnswerCost | None, AnswerCost | None]], same: bool) -> tuple[Rows, Rows]:
    """Of each chat nats and tokens; or bits and bytes, where the models cut text into different tokens."""
    sides: tuple[Rows, Rows] = ([], [])
    for pair in costs:
        for rows, cost in zip(sides, pair):
            assert cost is not None
            rows.append([cost.nats, float(cost.tokens)] if same else [cost.nats / math.log(2), float(cost.bytes)])
    return sides


def _add_text(add: Callable[..., None], base: Measured, model: Measured) -> None:
    """Bits per byte of general text: of languages with enough pieces, and of all where there are several."""
    pieces = Counter(group.language for group in model.groups)
    languages = sorted(language for language, count in pieces.items() if count >= FEWEST_ROWS)
    if len(pieces) > 1 or not languages:
        languages.append("all")
    for language in languages:
        groups = sorted(group for group in model.groups if language in (group.language, "all"))
        rows = [
            [[one.groups[group].nats / math.log(2), float(one.groups[group].bytes)] for group in groups]
            for one in (base, model)
        ]
        add(f"text_{language}", (rows[0], rows[1]), unit="bits a byte")


# --- what the report shows ----------------------------------------------------------------------------------------


def _row_losses(chats: Sequence[Question], measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Of each chat: where it stands, its question, and the mean loss by token of both."""
    made = []
    for question, base, model in zip(chats, measured["base"].costs, measured["model"].costs):
        if base is not None and model is not None:
            made.append(
                {
                    "file": question.file,
                    "line": question.line,
                    "question": question.text,
                    "tokens": model.tokens,
                    "base": base.nats / base.tokens,
                    "model": model.nats / model.tokens,
                }
            )
    return made


def _answers(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Side by side: what was asked, the reference, and what both said."""
    base, model = measured["base"], measured["model"]
    return [
        {
            "question": question.text,
            "reference": question.reference,
            "answers": {
                name: {
                    "text": answer.text,
                    "finish_reason": answer.finish_reason,
                    "tokens": answer.tokens,
                    **({"f1": f1(answer.text, question.reference)} if question.answer else {}),
                    **({"checks": kept(answer.text, question.checks)} if question.checks else {}),
                }
                for name, answer in (("base", one), ("model", other))
            },
        }
        for question, one, other in zip(model.asked, base.answers, model.answers)
    ]


def _choices(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Each question of multiple choice with what both chose, by every way of counting."""
    return [
        {
            "question": question.text,
            "choices": question.choices,
            "right": question.right,
            "chosen": {name: dict(one.chosen[index].by) for name, one in measured.items()},
        }
        for index, question in enumerate(measured["model"].choices)
    ]
