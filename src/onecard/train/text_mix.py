"""Plain text among the rows of fine-tuning, so that a model forgets less of what it knew; or text alone.

In: the settings, which name a corpus and the share of the rows that shall be text. Out: documents of that corpus, cut
to rows, every token learned; and the weight of that source in an epoch. Each epoch takes other rows as long as there
are some. With a share of 1 a model is pretrained further: all documents are rows, and those held out measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onecard import artifact, console
from onecard.config import FinetuneConfig
from onecard.data.corpus import Split, read_documents
from onecard.data.tokens import Encoded
from onecard.errors import ConfigError
from onecard.tokenizer.template import encode_documents

SOURCE = "plain text"
# Passes over the chats for which fresh text is kept, where their number is not set.
USUAL_EPOCHS = 3.0
# A token of English has about four characters, one of Chinese one to two: rather too much text than too little.
CHARACTERS_A_TOKEN = 4
DOCUMENTS_AT_A_TIME = 256


def inputs(config: FinetuneConfig) -> list[str]:
    """What decides the text, for the fingerprint of a run; ConfigError if the settings do not go together."""
    if not config.text_share:
        if config.corpus is not None:
            console.warn("corpus is not used: text_share = 0 mixes no text in.")
        return []
    if config.corpus is None:
        raise ConfigError(
            f"text_share = {config.text_share:g} wants plain text, and no corpus is given.",
            "Set corpus to a corpus directory (from `onecard clean`), or text_share = 0.",
        )
    return [artifact.read_manifest(config.corpus, "corpus").content_hash]


def alone(config: FinetuneConfig) -> bool:
    """Whether there are no chats: the model is pretrained further."""
    return config.text_share == 1


def documents(config: FinetuneConfig, tokenizer: Any, chat_tokens: int) -> list[Encoded]:
    """About as many tokens as `text_share` wants over all passes, of documents chosen evenly over the corpus."""
    if not config.text_share:
        return []
    assert config.corpus is not None
    epochs = USUAL_EPOCHS if config.num_epochs == "auto" else config.num_epochs
    wanted = chat_tokens * epochs * config.text_share / (1 - config.text_share)
    held = max(1, int(artifact.read_manifest(config.corpus, "corpus").result.get("characters", 1)))
    share = min(1.0, CHARACTERS_A_TOKEN * wanted / held)
    found = list(rows(config, tokenizer, "train", share))
    console.note(f"  {sum(len(item.ids) for item in found):,} tokens of plain text are mixed in")
    return found


def rows(config: FinetuneConfig, tokenizer: Any, split: Split, share: float = 1.0) -> Iterator[Encoded]:
    """The documents of a split, or so large a share of them, encoded and cut to rows."""
    assert config.corpus is not None
    batch: list[str] = []

    def encoded() -> Iterator[Encoded]:
        for ids in encode_documents(tokenizer, batch):
            for at in range(0, len(ids), config.row_tokens):
                piece = ids[at : at + config.row_tokens]
                yield Encoded(SOURCE, piece, [True] * len(piece))
        batch.clear()

    for document in read_documents(config.corpus, split):
        if int(artifact.hash_json([config.seed, document.id])[:8], 16) < share * 16**8:
            batch.append(document.text)
        if len(batch) == DOCUMENTS_AT_A_TIME:
            yield from encoded()
    yield from encoded()


def weights(sources: list[str], per_source: list[int], share: float) -> list[float]:
    """Passes over each source in an epoch: one over the chats, and as many rows of text as make up the share."""
    if share == 1:
        return [1.0 for _ in sources]
    text = sum(count for name, count in zip(sources, per_source) if name == SOURCE)
    chats = sum(per_source) - text
    passes = share / (1 - share) * chats / text if text else 1.0
    return [passes if name == SOURCE else 1.0 for name in sources]
