"""Domain terms become single tokens by merges, not by added tokens.

In: terms, and the merges of a byte-level BPE tokenizer. Out: merges in which the bytes of each term join to one token.

Why merges. An added token is cut out of a text before the split rules see it: what stands around it is split otherwise
than before, " stent" costs a space of its own, and "consistent" holds a stent; other programs match added tokens by
rules of their own, and slowly. Merges are what a BPE tokenizer is made of: every reader of its file, GGUF included,
applies them alike, and nothing is cut that the split rules do not cut. The price is that a term has to lie within one
piece of the split (so no spaces inside), and that what it is joined from may need entries too.

Where the merges stand decides what they do. Terms of a script without spaces stand in the middle of a piece, beside
whatever the text says before and after; their merges come right after those that join the bytes of one character, so
that no other merge can take a character across the edge of the term. Terms of a script with spaces are whole pieces;
their merges come last and join what is left of the piece, so that the same letters inside a longer word stay as they
were.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from onecard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Merge = tuple[str, str]

# Scripts that put no space between words: Han, kana, Thai, Lao, Khmer, Burmese.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True)
class Term:
    """A text that should be one token, how often the corpus holds it, and where it comes from ("file" or "mined")."""

    text: str
    count: int = 0
    origin: str = "file"

    @property
    def unspaced(self) -> bool:
        """Whether it stands in running text without spaces around it."""
        return _UNSPACED.search(self.text) is not None


def read_terms(path: Path) -> list[str]:
    """One term a line, in order, without repetition; empty lines and those that begin with # are left out."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file of terms {path}.", "Give a UTF-8 text file with one term a line."
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"The file of terms {path} is not UTF-8.", "Save it as UTF-8.") from None
    stripped = (line.strip() for line in lines)
    terms = list(dict.fromkeys(line for line in stripped if line and not line.startswith("#")))
    if not terms:
        raise DataError(f"The file of terms {path} holds none.", "Write one term a line.")
    return terms


class Finder:
    """Finds terms in running text, the longest first; those of spaced scripts only as whole words."""

    def __init__(self, terms: Iterable[str]) -> None:
        from tokenizers import AddedToken, Tokenizer, models

        self.terms = list(dict.fromkeys(terms))
        self._matcher = Tokenizer(models.WordLevel({"\0": 0}, unk_token="\0"))
        self._matcher.add_tokens(
            [AddedToken(text, single_word=not Term(text).unspaced, normalized=False) for text in self.terms]
        )

    def split(self, texts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
        """Each text as (part, whether it is a term); on all processors."""
        for text, found in zip(texts, self._matcher.encode_batch(list(texts), add_special_tokens=False)):
            yield [(text[start:end], index != 0) for index, (start, end) in zip(found.ids, found.offsets)]

    def count(self, texts: Sequence[str]) -> Counter[str]:
        """How often each term stands in the texts."""
        encoded = self._matcher.encode_batch_fast(list(texts), add_special_tokens=False)
        counts = Counter(index for item in encoded for index in item.ids if index)
        return Counter({str(self._matcher.id_to_token(index)): count for index, count in counts.items()})


# --- bytes --------------------------------------------------------------------------------------------------------


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable Latin-1, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_SYMBOLS = byte_symbols()
_BYTES = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}


def to_symbols(text: str) -> list[str]:
    """The bytes of a text, as the symbols of a byte-level vocabulary."""
    return [_SYMBOLS[byte] for byte in text.encode()]


def within_a_character(token: str) -> bool:
    """Whether a token of two bytes or more can only be (part of) one character: no character begins inside it."""
    values = [_BYTES.get(symbol, 0) for symbol in token]
    return all(0x80 <= value < 0xC0 for value in values[1:]) and values[0] >= 0x80


def byte_merges(characters: Iterable[str]) -> list[Merge]:
    """Merges that join the bytes of each character, from the first on, so that characters share their beginnings."""
    found: dict[Merge, None] = {}
    for character in sorted(characters):
        symbols = to_symbols(character)
        for end in range(1, len(symbols)):
            found["".join(symbols[:end]), symbols[end]] = None
    return list(found)


def split_characters(pieces: Sequence[str]) -> list[list[str]]:
    """The groups of pieces that are one character each, of those that a byte-level tokenizer has no entry for."""
    groups: list[list[str]] = []
    for piece in pieces:
        if groups and 0x80 <= _BYTES.get(piece[0], 0) < 0xC0:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [group for group in groups if len(group) > 1 and within_a_character("".join(group))]


# --- merges -------------------------------------------------------------------------------------------------------


def apply_merges(pieces: Sequence[str], ranks: dict[Merge, int]) -> list[str]:
    """BPE as every reader does it: the merge of lowest rank first, from the left, until none is left."""
    found = list(pieces)
    while len(found) > 1:
        best = min(pairwise(found), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        found = _joined(found, best)
    return found


def _joined(pieces: Sequence[str], pair: Merge) -> list[str]:
    made: list[str] = []
    index = 0
    while index < len(pieces):
        if tuple(pieces[index : index + 2]) == pair:
            made.append(pair[0] + pair[1])
            index += 2
        else:
            made.append(pieces[index])
            index += 1
    return made


def joining_merges(
    words: Sequence[tuple[Sequence[str], int]], known: Collection[str], after: Sequence[Merge] = ()
) -> list[Merge]:
    """Merges, in order, that join every (pieces, weight) to one: as BPE is trained, till nothing is left to join.

    They follow those of `after`, which leave the pieces as they are. A pair whose result is `known` goes first, because
    it needs no new entry; then the heaviest; then the longest, which occurs least elsewhere; then the first seen.
    """
    parts = [list(pieces) for pieces, _ in words]
    weights = [weight for _, weight in words]
    counts: Counter[Merge] = Counter()
    places: dict[Merge, set[int]] = {}
    order: dict[Merge, int] = {}
    heap: list[tuple[bool, int, int, int, Merge]] = []
    ranks = {merge: rank for rank, merge in enumerate(after)}
    old = len(ranks)

    def push(pair: Merge) -> None:
        heapq.heappush(heap, (pair[0] + pair[1] not in known, -counts[pair], -len("".join(pair)), order[pair], pair))

    def change(index: int, sign: int) -> None:
        for pair in pairwise(parts[index]):
            order.setdefault(pair, len(order))
            counts[pair] += sign * max(weights[index], 1)
            places.setdefault(pair, set()).add(index)

    for index in range(len(parts)):
        change(index, 1)
    for pair in list(counts):
        push(pair)
    while heap:
        _, weight, _, _, pair = heapq.heappop(heap)
        if counts[pair] <= 0 or -weight != counts[pair]:
            continue
        ranks.setdefault(pair, len(ranks))
        touched: set[Merge] = set()
        for index in sorted(places.pop(pair)):
            before = set(pairwise(parts[index]))
            if pair not in before:
                continue
            change(index, -1)
            # A merge made before may fit again: a reader applies it at once.
            parts[index] = apply_merges(parts[index], ranks)
            change(index, 1)
            touched |= before | set(pairwise(parts[index]))
        for each in touched:
            if counts[each] > 0:
                push(each)
    return list(ranks)[old:]


@dataclass(frozen=True)
class Placed:
    """Merges in their order with the terms among them, and why some terms are not: {term: reason}."""

    merges: list[Merge]
    left_out: dict[str, str]

    @property
    def tokens(self) -> list[str]:
        """The entries that the merges make, in their order, without repetition."""
        return list(dict.fromkeys(left + right for left, right in self.merges))


def why_not(splitter: Tokenizer, text: str, maximum_characters: int | None = None) -> str | None:
    """Why a term cannot be one token of this tokenizer, or None."""
    if maximum_characters is not None and len(text) > maximum_characters:
        return f"longer than {maximum_characters} characters"
    pre_tokenizer = splitter.pre_tokenizer
    if pre_tokenizer is not None and len(pre_tokenizer.pre_tokenize_str(text)) > 1:
        return "the split rule cuts it"
    return None


def place_terms(merges: Sequence[Merge], terms: Sequence[Term], *, splitter: Tokenizer, size: int) -> Placed:
    """The merges of a new byte-level tokenizer with `terms` among them, in at most `size` entries that merges make.

    `splitter` has the pre-tokenizer. Merges within one character come first, those of unspaced terms next, the others
    after them, and the last of those make room; spaced terms come at the end.
    """
    left_out = {term.text: reason for term in terms if (reason := why_not(splitter, term.text))}
    wanted = [term for term in terms if term.text not in left_out]
    known = {left + right for left, right in merges}
    within = [merge for merge in merges if within_a_character(merge[0] + merge[1])]
    unspaced = [term for term in wanted if term.unspaced]
    first = _unspaced_merges(within, unspaced, known)
    others = [merge for merge in merges if not within_a_character(merge[0] + merge[1])]
    spaced = [form for term in wanted if not term.unspaced for form in forms(splitter, term)]
    while True:
        kept = list(dict.fromkeys([*first, *others]))
        ranks = {merge: rank for rank, merge in enumerate(kept)}
        words = [(apply_merges(to_symbols(form), ranks), count) for form, count in spaced]
        made = Placed(list(dict.fromkeys([*kept, *joining_merges(words, known, kept)])), left_out)
        excess = len(made.tokens) - size
        if excess <= 0:
            return made
        if not others:
            raise ConfigError(
                f"{len(wanted):,} terms and what they are joined from need more entries than the vocabulary has.",
                "Give fewer terms, or a larger vocabulary_size.",
            )
        others = others[:-excess]


def _unspaced_merges(within: list[Merge], terms: Sequence[Term], known: set[str]) -> list[Merge]:
    """`within` (merges inside a character), then what joins the characters of terms, then the terms."""
    ranks = {merge: rank for rank, merge in enumerate(within)}
    characters: Counter[str] = Counter()
    for term in terms:
        for character in term.text:
            characters[character] += max(term.count, 1)
    pieces = [(apply_merges(to_symbols(each), ranks), count) for each, count in characters.most_common()]
    whole = joining_merges(pieces, known, within)
    words = [(["".join(to_symbols(character)) for character in term.text], term.count) for term in terms]
    return [*within, *whole, *joining_merges(words, known)]


def forms(splitter: Tokenizer, term: Term) -> list[tuple[str, int]]:
    """A spaced term as pieces of text: by itself, and with the space before it where the split keeps them together."""
    spaced = " " + term.text
    pre_tokenizer = splitter.pre_tokenizer
    joined = pre_tokenizer is None or len(pre_tokenizer.pre_tokenize_str(spaced)) == 1
    return [(term.text, term.count), *([(spaced, term.count)] if joined else [])]
