"""How alike two texts are: sets of 3-grams as sorted numbers, their Jaccard index, and MinHash signatures of many.

In: texts. Out: arrays. Grams are of characters where words are not spaced (exact: three code points are one number),
else of words (64-bit hashes). MinHash: Broder 1997; banding: Indyk and Motwani 1998. Signatures only find candidates
(duplicates.py verifies every pair): a pair at the threshold is missed with a chance below 1 in 1,000.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onecard.data import characters, rules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

PERMUTATIONS = 128
_SEED = 1
_GRAM = 3
_FACTOR = 0x9E3779B97F4A7C15
# The hashes of so many characters are kept: a text has few beyond, and of these mostly the first.
_TABULATED = 1 << 16
# So many powers are kept for short texts, for long ones, and for many together.
_POWERS = (1 << 12, 1 << 16, 1 << 21)


@dataclass(frozen=True, slots=True)
class Signatures:
    """Of n texts: `bands` (n, bands), 0 in all bands of a text without grams; `sketches` (n, 128), the low bytes of the
    hashes, from which `estimate` tells how alike two texts seem."""

    bands: NDArray[np.uint32]
    sketches: NDArray[np.uint8]


def shingles(text: str) -> Hashes:
    """The set of 3-grams by which a text is compared, sorted: of characters where words are not spaced, else of words.

    Runs of spaces count as one, and case does not count. A text shorter than a 3-gram has none.
    """
    return shingles_of([text])[0]


def shingles_of(texts: Sequence[str]) -> list[Hashes]:
    """`shingles` of many texts, found in one pass; memory grows with their length, by about 50 bytes a character."""
    import numpy as np

    made: list[Hashes] = [np.empty(0, dtype=np.uint64)] * len(texts)
    for places, grams, counts in _grams(texts):
        ends = np.cumsum(counts).tolist()
        for place, start, end in zip(places, [0, *ends], ends):
            made[place] = _distinct(grams[start:end])
    return made


def _distinct(grams: Hashes) -> Hashes:
    """Each value once, sorted; for so few numbers quicker than np.unique. The given ones are sorted in place."""
    import numpy as np

    grams.sort()
    first = np.ones(len(grams), dtype=bool)
    np.not_equal(grams[1:], grams[:-1], out=first[1:])
    return grams[first]


def jaccard(first: Hashes, second: Hashes) -> float:
    """Size of the intersection over that of the union; 0 if both are empty (nothing to compare is not equality)."""
    import numpy as np

    both = len(first) + len(second)
    if not both:
        return 0.0
    # Sorted sets laid together: what stands twice is common.
    together = np.concatenate((first, second))
    together.sort()
    common = int(np.count_nonzero(together[1:] == together[:-1]))
    return common / (both - common)


def bands_for(threshold: float) -> int:
    """How many bands of the 128 hashes: the fewest that miss a pair at the threshold less than once in 1,000."""
    for rows in (16, 8, 4, 2):
        bands = PERMUTATIONS // rows
        if (1 - threshold**rows) ** bands < 1e-3:
            return bands
    return PERMUTATIONS


def signatures(texts: Sequence[str], bands: int) -> Signatures:
    """MinHash signatures of many texts in one pass, cut into `bands`."""
    import numpy as np

    made = Signatures(
        np.zeros((len(texts), bands), dtype=np.uint32), np.zeros((len(texts), PERMUTATIONS), dtype=np.uint8)
    )
    for places, grams, counts in _grams(texts):
        hashes = _minimal_hashes(grams, counts)
        made.sketches[places] = (hashes & 0xFF).astype(np.uint8)
        rows = hashes.reshape(len(places), bands, PERMUTATIONS // bands).astype(np.uint64)
        joined = (mixed((rows * _weights(rows.shape[2])).sum(axis=2, dtype=np.uint64)) >> np.uint64(32)).astype(
            np.uint32
        )
        joined[joined == 0] = 1
        joined[counts == 0] = 0
        made.bands[places] = joined
    return made


def _grams(texts: Sequence[str]) -> Iterator[tuple[list[int], Hashes, NDArray[np.int64]]]:
    """For the texts without spaces between words, then for the others: their places, grams, and how many each has."""
    unspaced = rules.are_unspaced(texts)
    for of_characters in (True, False):
        places = [place for place, one in enumerate(unspaced) if one is of_characters]
        if places and of_characters:
            yield places, *_character_grams([folded(texts[place]) for place in places])
        elif places:
            yield places, *_word_grams([texts[place].casefold() for place in places])


def _minimal_hashes(grams: Hashes, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """(texts, 128): the smallest value of each of 128 hash functions over the grams of each text."""
    import numpy as np
    from rensa import RMinHash

    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(mixed(grams), starts, PERMUTATIONS, _SEED)
    rows = b"".join([array.array("I", row) for row in matrix.to_rows()])  # numpy takes a list of lists more slowly
    return np.frombuffer(rows, dtype=np.uintc).astype(np.uint32).reshape(len(counts), PERMUTATIONS)


def estimate(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How alike texts seem by their sketches, pair by pair: of equal sets 1; it deviates by about 0.045."""
    import numpy as np

    equal: NDArray[np.float64] = np.count_nonzero(first == second, axis=1) / np.float64(PERMUTATIONS)
    return (equal - 1 / 256) / (1 - 1 / 256)  # one low byte in 256 is equal by chance


def digests(texts: Sequence[bytes]) -> Hashes:
    """(n, 2): 128 bits that stand for each text where equality is asked."""
    import numpy as np
    import xxhash

    joined = b"".join(map(xxhash.xxh3_128_digest, texts))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(len(texts), 2)


def folded(text: str) -> str:
    """Without case, and with one space for every run of them."""
    return " ".join(text.casefold().split())


def _character_grams(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """The 3-grams of all texts one after another, with repetitions, and how many each text has."""
    import numpy as np

    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    if len(codes) < _GRAM:
        return np.empty(0, dtype=np.uint64), np.zeros(len(texts), dtype=np.int64)
    grams = (codes[:-2] << np.uint64(42)) | (codes[1:-1] << np.uint64(21)) | codes[2:]
    return _within(grams, lengths)


def _word_grams(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """The same of words; the texts are folded in case."""
    import numpy as np

    ids, counts = word_hashes(texts)
    if len(ids) < _GRAM:
        return np.empty(0, dtype=np.uint64), np.zeros(len(texts), dtype=np.int64)
    first, second, third = _weights(_GRAM)
    return _within(ids[:-2] * first + ids[1:-1] * second + ids[2:] * third, counts)


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """64 bits of each word of all texts one after another, and how many each text has.

    A word is the sum of its characters' hashes, each times a power of one factor by its place: a difference of two
    running sums over all texts, divided by the power at which the word begins.
    """
    import numpy as np

    codes = characters.codes_of("\n".join(texts))
    spaces = np.concatenate(([True], characters.are_spaces(codes), [True]))
    change = np.flatnonzero(spaces[1:] != spaces[:-1])
    starts, ends = change[::2], change[1::2]
    powers, inverses = _powers(next((size for size in _POWERS if size > len(codes)), 2 * len(codes)))
    tabulated = codes.dtype == np.uint8 or not len(codes) or int(codes.max()) < _TABULATED
    hashed = _code_hashes()[codes] if tabulated else mixed(codes.astype(np.uint64))
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(hashed * powers[: len(codes)])))
    begins = np.cumsum([0, *(len(text) + 1 for text in texts)])
    counts = np.diff(np.searchsorted(starts, begins))
    return (sums[ends] - sums[starts]) * inverses[starts], counts


@functools.cache
def _code_hashes() -> Hashes:
    import numpy as np

    return mixed(np.arange(_TABULATED, dtype=np.uint64))


@functools.lru_cache(maxsize=len(_POWERS) + 1)
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The first `count` powers of an odd number modulo 2^64, and what each must be multiplied by to make 1."""
    import numpy as np

    made = []
    for factor in (_FACTOR, pow(_FACTOR, -1, 1 << 64)):
        powers = np.full(count, np.uint64(factor))
        powers[0] = 1
        made.append(np.cumprod(powers, dtype=np.uint64))
    return made[0], made[1]


def _within(grams: Hashes, lengths: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Without the grams that begin in one text and end in another."""
    import numpy as np

    ends = np.cumsum(lengths)
    last_two = np.concatenate((ends - 1, ends - 2))
    inside = np.ones(len(grams) + 2, dtype=bool)
    inside[last_two[last_two >= 0]] = False
    return grams[inside[:-2]], np.maximum(lengths - 2, 0)


@functools.cache
def _weights(count: int) -> Hashes:
    """Odd 64-bit numbers, fixed for ever, by which a sequence becomes one number."""
    import numpy as np

    made = mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
    made.setflags(write=False)
    return made


def mixed(values: Hashes) -> Hashes:
    """Each number with its bits spread, one to one (the finaliser of SplitMix64)."""
    import numpy as np

    made = values + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        made ^= made >> np.uint64(shift)
        made *= np.uint64(factor)
    made ^= made >> np.uint64(31)
    return made
