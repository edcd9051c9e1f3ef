"""Which terms become one token, what each costs and what it saves.

In: the terms of a file, those mined from the corpus, and the tokenizer that the same text gives without any. Out: the
terms to place, and a table for the report. Terms from a file are wanted by a person: all that the split rule allows
are placed. Mined ones are placed where they pay: where an entry of the vocabulary saves more tokens with them than with
the least used of what it holds now. The module does not build tokenizers (train) or merges (terms).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.tokenizer.chunks import batches
from onecard.tokenizer.mining import mine
from onecard.tokenizer.sample import Sample
from onecard.tokenizer.special import BYTES, FIXED_TOKENS
from onecard.tokenizer.terms import Finder, Merge, Term, apply_merges, read_terms, to_symbols, why_not

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What terms are counted in, and what an entry is worth.
COUNTED_CHARACTERS = 4_000_000
# The last entries of a vocabulary are its least useful: terms take their place.
LAST_SHARE = 0.05


@dataclass(frozen=True)
class Terms:
    """The terms of a tokenizer, and the tokens that the text counted in takes without and with them."""

    rows: list[TermRow]
    tokens_without: int
    tokens_with: int


@dataclass(frozen=True)
class TermRow:
    """A term in the report: how it was split without terms and is now; `entries` it needs; tokens it saves there."""

    text: str
    origin: str
    count: int
    before: list[str]
    after: list[str]
    entries: int
    saved_tokens: int
    whole_share: float | None
    left_out: str = ""


def candidates(file: Path | None, mined: int, sample: Sample, longest: int) -> list[Term]:
    """The terms of the file, then up to `mined` found in the corpus, each with its count in the text counted in."""
    given = [] if file is None else read_terms(file)
    found = mine(sample, 2 * mined, longest) if mined else []
    finder = Finder([*given, *(term.text for term in found)])
    counts: Counter[str] = Counter()
    for texts in batches(sample.first(COUNTED_CHARACTERS)):
        counts.update(finder.count(texts))
    names = set(given)
    terms = [Term(text, counts[text]) for text in given]
    return terms + [replace(term, count=counts[term.text]) for term in found if term.text not in names]


def uses(tokenizer: Tokenizer, sample: Sample) -> Counter[int]:
    """How often the text counted in uses each entry."""
    used: Counter[int] = Counter()
    for texts in batches(sample.first(COUNTED_CHARACTERS)):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            used.update(encoding.ids)
    return used


def paying(base: Tokenizer, used: Counter[int], terms: Sequence[Term], most: int) -> list[Term]:
    """All terms of the file, and up to `most` mined ones that save more an entry than the last entries of `base` do.

    `used` are the `uses` of `base`.
    """
    learned = range(len(FIXED_TOKENS) + BYTES, base.get_vocab_size())
    last = learned[-max(1, int(LAST_SHARE * len(learned))) :]
    worth = sum(used[index] for index in last) / max(len(last), 1)
    mined = []
    for term in terms:
        joins = len(base.encode(term.text, add_special_tokens=False).ids) - 1
        forms = joins if term.unspaced else joins + 1
        if term.origin == "mined" and joins and term.count * joins / forms > worth and not why_not(base, term.text):
            mined.append((term.count * joins, term))
    mined.sort(key=lambda item: (-item[0], item[1].text))
    return [term for term in terms if term.origin == "file"] + [term for _, term in mined[:most]]


def rows(
    base: Tokenizer, made: Tokenizer, used: Counter[int], terms: Sequence[Term], left_out: dict[str, str]
) -> list[TermRow]:
    """The table of terms, those that save most first; `used` are the `uses` of the tokenizer that was made."""
    known = base.get_vocab()
    ranks = {(left, right): rank for rank, (left, right) in enumerate(json.loads(made.to_str())["model"]["merges"])}
    found = []
    for term in terms:
        before, after = pieces_of(base, term.text), pieces_of(made, term.text)
        whole = [made.token_to_id("".join(to_symbols(form))) for form in (term.text, " " + term.text)]
        ones = sum(used[index] for index in whole if index is not None)
        steps = {step for step in _steps(term.text, ranks) if step not in known}
        found.append(
            TermRow(
                term.text,
                term.origin,
                term.count,
                before,
                after,
                len(steps),
                term.count * (len(before) - len(after)),
                min(1.0, ones / term.count) if term.count else None,
                left_out.get(term.text, ""),
            )
        )
    return sorted(found, key=lambda row: (-row.saved_tokens, row.text))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """How a text is split, as text; a token that holds part of a character shows as U+FFFD."""
    return [str(tokenizer.decode([index])) for index in tokenizer.encode(text, add_special_tokens=False).ids]


def _steps(text: str, ranks: dict[Merge, int]) -> set[str]:
    """The entries of several bytes that a term is joined through, itself included."""
    pieces, found = to_symbols(text), set[str]()
    while len(pieces) > 1:
        best = min(pairwise(pieces), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        found.add(best[0] + best[1])
        pieces = apply_merges(pieces, {best: 0})
    return found


def as_json(found: Terms) -> dict[str, Any]:
    """The table for onecard.json."""
    return {
        "tokens_without_terms": found.tokens_without,
        "tokens_with_terms": found.tokens_with,
        "terms": [_row_as_json(row) for row in found.rows],
    }


def _row_as_json(row: TermRow) -> dict[str, Any]:
    return {
        "term": row.text,
        "origin": row.origin,
        "count": row.count,
        "tokens_before": len(row.before),
        "tokens": len(row.after),
        "entries": row.entries,
        "saved_tokens": row.saved_tokens,
        "whole_share": None if row.whole_share is None else round(row.whole_share, 4),
        **({"left_out": row.left_out} if row.left_out else {}),
    }
