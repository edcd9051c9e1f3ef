"""Which of some thousand texts in memory are nearly an earlier one: for rows of chats. Whole corpora: duplicates.py.

In: texts. Out: for each the earliest text that stands for it. Candidates share a band of MinHash signatures; whether
two are alike is decided by their true similarity (dedup.py).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

from onecard.data import dedup

# Of so many texts that share a band with one, the first are compared: boilerplate shares bands with everything.
_MOST_CANDIDATES = 32
# The estimate of 128 hashes deviates by about 0.045: what seems so much less alike is not compared.
_ESTIMATE_MARGIN = 0.2


def representatives(texts: Sequence[str], threshold: float) -> list[int]:
    """For each text its own place, or that of the first earlier one that is alike and is not itself like another.

    Alike: a Jaccard index of 3-grams (characters in Chinese, words elsewhere) of at least `threshold`. A text too short
    for a 3-gram is like none.
    """
    made = dedup.signatures(texts, dedup.bands_for(threshold))

    @functools.lru_cache(maxsize=4096)
    def grams(place: int) -> dedup.Hashes:
        return dedup.shingles(texts[place])

    seen: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    found = list(range(len(texts)))
    for place, bands in enumerate(made.bands.tolist()):
        keys = [(number, band) for number, band in enumerate(bands) if band]
        candidates = sorted({earlier for key in keys for earlier in seen[key][:_MOST_CANDIDATES]})
        seeming = dedup.estimate(made.sketches[candidates], made.sketches[place]).tolist() if candidates else []
        for other, similarity in zip(candidates, seeming):
            if similarity >= threshold - _ESTIMATE_MARGIN and dedup.jaccard(grams(other), grams(place)) >= threshold:
                found[place] = other
                break
        else:
            for key in keys:
                seen[key].append(place)
    return found
