"""Terms found in a text: strings that occur often, hold together, and stand in many surroundings.

In: texts. Out: candidates for terms, the most useful first. For runs of Chinese characters, which no space divides, a
candidate has to be frequent, its parts have to attract each other (pointwise mutual information, Church and Hanks
1990), and what stands before and after it has to vary (branching entropy: inside a longer term it does not). Elsewhere
words are what spaces make them, and only long frequent ones are candidates: terms of several words are not, because no
split rule leaves a space inside a piece. Reads a bounded share of the texts; knows no tokenizer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from onecard.tokenizer.terms import Term

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What is read: enough for terms that occur once in a million characters, in memory that any machine has.
READ_CHARACTERS = 6_000_000
SHORTEST, LONGEST = 2, 8
LEAST_COUNT = 10
# Natural logarithms. A pair of characters that meet by chance has an information of 0; a place where one follower is
# as good as certain has an entropy near 0.
LEAST_INFORMATION = 4.0
LEAST_ENTROPY = 1.2
# Function words begin and end frequent strings that are no terms.
_EDGES = frozenset(
    "的了是在和与及或也就都而但这那有不我你他她它们为以对于被把从到个一中上下等其之所者吗呢吧啊请您会能可要"
)
_WORD = re.compile(r"[^\W\d_]{6,}")
_HAN = (0x4E00, 0x9FFF)


def mine(texts: Iterable[str], most: int, longest: int = LONGEST) -> list[Term]:
    """Up to `most` candidates with their counts in what was read, by how many pieces they would save."""
    read: list[str] = []
    left = READ_CHARACTERS
    for text in texts:
        read.append(text[:left])
        left -= len(read[-1])
        if left <= 0:
            break
    found = {**_chinese("\n".join(read), min(longest, LONGEST)), **_words(read, longest)}
    ranked = sorted(found.items(), key=lambda item: (-item[1] * (len(item[0]) - 1), item[0]))
    return [Term(text, count, "mined") for text, count in ranked[:most]]


def _words(texts: list[str], longest: int) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word in _WORD.findall(text) if len(word) <= longest and not _has_han(word))
    return {word: count for word, count in counts.items() if count >= LEAST_COUNT}


def _has_han(word: str) -> bool:
    return any(_HAN[0] <= ord(character) <= _HAN[1] for character in word)


def _chinese(text: str, longest: int) -> dict[str, int]:
    """Strings of Chinese characters that pass the three tests, with their counts."""
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le", "replace"), dtype=np.uint32).astype(np.uint64)
    han = (codes >= _HAN[0]) & (codes <= _HAN[1])
    # The length of the run of Chinese characters that begins at each place.
    ends = np.flatnonzero(~np.append(han, False))
    run = ends[np.searchsorted(ends, np.arange(len(codes)))] - np.arange(len(codes))
    tables: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
    found: dict[str, int] = {}
    keys = codes
    for length in range(1, longest + 1):
        if length > 1:
            keys = _longer(keys, codes[length - 1 :])
        begins = np.flatnonzero(run[: len(keys)] >= length)
        values, counts = np.unique(keys[begins], return_counts=True)
        tables[length] = values, counts
        if length < SHORTEST:
            continue
        frequent = values[counts >= LEAST_COUNT]
        if not len(frequent):
            break
        index = np.searchsorted(frequent, keys[begins]).clip(max=len(frequent) - 1)
        hits = frequent[index] == keys[begins]
        for candidate, places in _entropies(index[hits], begins[hits], length, codes):
            word = text[places : places + length]
            if word[0] in _EDGES or word[-1] in _EDGES:
                continue
            count = int(counts[np.searchsorted(values, frequent[candidate])])
            if _information(word, count, tables, int(han.sum())) >= LEAST_INFORMATION:
                found[word] = count
    return found


def _longer(keys: NDArray[np.uint64], following: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64-bit keys of strings one character longer: one prime multiplication, and the next character added."""
    import numpy as np

    return keys[: len(following)] * np.uint64(0x9E3779B97F4A7C15) + following


def _key(text: str) -> int:
    key = ord(text[0])
    for character in text[1:]:
        key = (key * 0x9E3779B97F4A7C15 + ord(character)) % (1 << 64)
    return key


def _entropies(
    index: NDArray[np.int64], begins: NDArray[np.int64], length: int, codes: NDArray[np.uint64]
) -> list[tuple[int, int]]:
    """(candidate, one place of it) of those whose neighbours vary enough on both sides."""
    import numpy as np

    padded = np.concatenate([[np.uint64(0)], codes, [np.uint64(0)]])
    kept: NDArray[np.bool_] | None = None
    for neighbours in (padded[begins], padded[begins + length + 1]):
        pairs, counts = np.unique(index.astype(np.uint64) << np.uint64(32) | neighbours, return_counts=True)
        owners = (pairs >> np.uint64(32)).astype(np.int64)
        totals = np.bincount(owners, weights=counts)
        shares = counts / totals[owners]
        entropy = np.bincount(owners, weights=-shares * np.log(shares), minlength=len(totals))
        kept = entropy >= LEAST_ENTROPY if kept is None else kept & (entropy >= LEAST_ENTROPY)
    assert kept is not None
    candidates, first = np.unique(index, return_index=True)
    return [(int(each), int(begins[at])) for each, at in zip(candidates, first) if kept[each]]


def _information(
    word: str, count: int, tables: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64]]], total: int
) -> float:
    """The pointwise mutual information of the two parts of a word, at the place where they hold together least."""
    import numpy as np

    def often(part: str) -> int:
        values, counts = tables[len(part)]
        return int(counts[np.searchsorted(values, np.uint64(_key(part)))])

    return min(math.log(count * total / (often(word[:cut]) * often(word[cut:]))) for cut in range(1, len(word)))
