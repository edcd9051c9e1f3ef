"""`onecard evaluate`: measure a model on text that it has not seen, beside its base and beside xz.

In: a model, and optionally a base, a corpus and questions. Out: an evaluation directory with report.json and
report.html. The models are called "base" and "model" throughout; each is loaded, measured wholly, and let go.

How things are measured stands in the modules beside this one; how they are shown, in `findings`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import EvaluateConfig
from onecard.data.corpus import read_documents
from onecard.data.sources import source_files
from onecard.errors import ArtifactError, ConfigError
from onecard.evaluate import findings
from onecard.evaluate.answers import Answer, answer_questions, context_tokens, decode, generate
from onecard.evaluate.compression import Compressed, compress_documents
from onecard.evaluate.perplexity import Group, Score, by_language, by_source, score_groups
from onecard.evaluate.repetition import beginning, summarize, units
from onecard.evaluate.similarity import exact_match, f1

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from onecard.data.chats import Chat

LONGEST_AUTO_WINDOW_TOKENS = 1024
BATCH_WINDOWS = 8
BATCH_ANSWERS = 8
PROMPTS_PER_LANGUAGE = 2
PROMPT_UNITS = 20
CONTINUATION_TOKENS = 64


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


@dataclass(slots=True)
class Measured:
    """Everything measured of one model; answers and continuations in the order of the questions and prompts."""

    path: str
    parameters: int
    groups: dict[Group, Score] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    continuations: list[str] = field(default_factory=list)

    def behaviour(self) -> dict[str, Any]:
        """How it answers: counts of questions asked and stopped at; shares 0 to 1; None where nothing was measured."""
        written = [answer.text for answer in self.answers] + self.continuations
        repetition = summarize(written)
        asked = len(self.answers)
        pairs = [(answer.text, answer.reference) for answer in self.answers]
        return {
            "asked": asked,
            "stopped": sum(answer.finish_reason == "stop" for answer in self.answers),
            "exact_match": sum(exact_match(*pair) for pair in pairs) / asked if asked else None,
            "f1": sum(f1(*pair) for pair in pairs) / asked if asked else None,
            "repetition": repetition.repeated_share if written else None,
            "longest_loop": repetition.longest_loop if written else None,
        }


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Measure, show, and write the evaluation directory; the result holds bits per byte by model and language.

    ConfigError if there is nothing to measure or the window is too long; ArtifactError if a model or the corpus cannot
    be used; DataError if no question can be read.
    """
    from onecard.model.load import model_directory

    if config.corpus is None and not config.questions:
        raise ConfigError("There is nothing to measure.", "Give a --corpus, --questions, or both.")
    paths = {} if config.base is None else {"base": config.base}
    paths["model"] = config.model
    for path in paths.values():
        model_directory(path)
    held_out = None if config.corpus is None else _survey(config.corpus)
    if held_out is None and config.corpus is not None:
        if not config.questions:
            raise ArtifactError(
                f"The corpus {config.corpus} holds no held-out text to measure with.",
                "Clean it again with a larger --held-out, such as 0.3, or split = paragraph for a few long files.",
            )
        console.warn(
            f"The corpus {config.corpus} holds no held-out text: bits per byte are not measured, only the answers. "
            "A larger held_out, or split = paragraph for a few long files, holds some back."
        )
    chats = _choose_chats(config) if config.questions else []
    window_tokens = _window(config, list(paths.values()))
    parents = [*paths.values(), *([] if config.corpus is None else [config.corpus])]
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=parents) as temporary:
        measured = {name: _measure(name, path, config, held_out, chats, window_tokens) for name, path in paths.items()}
        xz: dict[str, Compressed] = {}
        if config.corpus is not None and held_out is not None and config.compare_xz:
            console.note("Compressing the same text with xz -9e")
            xz = compress_documents(read_documents(config.corpus))
        result = _result(measured, xz, window_tokens) | {"output": str(config.output)}
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


def _choose_chats(config: EvaluateConfig) -> list[Chat]:
    """`question_count` chats, each equally likely to be taken, in the order of the files."""
    from onecard.data.chats import read_chats

    generator = random.Random(config.seed)
    chosen: list[tuple[int, Chat]] = []
    reasons: Counter[str] = Counter()
    chats = read_chats(config.questions, strict=False, reject=lambda rejection: reasons.update([rejection.reason]))
    for seen, chat in enumerate(chats):
        # Each further chat takes the place of a chosen one with the right probability: one pass, bounded memory.
        if seen < config.question_count:
            chosen.append((seen, chat))
        elif (place := generator.randrange(seen + 1)) < config.question_count:
            chosen[place] = (seen, chat)
    if reasons:
        found = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        console.warn(f"Rows of the questions that cannot be asked are left out: {found}.")
    return [chat for _, chat in sorted(chosen, key=lambda pair: pair[0])]


def _window(config: EvaluateConfig, paths: Sequence[Path]) -> int:
    """The window in tokens: what all models hold, at most 1024 unless the user asks for more."""
    from transformers import AutoConfig

    from onecard.model.load import model_directory

    contexts = {
        path: context_tokens(
            AutoConfig.from_pretrained(model_directory(path), local_files_only=True, trust_remote_code=False)
        )
        for path in paths
    }
    shortest = min(contexts, key=lambda path: contexts[path])
    if config.window_tokens == "auto":
        return min(contexts[shortest], LONGEST_AUTO_WINDOW_TOKENS)
    if not 2 <= config.window_tokens <= contexts[shortest]:
        raise ConfigError(
            f"window_tokens is {config.window_tokens}, but the model in {shortest} reads at most {contexts[shortest]}.",
            f"Give 2 to {contexts[shortest]}, or auto.",
        )
    return config.window_tokens


def _measure(
    name: str,
    path: Path,
    config: EvaluateConfig,
    held_out: HeldOut | None,
    chats: Sequence[Chat],
    window_tokens: int,
) -> Measured:
    """Load one model and measure it wholly."""
    from onecard.model.load import check_tokenizer_fits, load_model, load_tokenizer

    console.heading(f"Measuring the {name}: {path}")
    device, dtype = _place(path)
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype=dtype, device=device)
    check_tokenizer_fits(tokenizer, model, path)
    measured = Measured(str(path), parameters=sum(p.numel() for p in model.parameters()))
    if held_out is not None and config.corpus is not None:
        with console.progress("held-out text", held_out.bytes / 1000, "kB") as bar:
            measured.groups = score_groups(
                model,
                tokenizer,
                read_documents(config.corpus, "held_out"),
                window_tokens=window_tokens,
                stride_tokens=window_tokens // 2,
                batch_windows=BATCH_WINDOWS,
                advance=lambda count_bytes: bar.advance(count_bytes / 1000),
            )
        measured.continuations = _continue(model, tokenizer, held_out.prompts)
    if chats and name == "base" and not tokenizer.chat_template:
        console.warn(f"The base {path} has no chat template: it is not asked the questions.")
    elif chats:
        with console.progress("questions", len(chats)) as bar:
            measured.answers = answer_questions(
                model, tokenizer, chats, config.max_new_tokens, BATCH_ANSWERS, advance=bar.advance
            )
    return measured


def _place(path: Path) -> tuple[str, torch.dtype]:
    """Where and in which number format a model is measured: in fp32, unless only bf16 fits on the card."""
    import torch

    from onecard.model.load import model_directory

    if not torch.cuda.is_available():
        return "cpu", torch.float32
    from safetensors import safe_open

    elements = 0
    for file in model_directory(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                shape = tensors.get_slice(name).get_shape()
                elements += torch.Size(shape).numel()
    free_bytes, _ = torch.cuda.mem_get_info()
    if 4 * elements < 0.6 * free_bytes:
        return "cuda", torch.float32
    console.note(f"{path} is measured in bf16: in fp32 it would not fit on the card.")
    return "cuda", torch.bfloat16


def _continue(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt]) -> list[str]:
    """The model's own continuation of each prompt, greedily."""
    from onecard.model.load import vocabulary_rows
    from onecard.tokenizer.template import encode_prompt, stop_token_ids

    written = generate(
        model,
        [encode_prompt(tokenizer, prompt.text) for prompt in prompts],
        stop_ids=stop_token_ids(tokenizer),
        vocabulary_size=vocabulary_rows(tokenizer),
        limit=CONTINUATION_TOKENS,
        batch_size=BATCH_ANSWERS,
    )
    return [decode(tokenizer, item.ids) for item in written]


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
