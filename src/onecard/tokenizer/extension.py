"""New entries for a tokenizer that a model was trained with, such that text without the new terms stays as it was.

In: a tokenizer made of merges, terms, and control tokens. Out: the description of the larger tokenizer (the content of
tokenizer.json), and for each new id the old ids it is made of. The merges of terms come after all others: they join
what the tokenizer leaves of a term, so that only a text in which those pieces meet is split otherwise than the model
learned it. New ids follow the largest, which may be in rows that the model has to spare. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onecard.errors import ConfigError
from onecard.tokenizer.encoding import encoder_of
from onecard.tokenizer.terms import Merge, Term, apply_merges, forms, joining_merges, split_characters, why_not

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Extension:
    """The larger tokenizer as tokenizer.json has it; new id -> old ids it is made of; of each term, its pieces before.

    `left_out` says of terms that are not one token why.
    """

    description: dict[str, Any]
    made_of: dict[int, list[int]] = field(default_factory=dict)
    before: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def extended(tokenizer: PreTrainedTokenizerFast, terms: Sequence[str], control_tokens: Sequence[str] = ()) -> Extension:
    """The tokenizer with `terms` as single tokens and `control_tokens` among its special ones (those that it lacks).

    ConfigError if terms are wanted and the tokenizer is not made of merges.
    """
    made = Extension(json.loads(tokenizer.backend_tokenizer.to_str()))
    model = made.description["model"]
    if terms and model["type"] != "BPE":
        raise ConfigError(
            f"The tokenizer is a {model['type']}: terms become single tokens by merges, which only BPE has.",
            "Extend a model with a BPE tokenizer (Llama, Qwen, Mistral, Gemma, SmolLM, or your own).",
        )
    if control_tokens:
        _add_control_tokens(tokenizer, made, control_tokens)
    if terms:
        _add_terms(tokenizer, made, terms)
    return made


def _add_control_tokens(tokenizer: PreTrainedTokenizerFast, made: Extension, wanted: Sequence[str]) -> None:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    plain = encoder_of(tokenizer).plain
    added = {entry["content"]: entry for entry in made.description["added_tokens"]}
    after = max(vocabulary.values()) + 1
    for token in wanted:
        if token in added:
            added[token]["special"] = True
            continue
        index = vocabulary.get(token, after)
        if index == after:
            made.made_of[index] = plain.encode(token, add_special_tokens=False).ids
            after += 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        made.description["added_tokens"].append({"id": index, "content": token, **flags, "special": True})
    made.description["added_tokens"].sort(key=lambda entry: entry["id"])


def _add_terms(tokenizer: PreTrainedTokenizerFast, made: Extension, terms: Sequence[str]) -> None:
    inner = encoder_of(tokenizer).inner
    model = made.description["model"]
    old: dict[str, int] = tokenizer.get_vocab()
    old_merges: list[Merge] = [_pair(merge) for merge in model["merges"]]
    words: list[tuple[list[str], int]] = []
    for text in terms:
        pieces = inner.encode(text, add_special_tokens=False).tokens
        made.before[text] = pieces
        reason = why_not(inner, text) or _unknown(pieces, model)
        if reason:
            made.left_out[text] = reason
            continue
        term = Term(text, 1)
        for form, weight in [(text, 1)] if term.unspaced else forms(inner, term):
            words.append((inner.encode(form, add_special_tokens=False).tokens, weight))
    # Characters first: bytes joined across the edge of two would meet in much other text.
    characters = [(group, 1) for pieces, _ in words for group in split_characters(pieces)]
    merges = joining_merges(characters, old, old_merges)
    ranks = {merge: rank for rank, merge in enumerate([*old_merges, *merges])}
    words = [(apply_merges(pieces, ranks), weight) for pieces, weight in words]
    merges += joining_merges(words, old, [*old_merges, *merges])
    parts = {token: [index] for token, index in old.items()}
    # An id is given to an added token by its place after the model's entries, unless it is one of those.
    for entry in made.description["added_tokens"]:
        model["vocab"][entry["content"]] = entry["id"]
    after = max([*old.values(), *made.made_of]) + 1
    for left, right in merges:
        parts.setdefault(left + right, parts[left] + parts[right])
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = after
            made.made_of[after] = parts[left + right]
            after += 1
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] += [f"{left} {right}" if as_text else [left, right] for left, right in merges]


def _pair(merge: Any) -> Merge:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _unknown(pieces: Sequence[str], model: dict[str, Any]) -> str | None:
    """Why pieces cannot be joined: a character that the tokenizer knows only as bytes, or not at all."""
    if model.get("unk_token") in pieces or any(len(piece) == 6 and piece.startswith("<0x") for piece in pieces):
        return "it has a character that the tokenizer does not know"
    return None
