"""`onecard tokenizer train`: a byte-level BPE tokenizer from the training documents of a corpus.

In: a corpus directory, read as a stream. Out: a tokenizer directory in Hugging Face layout with chat tokens and a chat
template, onecard.json and report.html. Every string survives a round trip: all 256 bytes are entries and nothing is
normalised. The module does not know how chats become ids (template) or what makes a good report (report).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import TokenizerTrainConfig
from onecard.data.corpus import read_documents
from onecard.errors import ConfigError, DataError
from onecard.tokenizer.chunks import chunks
from onecard.tokenizer.special import (
    BYTES,
    CHAT_TEMPLATE,
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

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def train(config: TokenizerTrainConfig) -> dict[str, Any]:
    """Train, measure and write a tokenizer; returns sizes, characters per token by language, seconds."""
    from onecard.tokenizer import report

    started = time.monotonic()
    smallest = len(FIXED_TOKENS) + BYTES
    if config.vocabulary_size < smallest:
        raise ConfigError(
            f"vocabulary_size {config.vocabulary_size} is too small: {smallest} entries are fixed.",
            f"Give at least {smallest + 1}.",
        )
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.corpus])
    console.heading(f"Training a tokenizer of {config.vocabulary_size:,} entries on {config.corpus}")
    seen = _Seen()
    model = train_model(
        seen.texts(config.corpus),
        vocabulary_size=config.vocabulary_size,
        pre_tokenizer=config.pre_tokenizer,
        maximum_token_characters=config.maximum_token_characters,
    )
    if not seen.characters:
        raise DataError(
            f"The corpus {config.corpus} has no text to train on.", "Run `onecard clean` with more sources."
        )
    tokenizer = wrap(model)
    notes = []
    if len(tokenizer) < config.vocabulary_size:
        notes.append(
            f"{len(tokenizer):,} entries instead of {config.vocabulary_size:,}: in this corpus no further pair of "
            f"pieces is left to merge within {config.maximum_token_characters} characters. More text gives more."
        )
    measured = report.measure(tokenizer, config.corpus)
    result: dict[str, Any] = {
        "vocabulary_size": len(tokenizer),
        "pre_tokenizer": config.pre_tokenizer,
        "documents": seen.documents,
        "characters": seen.characters,
        **measured.summary(),
        "notes": notes + measured.notes,
        "seconds": round(time.monotonic() - started, 2),
    }
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.corpus]) as directory:
        save_tokenizer(tokenizer, directory)
        report.write(directory / "report.html", tokenizer, measured, result)
        artifact.write_manifest(directory, "tokenizer", settings=config.plain(), parents=[config.corpus], result=result)
    report.show(result, config.output)
    return result


class _Seen:
    """Streams the training texts and counts what went by."""

    def __init__(self) -> None:
        self.documents = 0
        self.characters = 0

    def texts(self, corpus: Path) -> Iterator[str]:
        for document in read_documents(corpus, "train"):
            self.documents += 1
            self.characters += len(document.text)
            yield document.text


def train_model(
    texts: Iterable[str], *, vocabulary_size: int, pre_tokenizer: str, maximum_token_characters: int
) -> Tokenizer:
    """Learn the merges from texts; the result has at most `vocabulary_size` entries, fewer if the texts give no more.

    Pieces longer than `maximum_token_characters` are cut for training only. A token is merged inside one cut piece, so
    none is longer than that, counted in characters (the limit of the trainer counts bytes, in which a Chinese character
    is three); and a text without spaces or newlines cannot become one piece of megabytes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre_tokenizer]), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.FixedLength(length=maximum_token_characters)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cut, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(FIXED_TOKENS),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(chunks(texts), trainer)

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    start = tokenizer.token_to_id(START_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START_OF_TEXT} $A",
        pair=f"{START_OF_TEXT} $A {START_OF_TEXT}:1 $B:1",
        special_tokens=[(START_OF_TEXT, start)],
    )
    tokenizer.model.ignore_merges = pre_tokenizer in WHOLE_PIECES_FIRST
    # The trainer makes every fixed token special; the markup tokens are ordinary ones.
    description = json.loads(tokenizer.to_str())
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
