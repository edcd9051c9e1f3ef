"""The verb `pretrain`: a corpus and a tokenizer in, a run directory with a language model out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from onecard import artifact, console
from onecard.config import PretrainConfig
from onecard.data import token_cache
from onecard.data.corpus import Split, read_documents
from onecard.data.mixing import passes
from onecard.data.packing import StreamRows
from onecard.data.tokens import TokenStore, write_store
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.model.load import load_tokenizer, tokenizer_hash, vocabulary_rows
from onecard.model.presets import Preset, llama_config, preset
from onecard.model.start import LARGEST_VOCABULARY, apply_start, bigram_counts, fit_bigram, fit_flops
from onecard.plan.speed import choose_size
from onecard.settings import nearest
from onecard.tokenizer.stream import encode_stream
from onecard.tokenizer.template import encode_prompt
from onecard.train.directory import RunDirectory
from onecard.train.precision import choose
from onecard.train.session import check, fingerprint, free_settings_removed, train
from onecard.train.task import Defaults, Task

# The start from counts may take this share of a run: it saves a run of minutes about a third of its updates.
LARGEST_START_SHARE = 0.05
# Passes over the corpus where neither their number nor a time is given: more teach little (Muennighoff et al. 2023).
EPOCHS = 4.0


def pretrain(config: PretrainConfig) -> dict[str, Any]:
    """Train a model from nothing. Resumes an unfinished run with the same settings and inputs."""
    return train(prepare(config))


def prepare(config: PretrainConfig) -> Task:
    """Everything that is decided before the run: inputs, rows, model, what auto becomes."""
    check(config)
    corpus = artifact.read_manifest(config.corpus, "corpus")
    tokenizer = load_tokenizer(config.tokenizer)
    tokenizer_mark = tokenizer_hash(config.tokenizer)
    if config.size != "auto":
        preset(config.size)
    mark = fingerprint(config, [corpus.content_hash, tokenizer_mark])
    run = RunDirectory.open(
        config.output, fingerprint=mark, settings=free_settings_removed(config), overwrite=config.overwrite
    )
    config = run.in_force(config)
    vocabulary = vocabulary_rows(tokenizer)
    store = _store(run, config.corpus, "train", tokenizer, vocabulary, tokenizer_mark)
    held_out = _store(run, config.corpus, "held_out", tokenizer, vocabulary, tokenizer_mark)
    if store is None:
        raise DataError(f"The corpus {config.corpus} has no document to train on.", "Run `onecard clean` on more text.")
    unknown = {*config.mix, *config.mix_shares} - set(store.sources)
    if unknown:
        name = sorted(unknown)[0]
        hint = nearest(name, store.sources).strip() or f"Sources: {', '.join(store.sources)}."
        raise ConfigError(f"mix names a source {name} that the corpus does not have.", hint)
    if config.mix_shares and not config.mix:  # what was set in the run itself counts more
        config = config.model_copy(update={"mix": passes(config.mix_shares, _tokens_by_source(store))})
    weights = [config.mix.get(name, 1.0) for name in store.sources]
    precision = choose(config.precision if run.plan is None else run.plan["precision"])
    shape = _shape(config, run, store, vocabulary, precision.flops_per_second, precision.device, weights)
    if config.max_length == "auto":
        config = config.model_copy(update={"max_length": shape.context_tokens})
    rows = StreamRows(store, config.row_tokens)
    _check_mix(store.sources, rows.per_source, weights)
    _check_vocabulary(shape, vocabulary)
    if run.plan is not None:
        from_counts = run.plan["start"] == "bigram"
    else:
        work = _training_flops(config, shape, vocabulary, rows, weights, precision.flops_per_second)
        from_counts = starts_from_counts(config, shape, vocabulary, work)
    if from_counts:
        shape = replace(shape, tied=False)

    def architecture() -> Any:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        # Positions beyond a training row were never seen: the model is not promised to read further.
        return llama_config(shape, vocabulary=vocabulary, max_positions=config.row_tokens, token_ids=ids)

    def build() -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM(architecture())

    def start(model: Any) -> None:
        console.note("  counting which token follows which, and starting the model from that")
        counts = bigram_counts(store, weights, vocabulary=vocabulary).to(precision.device)
        apply_start(model, fit_bigram(counts, shape.width, seed=config.seed, epsilon=model.config.rms_norm_eps))

    return Task(
        verb="pretrain",
        config=config,
        run=run,
        precision=precision,
        tokenizer=tokenizer,
        architecture=architecture,
        build_model=build,
        start=start if from_counts else None,
        rows=rows,
        held_out=None if held_out is None else StreamRows(held_out, config.row_tokens),
        weights=weights,
        defaults=_defaults(shape, from_counts=from_counts),
        parents=[config.corpus, config.tokenizer],
        sample_prompts=_prompts(config.corpus, tokenizer),
        facts={"size": shape.name, "start": "bigram" if from_counts else "random"},
    )


def _training_flops(
    config: PretrainConfig, shape: Preset, vocabulary: int, rows: StreamRows, weights: list[float], rate: float
) -> float:
    """About how much the whole run computes: by its updates, by its passes over the rows, or by its time."""
    per_token = shape.training_flops_per_token(vocabulary, config.row_tokens / 2)
    if config.max_steps != "auto":
        return config.max_steps * shape.update_tokens * per_token
    epochs = _defaults(shape, from_counts=False).num_epochs if config.num_epochs == "auto" else config.num_epochs
    taken = sum(count * weight for count, weight in zip(rows.per_source, weights))
    by_rows = epochs * taken * config.row_tokens * per_token
    return by_rows if config.time_limit_minutes is None else min(by_rows, 60 * config.time_limit_minutes * rate)


def starts_from_counts(config: PretrainConfig, shape: Preset, vocabulary: int, work: float) -> bool:
    """Whether the model starts at token statistics; ConfigError where that is asked for and cannot be.

    `auto` takes it where it is a small share of `work`, the FLOP of the run.
    """
    fits = vocabulary <= LARGEST_VOCABULARY
    if config.start == "bigram" and not fits:
        raise ConfigError(
            f"start = bigram needs a vocabulary of at most {LARGEST_VOCABULARY:,}; this tokenizer has {vocabulary:,}.",
            "Set start = random, or train a smaller tokenizer.",
        )
    if config.start != "auto":
        return config.start == "bigram"
    return fits and fit_flops(vocabulary, shape.width) <= LARGEST_START_SHARE * work


def _tokens_by_source(store: TokenStore) -> dict[str, int]:
    lengths = store.lengths()
    return {name: int(lengths[store.source_of == place].sum()) for place, name in enumerate(store.sources)}


def _check_mix(sources: list[str], per_source: list[int], weights: list[float]) -> None:
    """ConfigError if no source is used, or one that is asked for has less than half a row an epoch."""
    if not any(weights):
        raise ConfigError("mix gives every source a weight of 0.", "Give at least one source a positive weight.")
    for name, count, weight in zip(sources, per_source, weights):
        if count and weight and not round(count * weight):
            raise ConfigError(
                f"mix gives {name} a weight of {weight}, which is none of its {count} rows in an epoch.",
                f"Give it at least {1 / count:.3g}, or 0 to leave it out.",
            )


def _check_vocabulary(shape: Preset, vocabulary: int) -> None:
    """Say it where the vocabulary is far from what the size of the model can use."""
    if not shape.vocabulary / 4 <= vocabulary <= shape.vocabulary * 4:
        console.note(
            f"  a {shape.name} model learns best with a vocabulary of about {shape.vocabulary:,}; this tokenizer has "
            f"{vocabulary:,} entries (see --vocabulary-size of `onecard tokenizer train`)"
        )


def _store(
    run: RunDirectory, corpus: Path, split: Split, tokenizer: Any, vocabulary: int, tokenizer_mark: str
) -> TokenStore | None:
    """The tokens of one split, made once for a corpus and a tokenizer; None if the split has no document."""
    directory = run.tokens / split
    if (directory / "meta.json").exists():
        try:
            store = TokenStore(directory)
            return store if store.count else None
        except ArtifactError:
            console.note(f"  the token store {directory} is incomplete and is made again")
    files = [artifact.hash_file(path) for path in sorted(corpus.glob("documents-*.parquet"))]
    key = artifact.hash_json(["documents", artifact.versions(), files, split, tokenizer_mark])
    again = token_cache.fetch(key, {split: directory}) is not None
    if not again:
        documents = ((document.source, document.text) for document in read_documents(corpus, split))
        encoded = encode_stream(tokenizer, documents)
        write_store(directory, encoded, vocabulary=vocabulary, tokenizer_hash=tokenizer_mark)
        token_cache.keep(key, {split: directory}, {})
    store = TokenStore(directory)
    if not store.count:
        return None
    of_before = ", tokenised before" if again else ""
    console.note(f"  {split}: {store.count:,} tokens in {store.meta['documents']:,} documents{of_before}")
    return store


def _shape(
    config: PretrainConfig,
    run: RunDirectory,
    store: TokenStore,
    vocabulary: int,
    rate: float,
    device: str,
    weights: list[float],
) -> Preset:
    """The preset asked for, the one planned before, or the one that fits the time."""
    if run.plan is not None:
        return preset(run.plan["size"])
    if config.size != "auto":
        return preset(config.size)
    if config.time_limit_minutes is None:
        raise ConfigError(
            "size = auto needs to know how long the run may take.",
            "Give --time-limit-minutes, or a --size such as 26M.",
        )
    lengths = store.lengths()
    tokens = sum(int(lengths[store.source_of == i].sum() * weight) for i, weight in enumerate(weights))
    return choose_size(
        seconds=config.time_limit_minutes * 60,
        flops_per_second=rate,
        device=device,
        vocabulary=vocabulary,
        tokens=tokens,
        context_tokens=None if config.max_length == "auto" else config.max_length,
    )


def _defaults(shape: Preset, *, from_counts: bool) -> Defaults:
    """What the size suggests (see model/presets.py).

    A model that starts at token statistics is moved gently: its embeddings are nearly right already.
    """
    gentle = 0.125 if from_counts else 1.0
    return Defaults(
        learning_rate=gentle * shape.learning_rate,
        muon_learning_rate=0.015 if from_counts else 0.02,
        num_epochs=EPOCHS,
        optimizer="muon",
        update_tokens=shape.update_tokens,
    )


def _prompts(corpus: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """The beginning of one held-out document of each language: what the samples in the report continue."""
    prompts: dict[str, tuple[str, list[int]]] = {}
    for document in read_documents(corpus, "held_out"):
        if document.language not in prompts and len(document.text) > 200:
            shown = document.text[: 24 if document.language == "zh" else 60]
            prompts[document.language] = (shown, encode_prompt(tokenizer, shown))
        if len(prompts) == 2:
            break
    return list(prompts.values())
