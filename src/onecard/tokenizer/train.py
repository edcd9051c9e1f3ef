"""`onecard tokenizer train`: a tokenizer from the training documents of a corpus, with domain terms as single tokens.

In: a corpus directory, read as a stream. Out: a tokenizer directory in Hugging Face layout with chat tokens and a chat
template, onecard.json and report.html. Every string survives a round trip: all 256 bytes are entries and nothing is
normalised. The module does not know how chats become ids (template), how terms are chosen (domain) and placed (terms),
or what makes a good report (report).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import TokenizerTrainConfig
from onecard.errors import ConfigError, DataError
from onecard.tokenizer import domain
from onecard.tokenizer.chunks import batches, chunks
from onecard.tokenizer.sample import Sample
from onecard.tokenizer.special import (
    BYTES,
    CHAT_TEMPLATE,
    DIGITS,
    END_OF_TEXT,
    FIXED_TOKENS,
    MARKUP_TOKENS,
    PAD,
    PRE_TOKENIZERS,
    START_OF_TEXT,
    TURN_END,
    TURN_START,
    WHOLE_PIECES_FIRST,
)
from onecard.tokenizer.terms import Finder, Merge, Term, byte_merges, place_terms, to_symbols

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def train(config: TokenizerTrainConfig) -> dict[str, Any]:
    """Train, measure and write a tokenizer; returns sizes, characters per token by language, terms, seconds."""
    from onecard.tokenizer import report

    started = time.monotonic()
    split_rule = check(config)
    inputs = [config.corpus] if config.terms is None else [config.corpus, config.terms]
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=inputs)
    console.heading(f"Training a tokenizer of {config.vocabulary_size:,} entries on {config.corpus}")
    sample = Sample(config.corpus, config.maximum_characters)
    if not sample.characters:
        raise DataError(
            f"The corpus {config.corpus} has no text to train on.", "Run `onecard clean` with more sources."
        )
    notes = []
    if sample.share < 1:
        notes.append(
            f"Learned from {sample.share:.0%} of the text, taken evenly (maximum_characters "
            f"{config.maximum_characters:,}): more would need more memory and change little."
        )
    model, terms = _learn(config, sample, split_rule)
    tokenizer = wrap(model)
    if len(tokenizer) < config.vocabulary_size:
        notes.append(
            f"{len(tokenizer):,} entries instead of {config.vocabulary_size:,}: in this corpus no further pair of "
            f"pieces is left to merge within {config.maximum_token_characters} characters. More text gives more."
        )
    left_out = [row for row in terms.rows if row.left_out] if terms is not None else []
    notes += [f"{row.text} is not one token: {row.left_out}." for row in left_out]
    measured = report.measure(tokenizer, config.corpus)
    result: dict[str, Any] = {
        "vocabulary_size": len(tokenizer),
        "kind": config.kind,
        "pre_tokenizer": split_rule,
        "documents": sample.documents,
        "characters": sample.characters,
        **measured.summary(),
        **({} if terms is None else domain.as_json(terms)),
        "notes": notes + measured.notes,
        "seconds": round(time.monotonic() - started, 2),
    }
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
        save_tokenizer(tokenizer, directory)
        report.write(directory / "report.html", tokenizer, measured, result, terms)
        artifact.write_manifest(directory, "tokenizer", settings=config.plain(), parents=inputs, result=result)
    report.show(result, config.output, terms)
    return result


def check(config: TokenizerTrainConfig) -> str:
    """The name of the split rule that the settings mean; ConfigError for settings that do not go together."""
    smallest = len(FIXED_TOKENS) + BYTES
    if config.vocabulary_size < smallest:
        raise ConfigError(
            f"vocabulary_size {config.vocabulary_size} is too small: {smallest} entries are fixed.",
            f"Give at least {smallest + 1}.",
        )
    if config.kind == "unigram" and (config.terms is not None or config.mine_terms):
        raise ConfigError(
            "Terms become single tokens by merges, which a unigram tokenizer does not have.", "Take kind = bpe."
        )
    if config.pre_tokenizer == "auto":
        return DIGITS["one" if config.digits == "auto" else config.digits][0]
    if config.digits != "auto" and config.pre_tokenizer not in DIGITS[config.digits]:
        fitting = " or ".join(DIGITS[config.digits])
        raise ConfigError(
            f"pre_tokenizer {config.pre_tokenizer} does not split numbers as digits = {config.digits} says.",
            f"Take pre_tokenizer = {fitting}, or leave one of the two out.",
        )
    return config.pre_tokenizer


def _learn(config: TokenizerTrainConfig, sample: Sample, split_rule: str) -> tuple[Tokenizer, domain.Terms | None]:
    """The tokenizer, and its terms if there are any."""
    shape = {
        "vocabulary_size": config.vocabulary_size,
        "pre_tokenizer": split_rule,
        "maximum_token_characters": config.maximum_token_characters,
    }
    if config.kind == "unigram":
        return train_unigram(sample, **shape), None  # type: ignore[arg-type]
    base = train_model(sample, **shape)  # type: ignore[arg-type]
    if config.terms is None and not config.mine_terms:
        return base, None
    found = domain.candidates(config.terms, config.mine_terms, sample, config.maximum_token_characters)
    used_without = domain.uses(base, sample)
    terms = domain.paying(base, used_without, found, config.mine_terms)
    console.note(f"  training again around {len(terms):,} terms that become one token each")
    made, left_out = train_with_terms(sample, terms, base, **shape)  # type: ignore[arg-type]
    used = domain.uses(made, sample)
    if config.terms is None and used.total() >= used_without.total():
        console.note("  the terms found in the corpus save nothing over all: the tokenizer is made without them")
        return base, None
    rows = domain.rows(base, made, used, terms, left_out)
    return made, domain.Terms(rows, used_without.total(), used.total())


def splits(pre_tokenizer: str) -> list[Any]:
    """The steps of the split rule of that name."""
    from tokenizers import Regex, pre_tokenizers

    return [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in PRE_TOKENIZERS[pre_tokenizer]
    ]


def splitter(pre_tokenizer: str, cut: int | None = None) -> Any:
    """The split rule of that name, then bytes; with `cut` no piece is longer than so many characters."""
    from tokenizers import pre_tokenizers

    steps = splits(pre_tokenizer)
    if cut is not None:
        steps.append(pre_tokenizers.FixedLength(length=cut))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_model(
    texts: Iterable[str], *, vocabulary_size: int, pre_tokenizer: str, maximum_token_characters: int
) -> Tokenizer:
    """Learn the merges from texts; the result has at most `vocabulary_size` entries, fewer if the texts give no more.

    Pieces longer than `maximum_token_characters` are cut for training only. A token is merged inside one cut piece, so
    none is longer than that, counted in characters (the limit of the trainer counts bytes, in which a Chinese character
    is three); and a text without spaces or newlines cannot become one piece of megabytes.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(pre_tokenizer, cut=maximum_token_characters)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(FIXED_TOKENS),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(chunks(texts), trainer)
    return _finished(tokenizer, pre_tokenizer)


def train_unigram(
    texts: Iterable[str], *, vocabulary_size: int, pre_tokenizer: str, maximum_token_characters: int
) -> Tokenizer:
    """The same by a unigram model (Kudo 2018) over bytes: each piece is split in the likeliest way.

    All 256 bytes are entries, so that every string survives here too. The library reads such a tokenizer, and so do
    transformers and vLLM; GGUF has no place for it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = splitter(pre_tokenizer, cut=maximum_token_characters)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=alphabet,
        special_tokens=list(FIXED_TOKENS),
        # In symbols, which are bytes; characters are bounded by the cut.
        max_piece_length=4 * maximum_token_characters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(chunks(texts), trainer)
    assert set(alphabet) <= tokenizer.get_vocab().keys(), "without an entry for each byte a text could be lost"
    return _finished(tokenizer, pre_tokenizer)


def train_with_terms(
    texts: Iterable[str],
    terms: Sequence[Term],
    base: Tokenizer,
    *,
    vocabulary_size: int,
    pre_tokenizer: str,
    maximum_token_characters: int,
) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer of the size of `base`, which was trained on the same texts, with the terms placed among its merges.

    Returns it and {term: why it is not one token}. It is learned from the text between the terms: a term teaches no
    merge across its edges, and no entry is spent on parts of it. And it is learned from characters, of which those that
    `base` has an entry for are joined from their bytes first: a merge of the end of one character with the beginning of
    the next, as bytes alone would give, could take the edge off a term.
    """
    too_long = {
        term.text: f"longer than {maximum_token_characters} characters"
        for term in terms
        if len(term.text) > maximum_token_characters
    }
    wanted = [term for term in terms if term.text not in too_long]
    finder = Finder(term.text for term in wanted)
    between = (
        part
        for batch in batches(chunks(texts))
        for parts in finder.split(batch)
        for part, is_term in parts
        if not is_term
    )
    characters = {character for term in wanted for character in term.text} | set(_characters(base))
    of_bytes = byte_merges(characters)
    size = vocabulary_size - len(FIXED_TOKENS) - BYTES
    learned = _character_merges(between, characters, size, pre_tokenizer, maximum_token_characters)
    placed = place_terms([*of_bytes, *learned], wanted, splitter=base, size=size)
    return assemble(placed.merges, pre_tokenizer), {**too_long, **placed.left_out}


def _characters(tokenizer: Tokenizer) -> Iterator[str]:
    """The characters that a tokenizer has one entry for, in the order of their entries."""
    for index in range(len(FIXED_TOKENS), tokenizer.get_vocab_size()):
        text = tokenizer.decode([index])
        if len(text) == 1 and text != "\ufffd":
            yield text


def _character_merges(
    texts: Iterable[str], characters: set[str], most: int, pre_tokenizer: str, maximum_token_characters: int
) -> list[Merge]:
    """Up to `most` merges of whole characters, learned from texts in which all other characters stand apart."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    alphabet = sorted(characters)
    others = "[^" + "".join(f"\\x{{{ord(character):x}}}" for character in alphabet) + "]"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *splits(pre_tokenizer),
            pre_tokenizers.Split(Regex(others), behavior="isolated"),
            pre_tokenizers.FixedLength(length=maximum_token_characters),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + most,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [("".join(to_symbols(left)), "".join(to_symbols(right))) for left, right in found]


def assemble(merges: Sequence[Merge], pre_tokenizer: str) -> Tokenizer:
    """A byte-level tokenizer with these merges: fixed tokens, bytes, then what the merges make, in their order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    entries = [*FIXED_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(entries))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    made.add_special_tokens(list(FIXED_TOKENS))
    return _finished(made, pre_tokenizer)


def _finished(tokenizer: Tokenizer, pre_tokenizer: str) -> Tokenizer:
    """The trained tokenizer as it is used: pieces whole, BOS in front, markup tokens ordinary ones."""
    from tokenizers import Tokenizer, decoders, processors

    tokenizer.pre_tokenizer = splitter(pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    start = tokenizer.token_to_id(START_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START_OF_TEXT} $A",
        pair=f"{START_OF_TEXT} $A {START_OF_TEXT}:1 $B:1",
        special_tokens=[(START_OF_TEXT, start)],
    )
    description = json.loads(tokenizer.to_str())
    if description["model"]["type"] == "BPE":
        description["model"]["ignore_merges"] = pre_tokenizer in WHOLE_PIECES_FIRST
    # The trainer makes every fixed token special; the markup tokens are ordinary ones.
    for token in description["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    return Tokenizer.from_str(json.dumps(description))


def wrap(model: Tokenizer) -> PreTrainedTokenizerFast:
    """The transformers tokenizer around a trained one: names of the control tokens and the chat template."""
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = made(
        tokenizer_object=model,
        bos_token=START_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        # The limit belongs to the model (its max_position_embeddings), not to the tokenizer.
        model_max_length=1_000_000_000,
        padding_side="right",
        # Without this transformers adds token_type_ids, which no decoder takes.
        model_input_names=["input_ids", "attention_mask"],
    )
    return wrapped


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the files of a tokenizer into an existing directory, in the form that older readers understand too.

    transformers 5 names its class TokenizersBackend and lists tokens as extra_special_tokens; transformers 4, which
    some servers still run on, fails on both. Version 5 reads the old names just as well.
    """
    tokenizer.save_pretrained(str(directory))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.pop("backend", None)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    artifact.write_json_atomically(path, settings)
