"""`onecard evaluate`: measure a model on text that it has not seen, beside its base and beside xz.

In: a model, and optionally a base, a corpus and questions. Out: an evaluation directory with report.json and
report.html. The models are called "base" and "model" throughout; each is loaded, measured wholly, and let go.

How things are measured stands in the modules beside this one; how they are shown, in `findings`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import EvaluateConfig
from onecard.data.corpus import read_documents
from onecard.data.sources import source_files
from onecard.errors import ArtifactError, ConfigError
from onecard.evaluate import findings
from onecard.evaluate.compression import Compressed, compress_documents
from onecard.evaluate.harness import check_tasks
from onecard.evaluate.measuring import Measured, Work, measure, window, without_refused
from onecard.evaluate.perplexity import Score, by_language, by_source
from onecard.evaluate.questions import Question, choose
from onecard.evaluate.repetition import beginning, units
from onecard.evaluate.similarity import exact_match, f1

PROMPTS_PER_LANGUAGE = 2
PROMPT_UNITS = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a held-out document, and how it really goes on."""

    language: str
    text: str
    truth: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What one look through the held-out documents finds: their size, and prompts to continue."""

    documents: int
    bytes: int
    prompts: list[Prompt]


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Measure, show, and write the evaluation directory; the result holds bits per byte by model and language.

    ConfigError if there is nothing to measure or the window is too long; ArtifactError if a model or the corpus cannot
    be used; DataError if no question can be read.
    """
    from onecard.model.load import model_directory

    if config.corpus is None and not config.questions and not config.harness:
        raise ConfigError("There is nothing to measure.", "Give a --corpus, --questions, or both.")
    check_tasks(config.harness, allow_functions=config.harness_functions)
    paths = {} if config.base is None else {"base": config.base}
    paths["model"] = config.model
    for path in paths.values():
        model_directory(path)
    held_out = None if config.corpus is None else _survey(config.corpus)
    if held_out is None and config.corpus is not None:
        if not config.questions and not config.harness:
            raise ArtifactError(
                f"The corpus {config.corpus} holds no held-out text to measure with.",
                "Clean it again with a larger --held-out, such as 0.3, or split = paragraph for a few long files.",
            )
        console.warn(
            f"The corpus {config.corpus} holds no held-out text: bits per byte are not measured, only the answers. "
            "A larger held_out, or split = paragraph for a few long files, holds some back."
        )
    work = Work(
        window_tokens=window(config.window_tokens, list(paths.values())),
        max_new_tokens=config.max_new_tokens,
        harness=[path.absolute() for path in config.harness],
        harness_limit=config.harness_limit,
        seed=config.seed,
        **(_questions(config) if config.questions else {}),
        **_text(config, held_out),
    )
    parents = [*paths.values(), *([] if config.corpus is None else [config.corpus])]
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=parents) as temporary:
        measured = {name: measure(name, path, work) for name, path in paths.items()}
        xz: dict[str, Compressed] = {}
        if config.corpus is not None and held_out is not None and config.compare_xz:
            console.note("Compressing the same text with xz -9e")
            xz = compress_documents(read_documents(config.corpus))
        result = _result(measured, xz, work.window_tokens) | {"output": str(config.output)}
        report = _report(config, measured, xz, held_out, result)
        artifact.write_json_atomically(temporary / "report.json", report)
        findings.page(report).save(temporary / "report.html")
        artifact.write_manifest(temporary, "evaluation", settings=config.plain(), parents=parents, result=result)
    findings.show(report)
    return result


def _survey(corpus: Path) -> HeldOut | None:
    """Count the held-out documents and take the beginnings of the first few of each language; None without text."""
    documents = count_bytes = 0
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for item in read_documents(corpus, "held_out"):
        documents += 1
        count_bytes += len(item.text.encode())
        if len(prompts[item.language]) < PROMPTS_PER_LANGUAGE:
            length = min(PROMPT_UNITS, len(units(item.text[:1000])) // 2)
            text = beginning(item.text, length)
            if text.strip():
                truth = beginning(item.text[len(text) :], 2 * PROMPT_UNITS)
                prompts[item.language].append(Prompt(item.language, text, truth))
    if not count_bytes:
        return None
    ordered = [prompt for language in sorted(prompts) for prompt in prompts[language]]
    return HeldOut(documents, count_bytes, ordered)


def _text(config: EvaluateConfig, held_out: HeldOut | None) -> dict[str, Any]:
    """The part of the work that is text."""
    if held_out is None or config.corpus is None:
        return {}
    corpus = config.corpus
    return {
        "documents": lambda: read_documents(corpus, "held_out"),
        "document_bytes": held_out.bytes,
        "prompts": [prompt.text for prompt in held_out.prompts],
    }


def _questions(config: EvaluateConfig) -> dict[str, Any]:
    """`question_count` of the questions to be answered, and as many of those with choices."""
    count = config.question_count
    wanted: dict[str, tuple[int, Callable[[Question], bool]]] = {
        "asked": (count, lambda question: not question.choices),
        "choices": (count, lambda question: bool(question.choices)),
    }
    paths = [path for path in (config.base, config.model) if path is not None]
    return dict(without_refused(choose(config.questions, config.seed, wanted), paths))


def _result(measured: dict[str, Measured], xz: dict[str, Compressed], window_tokens: int) -> dict[str, Any]:
    """The summary for scripts: bits per byte by model and language, xz by language, and how the model answers."""
    bits = {
        name: {language: score.bits_per_byte for language, score in by_language(one.groups).items()}
        for name, one in measured.items()
        if one.groups
    }
    yardstick = {language: found.bits_per_byte for language, found in xz.items()}
    result: dict[str, Any] = {"bits_per_byte": bits, "xz": yardstick, **measured["model"].behaviour()}
    if "base" in measured:
        result["base"] = measured["base"].behaviour()
    if any(one.harness for one in measured.values()):
        result["harness"] = {name: one.harness for name, one in measured.items()}
    result["window_tokens"] = window_tokens
    result["verdict"] = findings.verdict(bits, yardstick)
    return result


def _trained_on(config: EvaluateConfig) -> bool:
    """Whether a file of the questions is among those that the model was fine-tuned on."""
    if not (config.model / artifact.MANIFEST).is_file():
        return False
    learned = {parent["content_hash"] for parent in artifact.read_manifest(config.model).parents}
    files = (path for source in config.questions for path in source_files(source))
    return any(artifact.hash_file(path) in learned for path in files)


def _report(
    config: EvaluateConfig,
    measured: dict[str, Measured],
    xz: dict[str, Compressed],
    held_out: HeldOut | None,
    result: dict[str, Any],
) -> dict[str, Any]:
    """Everything that report.json says and report.html shows."""
    return {
        "result": result,
        "settings": config.plain(),
        "held_out": None if held_out is None else {"documents": held_out.documents, "bytes": held_out.bytes},
        "models": {
            name: {
                "path": one.path,
                "parameters": one.parameters,
                "languages": {key: _plain_score(score) for key, score in by_language(one.groups).items()}
                if one.groups
                else {},
                "sources": {key: _plain_score(score) for key, score in by_source(one.groups).items()},
                **one.behaviour(),
            }
            for name, one in measured.items()
        },
        "xz": {
            language: dataclasses.asdict(found) | {"bits_per_byte": found.bits_per_byte}
            for language, found in xz.items()
        },
        "questions_were_trained_on": _trained_on(config),
        "answers": _side_by_side(measured),
        "continuations": [
            {
                **dataclasses.asdict(prompt),
                "continuations": {name: one.continuations[index] for name, one in measured.items()},
            }
            for index, prompt in enumerate(held_out.prompts if held_out else [])
        ],
    }


def _plain_score(score: Score) -> dict[str, Any]:
    return dataclasses.asdict(score) | {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def _side_by_side(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    return [
        {
            "question": answer.question,
            "reference": answer.reference,
            "answers": {
                name: {
                    "text": one.answers[index].text,
                    "finish_reason": one.answers[index].finish_reason,
                    "tokens": one.answers[index].tokens,
                    "exact_match": exact_match(one.answers[index].text, answer.reference),
                    "f1": f1(one.answers[index].text, answer.reference),
                }
                for name, one in measured.items()
                if one.answers
            },
        }
        for index, answer in enumerate(measured["model"].answers)
    ]
