"""One model measured wholly: loaded, given all its work, and let go. What `evaluate` and `compare` share.

In: a model and the work: questions, choices, chats whose answers are scored, documents, prompts. Out: `Measured`. It
does not choose the work, and it compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.errors import ConfigError, DataError
from onecard.evaluate.answers import Answer, answer_questions, context_tokens, decode, generate
from onecard.evaluate.choices import WAYS, Chosen, choose_answers
from onecard.evaluate.instructions import kept
from onecard.evaluate.perplexity import Group, Score, score_groups
from onecard.evaluate.questions import Question
from onecard.evaluate.repetition import summarize
from onecard.evaluate.scoring import Passage, costs
from onecard.evaluate.similarity import bleu, bleu_counts, chrf, chrf_counts, exact_match, f1, rouge_2, rouge_l

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from onecard.data.corpus import Document
    from onecard.tokenizer.template import Learn

LONGEST_AUTO_WINDOW_TOKENS = 1024
BATCH_WINDOWS = 8
BATCH_ANSWERS = 8
CONTINUATION_TOKENS = 64


@dataclass(frozen=True)
class Work:
    """What a model is given to do.

    `chats`: whose answers' cost is asked; `asked`: what it shall answer itself; `choices`: multiple choice; `documents`
    opens the text to score (`document_bytes` of it); `prompts`: beginnings of texts to continue. A model without a chat
    template is read through the tokenizer of `template_from`, or (None) not asked anything. `harness`: task files, of
    each `harness_limit` documents (None: all).
    """

    window_tokens: int
    max_new_tokens: int
    chats: Sequence[Question] = ()
    asked: Sequence[Question] = ()
    choices: Sequence[Question] = ()
    documents: Callable[[], Iterable[Document]] | None = None
    document_bytes: int = 0
    prompts: Sequence[str] = ()
    template_from: Path | None = None
    learn: Learn = "answers"
    harness: Sequence[Path] = ()
    harness_limit: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AnswerCost:
    """What the answers of one chat cost: nats of all learned tokens, their number, UTF-8 bytes of the answers' text."""

    nats: float
    tokens: int
    bytes: int


@dataclass(slots=True)
class Measured:
    """Everything measured of one model; all lists in the order of the work. A chat beyond the context costs None."""

    path: str
    parameters: int
    groups: dict[Group, Score] = field(default_factory=dict)
    costs: list[AnswerCost | None] = field(default_factory=list)
    asked: Sequence[Question] = ()
    answers: list[Answer] = field(default_factory=list)
    choices: Sequence[Question] = ()
    chosen: list[Chosen] = field(default_factory=list)
    continuations: list[str] = field(default_factory=list)
    harness: dict[str, Any] = field(default_factory=dict)

    def behaviour(self) -> dict[str, Any]:
        """How it answers: counts of questions asked and stopped at; shares 0 to 1; None where nothing was measured."""
        import numpy as np

        written = [answer.text for answer in self.answers] + self.continuations
        repetition = summarize(written)
        pairs = [(a.text, a.reference) for a, question in zip(self.answers, self.asked) if question.answer is not None]

        def mean(measure: Callable[[str, str], float]) -> float | None:
            return sum(measure(*pair) for pair in pairs) / len(pairs) if pairs else None

        checked = [kept(a.text, question.checks) for a, question in zip(self.answers, self.asked) if question.checks]
        results = [passed for found in checked for passed in found.values()]
        right = [found.right(question) for found, question in zip(self.chosen, self.choices)]
        return {
            "asked": len(self.answers),
            "stopped": sum(answer.finish_reason == "stop" for answer in self.answers),
            "exact_match": mean(exact_match),
            "f1": mean(f1),
            "rouge_2": mean(rouge_2),
            "rouge_l": mean(rouge_l),
            "bleu": float(bleu(np.sum([bleu_counts(*pair) for pair in pairs], 0).astype(float))) if pairs else None,
            "chrf": float(chrf(np.sum([chrf_counts(*pair) for pair in pairs], 0).astype(float))) if pairs else None,
            "repetition": repetition.repeated_share if written else None,
            "longest_loop": repetition.longest_loop if written else None,
            "checks": sum(results) / len(results) if results else None,
            "choices": {way: sum(one[way] for one in right) / len(right) for way in WAYS} if right else None,
        }


def without_refused(rows: Mapping[str, list[Question]], paths: Iterable[Path]) -> dict[str, list[Question]]:
    """Only the questions that the chat templates of all models take; says how many they refuse, such as for a role."""
    from onecard.model.load import load_tokenizer
    from onecard.tokenizer.template import encode_chat

    kept = {name: list(some) for name, some in rows.items()}
    for path in paths:
        tokenizer = load_tokenizer(path)
        if not tokenizer.chat_template:
            continue
        refused: list[str] = []

        def taken(question: Question, tokenizer: Any = tokenizer, refused: list[str] = refused) -> bool:
            try:
                encode_chat(tokenizer, question.messages, tools=question.tools, add_generation_prompt=True)
            except DataError as fault:
                refused.append(fault.what)
                return False
            return True

        kept = {name: [question for question in some if taken(question)] for name, some in kept.items()}
        if refused:
            console.warn(f"{len(refused):,} questions are left out, which the template of {path} refuses: {refused[0]}")
    return kept


def measure(name: str, path: Path, work: Work) -> Measured:
    """Load one model, called `name`, and measure it wholly."""
    from onecard.model.load import check_tokenizer_fits, load_model

    console.heading(f"Measuring the {name}: {path}")
    device, dtype = _place(path)
    tokenizer = _tokenizer(name, path, work)
    model = load_model(path, dtype=dtype, device=device)
    check_tokenizer_fits(tokenizer, model, path)
    measured = Measured(str(path), parameters=sum(p.numel() for p in model.parameters()))
    if work.documents is not None:
        with console.progress("text", work.document_bytes / 1000, "kB") as bar:
            measured.groups = score_groups(
                model,
                tokenizer,
                work.documents(),
                window_tokens=work.window_tokens,
                stride_tokens=work.window_tokens // 2,
                batch_windows=BATCH_WINDOWS,
                advance=lambda count_bytes: bar.advance(count_bytes / 1000),
            )
    measured.continuations = _continue(model, tokenizer, work.prompts)
    if work.harness:
        from onecard.evaluate.harness import run_tasks

        measured.harness = run_tasks(
            model,
            tokenizer,
            work.harness,
            limit=work.harness_limit,
            window_tokens=work.window_tokens,
            seed=work.seed,
        )
    budget_tokens = BATCH_WINDOWS * work.window_tokens
    if work.choices:
        with console.progress("choices", sum(len(question.choices) for question in work.choices)) as bar:
            measured.chosen = choose_answers(model, tokenizer, work.choices, budget_tokens, advance=bar.advance)
            measured.choices = work.choices
    if (work.chats or work.asked) and not tokenizer.chat_template:
        console.warn(f"The {name} {path} has no chat template: it is not asked the questions.")
        return measured
    if work.chats:
        measured.costs = answer_costs(model, tokenizer, work.chats, budget_tokens, work.learn)
    if work.asked:
        with console.progress("questions", len(work.asked)) as bar:
            measured.asked = work.asked
            measured.answers = answer_questions(
                model, tokenizer, work.asked, work.max_new_tokens, BATCH_ANSWERS, advance=bar.advance
            )
    return measured


def answer_costs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chats: Sequence[Question],
    budget_tokens: int,
    learn: Learn = "answers",
) -> list[AnswerCost | None]:
    """What all answers of each chat cost, by the very mask that fine-tuning learns from: ends of turns included.

    None for a chat that is longer than the model's context, or of which nothing is learned.
    """
    from onecard.tokenizer.template import encode_chat

    room = context_tokens(model.config)
    encoded = [encode_chat(tokenizer, chat.chat, tools=chat.tools, learn=learn) for chat in chats]
    fitting = [index for index, one in enumerate(encoded) if len(one.ids) <= room and any(one.assistant_mask)]
    passages = [Passage(encoded[index].ids, encoded[index].assistant_mask) for index in fitting]
    found: list[AnswerCost | None] = [None] * len(chats)
    with console.progress("rows", len(passages)) as bar:
        for index, nats in zip(fitting, costs(model, passages, budget_tokens, advance=bar.advance)):
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in _learned_texts(chats[index].chat, learn))
            found[index] = AnswerCost(nats, sum(encoded[index].assistant_mask), size)
    return found


def _learned_texts(chat: Sequence[Mapping[str, Any]], learn: Learn) -> list[str]:
    """The contents of the answers whose tokens the mask marks."""
    answers = [turn for turn in chat if turn["role"] == "assistant"]
    wanted = answers[-1:] if learn == "last_answer" else answers
    return [str(turn.get("content") or "") for turn in wanted if turn.get("train") is not False]


def _tokenizer(name: str, path: Path, work: Work) -> PreTrainedTokenizerFast:
    """The model's own tokenizer, or that of `template_from` where its own has no chat template."""
    from onecard.model.load import load_tokenizer

    own = load_tokenizer(path)
    if own.chat_template or work.template_from is None or not (work.chats or work.asked):
        return own
    other = load_tokenizer(work.template_from)
    mine, theirs = own.get_vocab(), other.get_vocab()
    if not other.chat_template or any(theirs.get(token) != index for token, index in mine.items()):
        raise ConfigError(
            f"The {name} {path} has no chat template, and the tokenizer of {work.template_from} gives other ids.",
            "Give it a template with `onecard tokenizer extend --chat-template`.",
        )
    console.warn(f"The {name} {path} has no chat template: it is read through that of {work.template_from}.")
    return other


def window(asked: int | str, paths: Sequence[Path]) -> int:
    """The window in tokens: what all models hold, at most 1024 unless the user asks for more."""
    from onecard.model.load import load_architecture

    contexts = {path: context_tokens(load_architecture(path)) for path in paths}
    shortest = min(contexts, key=lambda path: contexts[path])
    if isinstance(asked, str):
        return min(contexts[shortest], LONGEST_AUTO_WINDOW_TOKENS)
    if not 2 <= asked <= contexts[shortest]:
        raise ConfigError(
            f"window_tokens is {asked}, but the model in {shortest} reads at most {contexts[shortest]}.",
            f"Give 2 to {contexts[shortest]}, or auto.",
        )
    return asked


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


def _continue(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[str]:
    """The model's own continuation of each prompt, greedily."""
    from onecard.model.load import vocabulary_rows
    from onecard.tokenizer.template import encode_prompt, stop_token_ids

    if not prompts:
        return []
    written = generate(
        model,
        [encode_prompt(tokenizer, prompt) for prompt in prompts],
        stop_ids=stop_token_ids(tokenizer),
        vocabulary_size=vocabulary_rows(tokenizer),
        limit=CONTINUATION_TOKENS,
        batch_size=BATCH_ANSWERS,
    )
    return [decode(tokenizer, item.ids) for item in written]
