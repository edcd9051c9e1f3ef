"""How well a tokenizer fits a corpus: characters and bytes a token by language, longest tokens, unused entries, splits.

In: a tokenizer and a corpus or documents. Out: numbers for the result, and report.html for a person. Numbers of a
corpus come from held-out documents, which the tokenizer was not trained on; where there are none, from the training
documents, and a note says so. It does not know how the tokenizer came to be, nor of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.data.corpus import Document, read_documents
from onecard.report import Page
from onecard.tokenizer.chunks import chunks
from onecard.tokenizer.domain import Terms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Enough to know three digits of a ratio; more would only cost time.
MEASURED_CHARACTERS = 2_000_000
BATCH_DOCUMENTS = 256
SAMPLE_CHARACTERS = 160
LONGEST_SHOWN = 40
TERMS_SHOWN = 300
TERMS_PRINTED = 10


@dataclass
class Count:
    """What the text of one language, or one source, comes to."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    tokens: int = 0

    @property
    def characters_per_token(self) -> float:
        return self.characters / max(self.tokens, 1)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(self.tokens, 1)


@dataclass
class Measurement:
    """What `measure` found; `used` holds the ids seen at least once, `longest` the longest tokens and their ids."""

    by_language: dict[str, Count] = field(default_factory=dict)
    by_source: dict[str, Count] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    samples: dict[str, str] = field(default_factory=dict)
    longest: list[tuple[str, int]] = field(default_factory=list)
    unused_share: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The numbers for the result, as JSON-able values."""
        total_bytes = sum(count.bytes for count in self.by_language.values())
        total_tokens = sum(count.tokens for count in self.by_language.values())
        return {
            "characters_per_token": {
                language: round(count.characters / max(count.tokens, 1), 3)
                for language, count in self.by_language.items()
            },
            "bytes_per_token": round(total_bytes / max(total_tokens, 1), 3),
            "unused_share": round(self.unused_share, 4),
            "longest_token_characters": max((len(text) for text, _ in self.longest), default=0),
        }


def measure(tokenizer: PreTrainedTokenizerFast, corpus: Path) -> Measurement:
    """Encode documents of each language, up to 2,000,000 characters of each split, and count."""
    found = Measurement()
    count(tokenizer, limited(read_documents(corpus, "held_out")), found)
    # An entry counts as used if any text of the corpus uses it: held-out text alone is too short to say.
    in_training = Measurement(used=found.used, samples=found.samples)
    count(tokenizer, limited(read_documents(corpus, "train")), in_training)
    for language, item in sorted(in_training.by_language.items()):
        if language not in found.by_language:
            found.by_language[language] = item
            found.notes.append(
                f"No document of language {language} is held out: its numbers come from the training text."
            )
    for source, item in in_training.by_source.items():
        found.by_source.setdefault(source, item)
    look_at_entries(tokenizer, found)
    return found


def look_at_entries(tokenizer: PreTrainedTokenizerFast, found: Measurement) -> None:
    """Which of the learned entries the counted text used, and the longest."""
    learned = learned_entries(tokenizer)
    found.unused_share = 1 - len(found.used & set(learned)) / len(learned) if learned else 0.0
    decoded = [(str(tokenizer.decode([index])), index) for index in learned]
    # A token that is part of a character has no text of its own.
    whole = [(text, index) for text, index in decoded if "\ufffd" not in text]
    found.longest = sorted(whole, key=lambda entry: (-len(entry[0]), entry[1]))[:LONGEST_SHOWN]


def learned_entries(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids that were learned from text: neither added by name nor single bytes, which make any text possible."""
    added = set(tokenizer.added_tokens_decoder)
    return [
        index
        for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if index not in added and len(token) > 1 and not (token.startswith("<0x") and len(token) == 6)
    ]


def limited(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents until each language has had its share of characters; a longer document is cut."""
    left: dict[str, int] = {}
    for document in documents:
        allowed = left.setdefault(document.language, MEASURED_CHARACTERS)
        text = document.text[:allowed]
        if text:
            left[document.language] = allowed - len(text)
            yield Document(document.id, text, document.source, document.language, document.split)


def count(tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document], found: Measurement) -> None:
    """Add what the documents come to, by language and by source."""

    def counts_of(document: Document) -> tuple[Count, Count]:
        return (
            found.by_language.setdefault(document.language, Count()),
            found.by_source.setdefault(document.source, Count()),
        )

    def flush(batch: list[Document]) -> None:
        parts = [(item, part) for item in batch for part in chunks([item.text])]
        encoded = tokenizer.backend_tokenizer.encode_batch_fast([part for _, part in parts], add_special_tokens=False)
        for (document, _), encoding in zip(parts, encoded):
            for item in counts_of(document):
                item.tokens += len(encoding.ids)
            found.used.update(encoding.ids)
        for document in batch:
            for item in counts_of(document):
                item.documents += 1
                item.characters += len(document.text)
                item.bytes += len(document.text.encode())
            if document.language not in found.samples:
                found.samples[document.language] = document.text.strip()[:SAMPLE_CHARACTERS]

    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters > 500_000:
            flush(batch)
            batch, characters = [], 0
    flush(batch)


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[tuple[str, int]]:
    """How a text is split: (piece of text, number of tokens); tokens that share a character stand in one piece."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    found: list[tuple[str, int]] = []
    start = end = tokens = 0
    for first, last in encoding.offsets:
        if first >= end and tokens:
            found.append((text[start:end], tokens))
            start, tokens = first, 0
        end = max(end, last)
        tokens += 1
    if tokens:
        found.append((text[start:end], tokens))
    return found


def write(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    found: Measurement,
    result: Mapping[str, Any],
    terms: Terms | None = None,
) -> None:
    """Write report.html of a tokenizer that was trained."""
    page = Page(
        f"Tokenizer of {result['vocabulary_size']:,} entries",
        "How the text of this corpus is cut into the units that the model reads and writes. "
        "More characters in a token mean shorter sequences: faster training and longer memory.",
    )
    ratios = {f"characters a token, {name}": value for name, value in result["characters_per_token"].items()}
    page.facts(
        {
            **ratios,
            "bytes a token": result["bytes_per_token"],
            "learned entries that this corpus never uses": _percent(found.unused_share),
        }
    )
    for text in result["notes"]:
        page.paragraph(f"Note: {text}")
    counts_table(
        page,
        "language",
        found.by_language,
        "Measured on held-out documents (at most 2,000,000 characters of each language).",
    )
    if len(found.by_source) > 1:
        counts_table(page, "source", found.by_source)
    if terms is not None:
        _terms_table(page, terms)
    page.heading("How text is split")
    page.paragraph("Each mark is one token; a raised number says that a piece takes more than one.")
    for language, text in sorted(found.samples.items()):
        page.pieces(pieces(tokenizer, text), language)
    longest_table(page, found)
    page.save(path)


def counts_table(page: Page, kind: str, counts: Mapping[str, Count], caption: str = "") -> None:
    """What the text comes to by language, or by source."""
    page.heading(f"By {kind}")
    page.table(
        [kind, "documents", "characters", "bytes", "tokens", "characters a token", "bytes a token"],
        [
            [name, c.documents, c.characters, c.bytes, c.tokens, c.characters_per_token, c.bytes_per_token]
            for name, c in sorted(counts.items())
        ],
        caption,
    )


def longest_table(page: Page, found: Measurement) -> None:
    """The longest tokens, white space made visible."""
    page.heading("Longest tokens")
    page.table(
        ["token", "characters", "id"],
        [[visible(text), len(text), str(index)] for text, index in found.longest],
        "␣ is a space, ↵ a new line, → a tab. Long tokens of boilerplate say that the corpus needs more cleaning.",
    )


def _terms_table(page: Page, terms: Terms) -> None:
    page.heading("Terms")
    placed = [row for row in terms.rows if not row.left_out]
    entries, saved = sum(row.entries for row in placed), sum(row.saved_tokens for row in placed)
    page.paragraph(
        f"{len(placed):,} terms are one token each. They need {entries:,} entries (those that several share are "
        f"counted for each) and save {saved:,} tokens where they occur. The text counted in takes "
        f"{terms.tokens_with:,} tokens; a tokenizer of the same size without terms takes {terms.tokens_without:,}."
    )
    page.paragraph(
        "An entry saves a token each time it is used: a term pays if it is used more often than the entries it "
        "displaced, the least used of the vocabulary."
    )
    page.table(
        ["term", "occurs", "without", "now", "new entries", "saves tokens", "one token where it occurs"],
        [
            [
                row.text + (" (found)" if row.origin == "mined" else ""),
                row.count,
                " · ".join(map(visible, row.before)),
                " · ".join(map(visible, row.after)),
                row.entries,
                row.saved_tokens,
                row.left_out or ("–" if row.whole_share is None else _percent(row.whole_share)),
            ]
            for row in terms.rows[:TERMS_SHOWN]
        ],
        "Occurrences are those in the first 4,000,000 characters that were learned from; a term inside a longer one is "
        "counted with the longer. � is part of a character.",
    )


def show(result: Mapping[str, Any], output: Path, terms: Terms | None = None) -> None:
    """Print the result for a person."""
    for text in result["notes"]:
        console.note(text)
    console.table(
        f"Tokenizer in {output}",
        ["entries", *(f"characters a token, {name}" for name in result["characters_per_token"]), "bytes a token"],
        [[result["vocabulary_size"], *result["characters_per_token"].values(), result["bytes_per_token"]]],
    )
    placed = [row for row in terms.rows if not row.left_out] if terms is not None else []
    if terms is not None and placed:
        console.table(
            f"{len(placed):,} terms are one token each: {terms.tokens_with:,} tokens instead of "
            f"{terms.tokens_without:,} for the same text",
            ["term", "occurs", "tokens without", "new entries", "saves tokens"],
            [[row.text, row.count, len(row.before), row.entries, row.saved_tokens] for row in placed[:TERMS_PRINTED]],
        )
    console.result(f"Report: {output / 'report.html'}")


def visible(text: str) -> str:
    """White space made visible."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "→").replace("\r", "⏎")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
