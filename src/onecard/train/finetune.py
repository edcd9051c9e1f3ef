"""The verb `finetune`: a model and chats in, a run directory with a model that answers out.

Only the answers are learned: the tokens that the assistant writes, the end of its turn included.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TypeVar

from onecard import artifact, console
from onecard.config import FinetuneConfig
from onecard.data import token_cache
from onecard.data.corpus import Split
from onecard.data.packing import PackedRows
from onecard.data.row_checks import RowChecks
from onecard.data.rows import RejectionWriter
from onecard.data.sources import source_files
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.errors import ArtifactError, DataError
from onecard.model.load import tokenizer_hash, vocabulary_rows
from onecard.train import chat_rows, text_mix
from onecard.train.base import SPLITS, Opened, kept_rows, open_run, say_rows
from onecard.train.directory import RunDirectory
from onecard.train.neftune import add_noise
from onecard.train.session import train
from onecard.train.task import Defaults, Task

# Tokens of a row where nothing is said: few chats are longer, and packed rows waste nothing on short ones.
USUAL_LENGTH = 1024
# Of text alone, so much of its first document is given to be continued.
PROMPT_TOKENS = 16
AnyChats = TypeVar("AnyChats", bound=FinetuneConfig)


def finetune(config: FinetuneConfig) -> dict[str, Any]:
    """Fine-tune all weights, or adapters, on chats. Resumes an unfinished run with the same settings and inputs."""
    return train(prepare(config))


def prepare(config: FinetuneConfig) -> Task:
    """Everything that is decided before the run: inputs, rows, model, what auto becomes."""
    inputs = text_mix.inputs(config) + evaluation_inputs(config)
    opened = open_run(config, USUAL_LENGTH, chats=not text_mix.alone(config), inputs=inputs)
    return task_of("finetune", opened, opened.config)


def task_of(verb: str, opened: Opened[AnyChats], rows_config: FinetuneConfig) -> Task:
    """What a verb that learns answers does with the rows that `rows_config` names, for its own settings."""
    config, base, run, tokenizer = opened.config, opened.base, opened.run, opened.base.tokenizer
    found, stores = stores_of(rows_config, run, tokenizer)
    rows, held_out_store = PackedRows(stores["train"], config.row_tokens), stores["held_out"]

    def build() -> Any:
        model = base.build(config, opened.precision)
        if config.neftune_alpha:
            add_noise(model, config.neftune_alpha)
        return model

    return Task(
        verb=verb,
        config=config,
        run=run,
        precision=opened.precision,
        tokenizer=tokenizer,
        architecture=base.architecture,
        build_model=build,
        rows=rows,
        held_out=PackedRows(held_out_store, config.row_tokens) if held_out_store.count else None,
        weights=text_mix.weights(rows.store.sources, rows.per_source, config.text_share),
        packing=config.packing,
        defaults=defaults_of(base.width, adapters=config.lora_rank > 0),
        parents=opened.parents,
        sample_prompts=prompts_of(run, tokenizer),
        facts={"rows": found},
        complete=base.completion(config, run),
    )


def defaults_of(width: int, *, adapters: bool) -> Defaults:
    """Small models of one's own learn chats fast and high; large open ones are moved gently.

    Adapters want ten times the rate of all weights, whatever their rank when alpha grows with it (Schulman et al. 2025,
    "LoRA without regret"): 2e-4 at a width of 2048. They are moved by AdamW, whose rate that is.
    """
    gentle = 2e-5 * 2048 / width
    if adapters:
        rate, optimizer = min(2e-3, 10 * gentle), "adamw"
    elif width <= 512:
        rate, optimizer = 2e-3, "muon"
    else:
        rate, optimizer = min(1e-3, gentle), "adamw"
    return Defaults(
        learning_rate=rate,
        muon_learning_rate=0.015,
        num_epochs=3.0,
        optimizer=optimizer,
        update_tokens=2048 if width <= 256 else 8192,
    )


# --- rows ---------------------------------------------------------------------------------------------------------


def stores_of(
    config: FinetuneConfig, run: RunDirectory, tokenizer: Any
) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    """What became of the rows, and the stores of train and held_out: those of an earlier process if they are whole."""
    try:
        kept = kept_rows(run)
        if kept is not None:
            return kept
    except ArtifactError:
        console.note("  the token store is incomplete and is made again")
    places = {name: run.tokens / name for name in SPLITS}
    besides = {"rejected.jsonl": run.path / "rejected-00000.jsonl", chat_rows.LOOK: run.path / chat_rows.LOOK}
    key = _key(config)
    written = token_cache.fetch(key, places, besides)
    if written is None:
        written = _write_stores(config, run, tokenizer)
        token_cache.keep(key, places, written, besides)
    say_rows(written)
    chat_rows.say(json.loads((run.path / chat_rows.LOOK).read_text(encoding="utf-8")))
    return (run.plan["rows"] if run.plan is not None else written), {
        name: TokenStore(place) for name, place in places.items()
    }


def evaluation_inputs(config: FinetuneConfig) -> list[str]:
    """The hashes of the evaluation files that rows are compared with."""
    return [artifact.hash_file(path) for source in config.decontaminate for path in source_files(source)]


def _key(config: FinetuneConfig) -> str:
    """The hash of everything that decides the tokens of the rows: files, settings, tokenizer, template, libraries."""
    files = [artifact.hash_file(path) for source in config.sources for path in source_files(source)]
    rows: list[Any] = [config.held_out, config.seed, config.row_tokens, config.strict, config.learn]
    rows += evaluation_inputs(config)
    if config.text_share:
        rows += [config.text_share, config.num_epochs, *text_mix.inputs(config)]
    # With their paths, which rejected rows are named by.
    sources = config.plain()["sources"]
    return artifact.hash_json(["chats", artifact.versions(), tokenizer_hash(config.model), files, sources, rows])


def _write_stores(config: FinetuneConfig, run: RunDirectory, tokenizer: Any) -> dict[str, Any]:
    """Encode every chat, put each into train or held_out by its first question, and say what became of the rows."""
    if text_mix.alone(config):
        return _write_text(config, run, tokenizer)
    rejected = run.path / "rejected-00000.jsonl"
    with artifact.disk_faults(rejected), RejectionWriter(rejected) as rejections:
        read = chat_rows.read(config, tokenizer, lambda rejection: rejections.add(asdict(rejection)))
    splits = read.splits
    if not splits["train"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(read.facts["dropped"]).most_common())
        if splits["held_out"]:
            raise DataError(
                f"All {len(splits['held_out'])} rows are held out, none is left to train on.", "Lower held_out."
            )
        longer = "a larger max_length may help" if "answer_beyond_max_length" in read.facts["dropped"] else "mend them"
        raise DataError(f"No row is left to train on ({reasons}).", f"See {rejected}; {longer}.")
    artifact.write_json_atomically(run.path / chat_rows.LOOK, read.look)
    text = text_mix.documents(config, tokenizer, sum(len(item.ids) for item in splits["train"]))
    for name, documents in splits.items():
        documents += text if name == "train" else []
        write_store(
            run.tokens / name,
            documents,
            vocabulary=vocabulary_rows(tokenizer),
            tokenizer_hash=tokenizer_hash(config.model),
            learned=True,
        )
    return {**read.facts, **({"text_tokens": sum(len(item.ids) for item in text)} if text else {})}


def _write_text(config: FinetuneConfig, run: RunDirectory, tokenizer: Any) -> dict[str, Any]:
    """Encode the documents of the corpus, each in the split that it has there."""
    splits: tuple[Split, ...] = ("train", "held_out")
    counts: dict[str, list[int]] = {name: [] for name in splits}
    with RejectionWriter(run.path / "rejected-00000.jsonl"):
        pass  # nothing of a finished corpus is refused

    def counted(split: Split) -> Iterator[Encoded]:
        for item in text_mix.rows(config, tokenizer, split):
            counts[split].append(len(item.ids))
            yield item

    for name in splits:
        write_store(
            run.tokens / name,
            counted(name),
            vocabulary=vocabulary_rows(tokenizer),
            tokenizer_hash=tokenizer_hash(config.model),
            learned=True,
        )
    if not counts["train"]:
        raise DataError(f"The corpus {config.corpus} has no document to train on.", "Run `onecard clean` on more text.")
    artifact.write_json_atomically(run.path / chat_rows.LOOK, {"findings": RowChecks().findings(), "shown": []})
    rows, tokens = (sum(map(measure, counts.values())) for measure in (len, sum))
    facts = {"read": rows, "kept": rows, "held_out": len(counts["held_out"]), "dropped": {}, "truncated": 0}
    return {**facts, "tokens": tokens, "learned_tokens": tokens, "text_tokens": tokens}


def prompts_of(run: RunDirectory, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """The questions of the first trained chat and the middle one: what the samples in the report answer."""
    store = TokenStore(run.tokens / "train")
    assert store.learned is not None
    prompts = []
    if set(store.sources) == {text_mix.SOURCE}:
        ids = store.tokens[: min(PROMPT_TOKENS, int(store.starts[1]) - 1)].astype(int).tolist()
        return [(tokenizer.decode(ids, skip_special_tokens=True).strip(), ids)]
    chats = sum(store.sources[source] != text_mix.SOURCE for source in store.source_of.tolist())
    for index in sorted({0, chats // 2}):  # plain text follows the chats
        begin, end = int(store.starts[index]), int(store.starts[index + 1])
        first = next(i for i in range(begin, end) if store.learned[i])
        ids = store.tokens[begin:first].astype(int).tolist()
        prompts.append((tokenizer.decode(ids, skip_special_tokens=True).strip(), ids))
    return prompts
