"""Near-duplicates: MinHash finds candidates, their true similarity decides.

In: texts one after another, in the order in which the first of two is to be kept. Out: for each, the earlier kept text
that it repeats, if any. Texts themselves lie in a file on disk; memory holds about 3 KB for each kept text.

Similarity is the Jaccard index of the sets of character 3-grams (text written without spaces) or word 3-grams.
MinHash: Broder 1997; banding: Indyk and Motwani 1998. Every candidate pair is verified, so nothing is removed by an
estimate; a pair at the threshold is missed with a chance below 1 in 1,000.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from onecard.data import rules

_PERMUTATIONS = 128
_SEED = 1
_GRAM = 3
# The estimate of 128 permutations deviates by about 0.04; five times that below the threshold cannot be a match.
_ESTIMATE_MARGIN = 0.2


class TextFile:
    """Texts on disk, appended in order and read back by number."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._offsets = array.array("q", [0])

    def __enter__(self) -> TextFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, text: str) -> int:
        """Store a text and return its number, counted from 0."""
        data = text.encode("utf-8", "surrogatepass")
        self._file.seek(self._offsets[-1])
        self._file.write(data)
        self._offsets.append(self._offsets[-1] + len(data))
        return len(self) - 1

    def __getitem__(self, number: int) -> str:
        start, end = self._offsets[number], self._offsets[number + 1]
        self._file.seek(start)
        return self._file.read(end - start).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


def shingles(text: str) -> set[str]:
    """The set of 3-grams by which a text is compared: of characters where words are not spaced, else of words.

    Runs of spaces count as one, and case does not count. A text shorter than a 3-gram has none.
    """
    words = text.casefold().split()
    if rules.is_unspaced(text):
        joined = " ".join(words)
        return {joined[i : i + _GRAM] for i in range(len(joined) - _GRAM + 1)}
    return {" ".join(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}


def jaccard(first: set[str], second: set[str]) -> float:
    """Size of the intersection over that of the union; 0 if both are empty (nothing to compare is not equality)."""
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def bands_for(threshold: float) -> int:
    """How many bands of the 128 hashes: the fewest that miss a pair at the threshold less than once in 1,000."""
    for rows in (16, 8, 4, 2):
        bands = _PERMUTATIONS // rows
        if (1 - threshold**rows) ** bands < 1e-3:
            return bands
    return _PERMUTATIONS


class NearDuplicates:
    """Finds for each text the most similar earlier kept one at or above `threshold`."""

    def __init__(self, threshold: float, texts: TextFile) -> None:
        from rensa import RMinHashLSH

        self._threshold = threshold
        self._texts = texts
        self._index = RMinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, num_bands=bands_for(threshold))
        self._signatures: dict[int, Any] = {}

    def find(self, text: str) -> tuple[int, float] | None:
        """(number in the TextFile, true similarity) of the text that this one repeats, or None.

        After None the caller appends the text to the TextFile and calls `keep` with its number.
        """
        from rensa import RMinHash

        grams = shingles(text)
        self._pending = None
        if not grams:
            return None
        signature = RMinHash(num_perm=_PERMUTATIONS, seed=_SEED)
        signature.update(grams)
        best: tuple[int, float] | None = None
        for number in sorted(self._index.query(signature)):
            if signature.jaccard(self._signatures[number]) < self._threshold - _ESTIMATE_MARGIN:
                continue
            similarity = jaccard(grams, shingles(self._texts[number]))
            if similarity >= self._threshold and (best is None or similarity > best[1]):
                best = number, similarity
        if best is None:
            self._pending = signature
        return best

    _pending: Any = None

    def keep(self, number: int) -> None:
        """Make the text of the last `find` one that later texts are compared with."""
        if self._pending is not None:
            self._index.insert(number, self._pending)
            self._signatures[number] = self._pending
            self._pending = None


def digest(text: str) -> bytes:
    """16 bytes that stand for a text where equality is asked."""
    import xxhash

    return struct.pack(">QQ", *divmod(xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass")), 1 << 64))
