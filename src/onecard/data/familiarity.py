"""How familiar a text is to one that has read a reference: bits per byte under a model of its character 3-grams.

In: a file of text of the kind that is wanted. Out: a model that scores any text; low is alike, high is foreign or
garbage. Counts of 1-, 2- and 3-grams lie in hashed tables, each order smoothed with the one below it (Dirichlet prior,
MacKay and Peto 1995). Training and scoring are single passes of numpy.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from onecard.data.characters import codes_of
from onecard.data.documents import read_raw_documents
from onecard.data.rules import normalise
from onecard.errors import DataError
from onecard.settings import Source

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.uint64]

_TABLE_BITS = 22
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_ALPHABET = 8_000  # about as many different characters as Chinese text uses
_PRIOR = 4.0  # the order below counts as much as so many observations
_MOST_CHARACTERS = 8_000_000
_PIECE_CHARACTERS = 200
_FEWEST_PIECES = 10
_OWN_SHARE = 0.1
_OWN_QUANTILE = 0.99
_MARGIN = 1.25


class Familiarity:
    """A model of one reference text."""

    def __init__(self, text: str) -> None:
        import numpy as np

        self._tables = [np.zeros(1 << _TABLE_BITS, dtype=np.float32) for _ in _MULTIPLIERS]
        codes = codes_of(text).astype(np.uint64)
        for order, table in enumerate(self._tables, start=1):
            table += np.bincount(_places(codes, order), minlength=len(table)).astype(np.float32)
        self._total = float(len(codes))

    def bits_per_byte(self, text: str) -> float:
        """Mean bits that the model needs for a byte (of UTF-8) of the text; 0 for an empty one."""
        import numpy as np

        if not text:
            return 0.0
        codes = codes_of(text).astype(np.uint64)
        probability = (self._counts(codes, 1) + _PRIOR / _ALPHABET) / (self._total + _PRIOR)
        first: list[float] = []  # the first characters have fewer before them
        for order in (2, 3):
            first.append(float(probability[0]))
            seen, before = self._counts(codes, order), self._counts(codes, order - 1)
            # The n-gram that begins at i ends at i + order - 1; what stands before its last character begins at i too.
            probability = (seen + _PRIOR * probability[1:]) / (before[: len(seen)] + _PRIOR)
            if not len(seen):
                break
        bits = -float(np.log2(np.array(first)).sum() + np.log2(probability).sum())
        return bits / len(text.encode("utf-8", "surrogatepass"))

    def _counts(self, codes: Numbers, order: int) -> npt.NDArray[np.float32]:
        return self._tables[order - 1][_places(codes, order)]


def _places(codes: Numbers, order: int) -> npt.NDArray[np.intp]:
    """Where the count of each n-gram lies in its table."""
    import numpy as np

    count = len(codes) - order + 1
    if count <= 0:
        return np.zeros(0, dtype=np.intp)
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(order):
        mixed = (mixed + codes[offset : offset + count]) * np.uint64(_MULTIPLIERS[offset])
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.intp)


def familiarity_with(path: Path) -> tuple[Familiarity, float]:
    """The model of a reference file, and the bits per byte up to which a text is like it.

    The limit is measured: what 99 in 100 pieces of the reference's own last tenth need under a model of the rest, and a
    quarter more. DataError for a reference that is missing, or too short to say.
    """
    try:
        state = path.stat()
    except OSError:
        raise DataError("there is no such reference.", "Check the path.", file=path) from None
    return _made(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=2)
def _made(path: Path, modified_ns: int, size_bytes: int) -> tuple[Familiarity, float]:
    """Made once a process for each state of the file."""
    import numpy as np

    text = _read(path)
    cut = int(len(text) * (1 - _OWN_SHARE))
    pieces = [text[i : i + _PIECE_CHARACTERS] for i in range(cut, len(text) - _PIECE_CHARACTERS + 1, _PIECE_CHARACTERS)]
    if len(pieces) < _FEWEST_PIECES:
        raise DataError(
            f"the reference has {len(text):,} characters, too few to know what is like it.",
            f"Give at least {round(_FEWEST_PIECES * _PIECE_CHARACTERS / _OWN_SHARE):,} characters of good text.",
            file=path,
        )
    model = Familiarity(text[:cut])
    own = [model.bits_per_byte(piece) for piece in pieces]
    return model, float(np.quantile(own, _OWN_QUANTILE)) * _MARGIN


def _read(path: Path) -> str:
    texts: list[str] = []
    length = 0
    for document in read_raw_documents(Source(path=str(path)), strict=False, reject=lambda _: None):
        texts.append(normalise(document.text))
        length += len(texts[-1])
        if length >= _MOST_CHARACTERS:
            break
    return "\n".join(texts)[:_MOST_CHARACTERS]
