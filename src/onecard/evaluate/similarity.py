"""How near a text is to a reference: exact match, token F1, ROUGE, BLEU and chrF.

In: two texts. Out: a share from 0 to 1, or counts that are added up over many texts before the share is taken of them
(BLEU, chrF: of a whole set, never means of single ones). Units are characters for Chinese and words otherwise, in lower
case (`repetition.units`); punctuation counts for BLEU and chrF alone. chrF looks at characters in any language.

ROUGE-1 is the same number as token F1. It does not judge whether an answer is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onecard.evaluate.repetition import units

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

BLEU_ORDER = 4
CHRF_ORDER = 6
CHRF_BETA = 2


def exact_match(text: str, reference: str) -> bool:
    """Whether both are the same but for space around them."""
    return text.strip() == reference.strip()


def f1(text: str, reference: str) -> float:
    """Harmonic mean, 0 to 1, of the shares of units that `text` and `reference` have in common, repetitions counted.

    Punctuation does not count; the order of the units is not seen (ROUGE-1).
    """
    mine, theirs = Counter(units(text, punctuation=False)), Counter(units(reference, punctuation=False))
    if not mine or not theirs:
        return float(mine == theirs)
    return 2 * (mine & theirs).total() / (mine.total() + theirs.total())


def rouge_2(text: str, reference: str) -> float:
    """ROUGE-2 (F measure, 0 to 1): F1 over pairs of neighbouring units; 0 where one has no pair (Lin 2004)."""
    mine, theirs = (_ngrams(units(one, punctuation=False), 2) for one in (text, reference))
    return 2 * (mine & theirs).total() / max(1, mine.total() + theirs.total())


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (F measure, 0 to 1): of the longest common subsequence of units, in order but not in one piece."""
    mine, theirs = (units(one, punctuation=False) for one in (text, reference))
    return 2 * common_subsequence(mine, theirs) / max(1, len(mine) + len(theirs))


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence: a bit for each place of `first`, all at once (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for place, unit in enumerate(first):
        places[unit] = places.get(unit, 0) | 1 << place
    everywhere = row = (1 << len(first)) - 1
    for unit in second:
        matched = row & places.get(unit, 0)
        row = ((row + matched) | (row - matched)) & everywhere
    return len(first) - row.bit_count()


def _ngrams(sequence: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sequence[start : start + length]) for start in range(len(sequence) - length + 1))


# --- counts that add up -------------------------------------------------------------------------------------------


def bleu_counts(text: str, reference: str) -> list[int]:
    """Units of the text, units of the reference; then for 1- to 4-grams: those in common, those of the text."""
    mine, theirs = units(text), units(reference)
    made = [len(mine), len(theirs)]
    for length in range(1, BLEU_ORDER + 1):
        own = _ngrams(mine, length)
        made += [(own & _ngrams(theirs, length)).total(), own.total()]
    return made


def bleu(sums: Numbers) -> Numbers:
    """BLEU, 0 to 1, of summed counts (..., 10): brevity times the geometric mean of the shares of 1- to 4-grams.

    An order without a match counts as half a match, the next such as a quarter (Papineni 2002, smoothed as NIST does).
    """
    import numpy as np

    own, wanted = sums[..., 0], sums[..., 1]
    matches, totals = sums[..., 2::2], sums[..., 3::2]
    halves = np.cumsum(matches == 0, axis=-1)
    counted = np.where(matches == 0, 0.5**halves, matches)
    shares = np.divide(counted, totals, out=np.zeros_like(counted), where=totals > 0)
    possible = (totals > 0).all(axis=-1) & (matches > 0).any(axis=-1)
    mean = np.exp(np.log(np.where(shares > 0, shares, 1.0)).mean(axis=-1))
    short = np.exp(np.minimum(0.0, 1 - np.divide(wanted, own, out=np.ones_like(own), where=own > 0)))
    found: Numbers = np.where(possible, short * mean, 0.0)
    return found


def chrf_counts(text: str, reference: str) -> list[int]:
    """For sequences of 1 to 6 characters without spaces: those of the text, of the reference, in common."""
    mine, theirs = ("".join(one.split()) for one in (text, reference))
    made = []
    for length in range(1, CHRF_ORDER + 1):
        own, wanted = _ngrams(mine, length), _ngrams(theirs, length)
        made += [own.total() if wanted else 0, wanted.total(), (own & wanted).total()]
    return made


def chrf(sums: Numbers) -> Numbers:
    """chrF, 0 to 1, of summed counts (..., 18): mean precision and recall, recall counting twice (Popovic 2015)."""
    import numpy as np

    own, wanted, common = sums[..., 0::3], sums[..., 1::3], sums[..., 2::3]
    there = (own > 0) & (wanted > 0)
    orders = np.maximum(1, there.sum(axis=-1))
    precision, recall = (
        np.divide(common, of, out=np.zeros_like(common), where=there).sum(axis=-1) / orders for of in (own, wanted)
    )
    below = CHRF_BETA**2 * precision + recall
    found: Numbers = np.divide(
        (1 + CHRF_BETA**2) * precision * recall, below, out=np.zeros_like(below), where=below > 0
    )
    return found
