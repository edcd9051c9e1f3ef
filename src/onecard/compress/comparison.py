"""The page at the end of each compression: what the new form of a model costs and says, beside the original.

In: two model directories, and where there are some a corpus and questions. Out: bytes on disk, memory, tokens a second,
bits per byte by language, which answers differ and how, and a plain verdict. Both models are measured one after the
other with the same texts; answers are greedy, so any difference is the compression's.

Both run here as onecard runs them: weights of few bits are opened as what they stand for, so memory and speed in this
table are those of a dense model of that shape. What the weights take packed is their size on disk.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.compress.directories import weight_bytes
from onecard.config import ComparedConfig
from onecard.data.corpus import Document, read_documents
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.evaluate.answers import Generated, context_tokens, decode, generate
from onecard.evaluate.bootstrap import paired
from onecard.evaluate.measuring import without_refused
from onecard.evaluate.perplexity import Score, by_language, score_groups
from onecard.evaluate.questions import choose
from onecard.evaluate.repetition import beginning
from onecard.evaluate.similarity import exact_match, f1
from onecard.report import Page

WINDOW_TOKENS = 1024
BATCH_ANSWERS = 8
SPEED_TOKENS = 48
_SPEED_TRIES = 3
_BEGINNING_UNITS = 20
# What is continued where neither questions nor held-out text are given.
_BEGINNINGS = (
    "The quick brown fox", "In the beginning", "Water boils when", "The king said to his", "To make bread, first",
    "话说天下大势", "春天来了，", "学习的目的是", "他走进房间，", "这个问题的答案",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is answered or continued: for a person, as tokens, and the reference answer where there is one."""

    text: str
    ids: list[int]
    reference: str | None = None


@dataclass(slots=True)
class Measured:
    """What one of the two models costs and says; answers in the order of the prompts."""

    bytes: int
    parameters: int
    peak_memory_bytes: int = 0
    tokens_per_second: float = 0.0
    languages: dict[str, Score] = field(default_factory=dict)
    answers: list[Generated] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """Both models, the prompts that they answered, and what the new form is called in a sentence."""

    name: str
    asked: str
    prompts: list[Prompt]
    original: Measured
    made: Measured

    # --- numbers ----------------------------------------------------------------------------------------------

    def different(self) -> list[int]:
        """Indices of the prompts whose answers differ in any token or in how they end."""
        pairs = zip(self.original.answers, self.made.answers)
        return [index for index, (one, other) in enumerate(pairs) if one != other]

    def first_difference(self, index: int) -> int:
        """The place of the first token that differs, counted from 0; the end of the shorter answer counts."""
        one, other = self.original.answers[index].ids, self.made.answers[index].ids
        return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

    def worst(self, most: int = 8) -> list[int]:
        """The different answers, the least alike first."""
        likeness = {i: f1(self.made.texts[i], self.original.texts[i]) for i in self.different()}
        return sorted(likeness, key=lambda i: (likeness[i], self.first_difference(i)))[:most]

    def accuracy(self) -> dict[str, dict[str, Any]]:
        """Against the reference answers: both models and the 95 % interval of the difference; {} without references."""
        if not self.prompts or any(prompt.reference is None for prompt in self.prompts):
            return {}
        found = {}
        for key, judge in (("exact_match", lambda a, b: float(exact_match(a, b))), ("f1", f1)):
            rows = [
                [(judge(text, str(prompt.reference)), 1.0) for text, prompt in zip(one.texts, self.prompts)]
                for one in (self.original, self.made)
            ]
            found[key] = paired(rows[0], rows[1]).plain(higher_is_better=True)
        return found

    def result(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {
            "verdict": self.verdict(),
            "asked": len(self.prompts),
            "different_answers": len(self.different()),
            "first_differing_tokens": [self.first_difference(index) for index in self.different()],
            "accuracy": self.accuracy(),
            **{key: self._one(one) for key, one in (("original", self.original), ("made", self.made))},
        }

    @staticmethod
    def _one(one: Measured) -> dict[str, Any]:
        return {
            "weight_bytes": one.bytes,
            "parameters": one.parameters,
            "peak_memory_bytes": one.peak_memory_bytes,
            "tokens_per_second": one.tokens_per_second,
            "bits_per_byte": {language: score.bits_per_byte for language, score in one.languages.items()},
        }

    # --- words ------------------------------------------------------------------------------------------------

    def verdict(self) -> list[str]:
        """Plain sentences: what became different."""
        count, all_of_them = len(self.different()), len(self.prompts)
        said = f"{self.name} {self.asked} {count} of {all_of_them} {'differently' if count else 'as the original does'}"
        said = said if count else f"{self.name} {self.asked} all {all_of_them} as the original does"
        size = self.made.bytes / self.original.bytes
        if count:
            places = sorted(self.first_difference(index) + 1 for index in self.different())
            said += f" (half of those from token {places[len(places) // 2]} on or later)"
        lines = [f"{said}.", f"Its weights take {size:.1%} of the bytes ({_sizes(self)})."]
        changes = {
            language: score.bits_per_byte / self.original.languages[language].bits_per_byte - 1
            for language, score in self.made.languages.items()
            if language != "all" and self.original.languages[language].bits_per_byte
        }
        if changes:
            told = ", ".join(f"{language} {change:+.2%}" for language, change in changes.items())
            lines.append(f"Bits per byte of held-out text: {told}.")
        for key, one in self.accuracy().items():
            if one["verdict"] in ("better", "worse"):
                lines.append(f"{key} is {one['verdict']}: {one['base']:.1%} before, {one['model']:.1%} now.")
        return lines

    def rows(self) -> list[list[Any]]:
        """The table: what is measured, original, new form, change."""
        one, other = self.original, self.made
        made: list[list[Any]] = [
            [
                "weights on disk",
                console.format_bytes(one.bytes),
                console.format_bytes(other.bytes),
                _ratio(one.bytes, other.bytes),
            ],
            ["parameters", f"{one.parameters:,}", f"{other.parameters:,}", _ratio(one.parameters, other.parameters)],
            [
                "peak memory while answering",
                console.format_bytes(one.peak_memory_bytes),
                console.format_bytes(other.peak_memory_bytes),
                _ratio(one.peak_memory_bytes, other.peak_memory_bytes),
            ],
            [
                "tokens a second, one answer",
                f"{one.tokens_per_second:.1f}",
                f"{other.tokens_per_second:.1f}",
                _ratio(one.tokens_per_second, other.tokens_per_second),
            ],
        ]
        for language, score in other.languages.items():
            before = one.languages[language].bits_per_byte
            made.append(
                [
                    f"bits per byte, {language}",
                    f"{before:.4f}",
                    f"{score.bits_per_byte:.4f}",
                    f"{score.bits_per_byte / before - 1:+.2%}",
                ]
            )
        for key, found in self.accuracy().items():
            interval = f"{found['difference']:+.1%} ({found['low']:+.1%} to {found['high']:+.1%})"
            made.append([f"{key}, {found['rows']} rows", f"{found['base']:.1%}", f"{found['model']:.1%}", interval])
        made.append(["answers that differ", "", f"{len(self.different())} of {len(self.prompts)}", ""])
        return made

    def show(self, title: str) -> None:
        """On the console."""
        console.table(title, ["", "original", "now", "change"], self.rows())
        for line in self.verdict():
            console.result(line)

    def write(self, folder: Path, title: str, notes: Sequence[str] = ()) -> None:
        """report.html and report.json in `folder`."""
        page = Page(title, " ".join(self.verdict()))
        page.facts(
            {
                "of the bytes": f"{self.made.bytes / self.original.bytes:.1%}",
                f"answers of {len(self.prompts)} differ": len(self.different()),
                **{
                    f"bits per byte, {language}": f"{score.bits_per_byte:.3f}"
                    for language, score in self.made.languages.items()
                    if language != "all"
                },
            }
        )
        for note in notes:
            page.paragraph(note)
        page.heading("Beside the original")
        page.table(
            ["", "original", "now", "change"],
            self.rows(),
            "Memory and speed as onecard runs both here, weights of few bits opened as what they stand for. "
            "Intervals hold the true difference in 95 % of samples of such rows.",
        )
        worst = self.worst()
        page.heading("Answers that differ most" if worst else "Answers")
        if not worst:
            page.paragraph(f"All {len(self.prompts)} answers are the same, token by token.")
        for index in worst:
            place = self.first_difference(index)
            page.sides(
                *_marked(self.original.texts[index], self.made.texts[index]),
                caption=f"{self.prompts[index].text[:300]}  (token {place + 1} is the first that differs)",
            )
        page.save(folder / "report.html")
        rows = [
            {
                "prompt": prompt.text,
                "reference": prompt.reference,
                "original": self.original.texts[index],
                "made": self.made.texts[index],
                "same": self.original.answers[index] == self.made.answers[index],
            }
            for index, prompt in enumerate(self.prompts)
        ]
        artifact.write_json_atomically(folder / "report.json", {**self.result(), "notes": list(notes), "answers": rows})


def _marked(one: str, other: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts, marked from the first character that differs."""
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return [(one[:same], False), (one[same:], True)], [(other[:same], False), (other[same:], True)]


def _ratio(before: float, now: float) -> str:
    return f"x {now / before:.2f}" if before else ""


def _sizes(found: Comparison) -> str:
    return f"{console.format_bytes(found.made.bytes)} for {console.format_bytes(found.original.bytes)}"


# --- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Material:
    """What both models are measured on: prompts with the verb for what is done with them, and held-out documents."""

    asked: str
    prompts: list[Prompt]
    texts: list[Document]


def gather(config: ComparedConfig, model: Path) -> Material:
    """What the settings name, for the tokenizer of `model`: what would stop the comparison is found before long work.

    Questions that the chat template refuses are left out with a warning.
    """
    texts = [] if config.corpus is None else _texts(config.corpus, config.text_kilobytes * 1000, config.seed)
    asked, prompts = _prompts(config, model, texts)
    return Material(asked, prompts, texts)


def compare(original: Path, made: Path, material: Material, config: ComparedConfig, name: str) -> Comparison:
    """Measure both model directories alike; `name` begins the verdict ("The 4-bit form")."""
    from onecard.model.load import load_architecture, load_tokenizer

    tokenizer = load_tokenizer(original)
    window = min(WINDOW_TOKENS, *(context_tokens(load_architecture(path)) for path in (original, made)))
    console.note(f"Measuring the original: {original}")
    one = _measure(original, tokenizer, material, window, config.max_new_tokens)
    console.note(f"Measuring {name[0].lower()}{name[1:]}")
    other = _measure(made, tokenizer, material, window, config.max_new_tokens)
    return Comparison(name, material.asked, material.prompts, one, other)


def _texts(corpus: Path, most_bytes: int, seed: int) -> list[Document]:
    """Held-out documents of at most so many bytes a language, an even sample in memory that does not grow."""
    chosen: dict[str, list[tuple[int, str, Document]]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for document in read_documents(corpus, "held_out"):
        mark = hashlib.blake2b(f"{seed} {document.id}".encode(), digest_size=8).digest()
        heap = chosen[document.language]
        heapq.heappush(heap, (-int.from_bytes(mark, "big"), document.id, document))
        sizes[document.language] += len(document.text.encode())
        while len(heap) > 1 and sizes[document.language] > most_bytes:
            sizes[document.language] -= len(heapq.heappop(heap)[2].text.encode())
    found = [item[2] for language in sorted(chosen) for item in sorted(chosen[language], key=lambda x: x[1])]
    if not found:
        raise ArtifactError(
            f"The corpus {corpus} holds no held-out text to measure with.",
            "Clean it again with a larger --held-out, or leave --corpus away.",
        )
    return found


def _prompts(config: ComparedConfig, model: Path, texts: Sequence[Document]) -> tuple[str, list[Prompt]]:
    """What both answer, and the verb for it: questions, else beginnings of held-out texts, else a few of our own."""
    from onecard.model.load import load_tokenizer
    from onecard.tokenizer.template import encode_chat, encode_prompt

    tokenizer = load_tokenizer(model)
    if not config.questions:
        begun = [beginning(item.text, _BEGINNING_UNITS) for item in texts[: config.question_count]] or _BEGINNINGS
        return "continues", [Prompt(text, encode_prompt(tokenizer, text)) for text in begun if text.strip()]
    if not tokenizer.chat_template:
        raise ConfigError("The model has no chat template to be asked questions with.", "Leave --questions away.")
    chosen = choose(config.questions, config.seed, {"asked": (config.question_count, lambda _: True)})
    questions = without_refused(chosen, [model])["asked"]
    if not questions:
        raise DataError("The chat template of the model refuses every question.", "Give questions that it can take.")
    return "answers", [
        Prompt(
            question.text,
            encode_chat(tokenizer, question.messages, tools=question.tools, add_generation_prompt=True).ids,
            question.reference if question.answer else None,
        )
        for question in questions
    ]


def _parameters(model: Any) -> int:
    """How many numbers a model has, however many of them lie in a byte."""
    shapes = (getattr(getattr(part, "quant_state", None), "shape", part.shape) for part in model.parameters())
    return sum(math.prod(shape) for shape in shapes)


def _measure(path: Path, tokenizer: Any, material: Material, window: int, limit: int) -> Measured:
    """Load a model, measure it wholly and let it go."""
    import torch

    from onecard.model.load import load_model, vocabulary_rows
    from onecard.tokenizer.template import stop_token_ids
    from onecard.train.peak_memory import PeakMemory

    prompts, texts = material.prompts, material.texts
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = PeakMemory(device)
    model: Any = load_model(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    measured = Measured(weight_bytes(path), _parameters(model))
    rows = vocabulary_rows(tokenizer)
    speeds = []
    for _ in range(_SPEED_TRIES):
        begin = time.perf_counter()
        made = generate(model, [prompts[0].ids], stop_ids=[], vocabulary_size=rows, limit=SPEED_TOKENS, batch_size=1)
        speeds.append(len(made[0].ids) / (time.perf_counter() - begin))
    measured.tokens_per_second = max(speeds)
    with console.progress("answers", len(prompts)) as bar:
        measured.answers = generate(
            model,
            [prompt.ids for prompt in prompts],
            stop_ids=stop_token_ids(tokenizer),
            vocabulary_size=rows,
            limit=limit,
            batch_size=BATCH_ANSWERS,
            advance=bar.advance,
        )
    measured.texts = [decode(tokenizer, answer.ids) for answer in measured.answers]
    measured.peak_memory_bytes = memory.bytes()
    if texts:
        kilobytes = sum(len(item.text.encode()) for item in texts) / 1000
        with console.progress("held-out text", kilobytes, "kB") as bar:
            groups = score_groups(
                model,
                tokenizer,
                texts,
                window_tokens=window,
                stride_tokens=max(1, window // 2),
                advance=lambda count_bytes: bar.advance(count_bytes / 1000),
            )
        measured.languages = by_language(groups)
    return measured
