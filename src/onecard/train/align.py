"""The verb `align`: a model and preferences in, a run directory with a model that prefers them out.

What the model as it is gives to every answer is computed once, before the first update, and kept with the rows; dropout
is off throughout, so that the loss begins where it must (ln 2 for DPO) and the margin at 0. Both answers of a question
are learned only after the part that they share.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from onecard import artifact, console
from onecard.config import AlignConfig
from onecard.data.chats import Message
from onecard.data.packing import PairRows, gather
from onecard.data.preferences import Comparison, read_comparisons
from onecard.data.records import Rejection
from onecard.data.rows import RejectionWriter
from onecard.data.split import question_is_held_out
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.errors import ArtifactError, DataError
from onecard.model.load import tokenizer_file, vocabulary_rows
from onecard.tokenizer.template import encode_chat
from onecard.train.base import SPLITS, Base, kept_rows, open_run, say_rows
from onecard.train.compilation import begin_pass
from onecard.train.directory import RunDirectory
from onecard.train.precision import Precision
from onecard.train.preference import GOOD, NEEDS_REFERENCE, REFERENCE, USUAL_BETA, Preference, PreferenceSettings
from onecard.train.session import train
from onecard.train.task import Defaults, Task

# Tokens of a row where nothing is said: two answers of the length that most chats have.
USUAL_LENGTH = 2048


def align(config: AlignConfig) -> dict[str, Any]:
    """Train on preferences. Resumes an unfinished run with the same settings and inputs."""
    return train(prepare(config))


def prepare(config: AlignConfig) -> Task:
    """Everything that is decided before the run: inputs, rows, model, what auto becomes."""
    _say_unused(config)
    opened = open_run(config, USUAL_LENGTH, documents=2)
    config, base, run, precision = opened.config, opened.base, opened.run, opened.precision
    found, stores = _stores(config, run, base, base.positions or USUAL_LENGTH)
    rows = PairRows(stores["train"], config.row_tokens)
    held_out = PairRows(stores["held_out"], config.row_tokens) if stores["held_out"].count else None
    settings = PreferenceSettings(
        config.method,
        USUAL_BETA[config.method] if config.beta == "auto" else config.beta,
        config.label_smoothing,
        config.length_normalised,
        config.simpo_margin,
        config.likelihood_weight,
    )

    def build() -> Any:
        model = base.build(config, precision)
        _without_dropout(model)
        return model

    def start(model: Any) -> None:
        for pairs in [rows] if held_out is None else [rows, held_out]:
            _refer(model, pairs, Preference(settings, padded=task.padded), precision)

    task = Task(
        verb="align",
        config=config,
        run=run,
        precision=precision,
        tokenizer=base.tokenizer,
        architecture=base.architecture,
        build_model=build,
        start=start if config.method in NEEDS_REFERENCE else None,
        rows=rows,
        held_out=held_out,
        weights=[1.0] * len(rows.per_source),
        packing=config.packing,
        objective=lambda padded: Preference(settings, padded=padded),
        takes_rows_apart=True,
        defaults=_defaults(config, base.width),
        parents=opened.parents,
        sample_prompts=_prompts(stores["train"], base.tokenizer),
        facts={"rows": found, "method": config.method, "beta": settings.beta},
        complete=base.completion(config, run),
    )
    return task


def _say_unused(config: AlignConfig) -> None:
    used: dict[str, tuple[str, ...]] = {
        "label_smoothing": ("dpo",),
        "length_normalised": ("dpo",),
        "simpo_margin": ("simpo",),
    }
    used["likelihood_weight"] = ("dpo", "ipo", "simpo", "orpo")
    for name, methods in used.items():
        if config.method not in methods and getattr(config, name) != AlignConfig.model_fields[name].default:
            console.warn(f"{name} is not used: method = {config.method}.")


def _defaults(config: AlignConfig, width: int) -> Defaults:
    """A model that answers already is moved gently: a twentieth of the rate of fine-tuning (Rafailov et al. 2023 take
    1e-6 for models of 3B and more). ORPO and SimPO, which nothing holds back, follow their papers at the same rate.
    """
    rate = 1e-6 * 2560 / width * (10 if config.lora_rank else 1)
    return Defaults(
        learning_rate=min(5e-5, rate),
        muon_learning_rate=1e-3,
        num_epochs=1.0,
        optimizer="adamw",
        update_tokens=16384,
    )


def _without_dropout(model: Any) -> None:
    """A reference that was computed by chance would compare with nothing."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Attention keeps its share as a number.
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    text = model.config.get_text_config()
    for name, value in text.to_dict().items():
        if isinstance(value, float) and value > 0 and ("drop" in name or name.endswith("pdrop")):
            setattr(text, name, 0.0)


def _refer(model: Any, rows: PairRows, objective: Preference, precision: Precision) -> None:
    """Compute the log-probability of every answer under the model as it is, and keep it in the store."""
    store = rows.store
    assert store.values is not None
    values = store.values.copy()
    count = sum(rows.per_source)
    with console.progress("the model as it is", count, "rows") as bar:
        for row in range(count):
            batch = gather(rows, [row], pad_id=0)
            begin_pass(model)
            with precision.autocast():
                sums = objective.answers(model, batch, device=precision.device, row_tokens=rows.max_length)
            begins = [segment.begin for segment in rows.segments(row)]
            values[np.searchsorted(store.starts, begins), REFERENCE] = sums.double().cpu().numpy()
            bar.advance(1)
    store.write_values(values)


# --- rows ---------------------------------------------------------------------------------------------------------


@dataclass
class _Tally:
    """What became of the rows: read = kept + dropped."""

    read: int = 0
    kept: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Document:
    """A question and what follows it: the ids of both, and which of the latter are learned."""

    question: list[int]
    answer: list[int]
    learned: list[bool]

    def __len__(self) -> int:
        return len(self.question) + len(self.answer)

    def encoded(self, source: str) -> Encoded:
        return Encoded(source, self.question + self.answer, [False] * len(self.question) + self.learned)


@dataclass(frozen=True)
class _Pair:
    """Two documents; with KTO `good` says what was judged of the first."""

    source: str
    documents: tuple[_Document, _Document]
    good: bool = True


@dataclass(frozen=True)
class _Judged:
    """One answer with its question, judged good or not."""

    source: str
    document: _Document
    good: bool


def _stores(
    config: AlignConfig, run: RunDirectory, base: Base, positions: int
) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    """What became of the rows, and their stores: those of an earlier process if they are whole."""
    try:
        kept = kept_rows(run)
    except ArtifactError:
        raise ArtifactError(
            f"The rows of {run.path} are damaged, and with them what the model gave to their answers.",
            "Begin anew with --overwrite.",
        ) from None
    return kept or _write_stores(config, run, base, positions)


def _write_stores(
    config: AlignConfig, run: RunDirectory, base: Base, positions: int
) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    tally = _Tally()
    rejected = run.path / "rejected-00000.jsonl"
    splits: dict[str, list[Any]] = {name: [] for name in SPLITS}
    with artifact.disk_faults(rejected), RejectionWriter(rejected) as rejections:

        def reject(rejection: Rejection) -> None:
            tally.read += 1
            tally.dropped[rejection.reason] += 1
            rejections.add(asdict(rejection))

        for comparison in read_comparisons(config.sources, strict=config.strict, reject=reject):
            made, reason = _encode(config, base.tokenizer, comparison, tally, positions)
            if reason is None:
                held_out = question_is_held_out(config.seed, config.held_out, comparison.question)
                splits["held_out" if held_out else "train"] += made
                tally.read += 1
                tally.kept += 1
                continue
            text = json.dumps([comparison.chosen, comparison.rejected], ensure_ascii=False)
            reject(Rejection(reason, comparison.file, comparison.line, text))
    if not splits["train"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in tally.dropped.most_common())
        if splits["held_out"]:
            raise DataError(f"All {tally.kept} rows are held out, none is left to train on.", "Lower held_out.")
        hint = "Answers judged one by one are learned with method = kto." if "one_answer_alone" in reasons else ""
        raise DataError(f"No row is left to train on ({reasons}).", hint or f"See {rejected}; raise max_length.")
    stores = {}
    for name, items in splits.items():
        pairs = list(_mismatched(items, config.row_tokens)) if config.method == "kto" else items
        store = write_store(
            run.tokens / name,
            (document.encoded(pair.source) for pair in pairs for document in pair.documents),
            vocabulary=vocabulary_rows(base.tokenizer),
            tokenizer_hash=artifact.hash_file(tokenizer_file(base.directory)),
            learned=True,
        )
        values = np.full((2 * len(pairs), 2), np.nan)
        values[:, GOOD] = np.repeat([float(pair.good) for pair in pairs], 2)
        store.write_values(values)
        stores[name] = store
        tally.tokens += store.count
        tally.learned_tokens += 0 if store.learned is None else int(store.learned.sum())
    return _said(tally, len(splits["held_out"])), stores


def _said(tally: _Tally, held_out: int) -> dict[str, Any]:
    found = {
        "read": tally.read,
        "kept": tally.kept,
        "held_out": held_out,
        "dropped": dict(tally.dropped),
        "tokens": tally.tokens,
        "learned_tokens": tally.learned_tokens,
    }
    say_rows(found)
    return found


def _encode(
    config: AlignConfig, tokenizer: Any, comparison: Comparison, tally: _Tally, positions: int
) -> tuple[list[Any], str | None]:
    """The pair of a comparison (KTO: its judged answers), or the reason for leaving it out. Nothing is cut."""
    mark = artifact.hash_json([comparison.chosen, comparison.rejected])
    if mark in tally.seen:
        return [], "exact_duplicate"
    tally.seen.add(mark)
    judged = config.method == "kto"
    if not judged and (comparison.chosen is None or comparison.rejected is None):
        return [], "one_answer_alone"
    documents = {
        good: _document(tokenizer, messages, comparison.shared)
        for good, messages in ((True, comparison.chosen), (False, comparison.rejected))
        if messages is not None
    }
    lengths = [len(document) for document in documents.values()]
    if max(lengths) > positions:
        return [], "longer_than_the_model_reads"
    if (2 * max(lengths) if judged else sum(lengths)) > config.row_tokens:
        return [], "longer_than_max_length"
    if judged:
        return [_Judged(comparison.source, document, good) for good, document in documents.items()], None
    return [_Pair(comparison.source, (documents[True], documents[False]))], None


def _document(tokenizer: Any, messages: list[Message], shared: int) -> _Document:
    chat = encode_chat(tokenizer, messages)
    prompt = encode_chat(tokenizer, messages[:shared], add_generation_prompt=True).ids
    begin = len(prompt)
    assert chat.ids[:begin] == prompt, "a prompt is a prefix of its conversation"
    return _Document(prompt, chat.ids[begin:], chat.assistant_mask[begin:])


def _mismatched(judged: list[_Judged], longest: int) -> Iterator[_Pair]:
    """Each judged answer beside the same question with the answer of the next row: KTO's reference point."""
    for number, item in enumerate(judged):
        other, question = judged[(number + 1) % len(judged)].document, item.document.question
        room = longest - len(item.document) - len(question)
        mismatched = _Document(question, other.answer[:room], other.learned[:room])
        yield _Pair(item.source, (item.document, mismatched), item.good)


def _prompts(store: TokenStore, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """The questions of the first trained pair and the middle one: what the samples in the report answer."""
    assert store.learned is not None
    prompts = []
    for pair in sorted({0, int(store.meta["documents"]) // 4}):
        begin, end = int(store.starts[2 * pair]), int(store.starts[2 * pair + 1])
        first = next(i for i in range(begin, end) if store.learned[i])
        ids = store.tokens[begin:first].astype(int).tolist()
        prompts.append((tokenizer.decode(ids, skip_special_tokens=True).strip(), ids))
    return prompts
