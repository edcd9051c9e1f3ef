"""Which documents hold text of evaluation files, so that no model is measured on what it was trained on.

In: the sources of `decontaminate`. Out: a file of hashes in the working folder, and for each document the row that it
shares text with: 30 letters or digits in sequence where words are not spaced, else 13 words; spaces, punctuation and
case do not count. A shorter text of an evaluation row (from 8 on) counts where a document is equal to it. A document is
compared as what most of it is: Chinese with Chinese, English with English.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.data import dedup, rules
from onecard.data.records import Rejection, read_items
from onecard.data.rows import encodable
from onecard.settings import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

CHARACTERS, WORDS = 30, 13
_FEWEST_UNITS = 8
_WORD = re.compile(r"[^\W_]+")
_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def prepare(sources: Sequence[Source], folder: Path) -> None:
    """Write the hashes of all texts of the sources; a warning for rows that cannot be read."""
    import numpy as np

    path = folder / "evaluation.npz"
    if path.exists() or not sources:
        return
    hashes: list[Hashes] = []
    origins: list[NDArray[np.int32]] = []
    places: list[str] = []
    bad = 0
    for source in sources:
        for item in read_items(source):
            if isinstance(item, Rejection):
                bad += 1
                continue
            found = [made for text in _texts(item.values) if len(made := _of_evaluation(text))]
            if found:
                hashes += found
                origins += [np.full(len(made), len(places), dtype=np.int32) for made in found]
                places.append(encodable(f"{Path(item.file).name}:{item.line}"))
    if bad:
        console.warn(f"{bad:,} rows of the evaluation files could not be read and are not looked for.")
    joined = np.concatenate([np.empty(0, dtype=np.uint64), *hashes])
    distinct, first = np.unique(joined, return_index=True)
    origin = np.concatenate([np.empty(0, dtype=np.int32), *origins])[first]
    temporary = path.with_name("evaluation.part")
    with temporary.open("wb") as file:
        np.savez(file, hashes=distinct, origins=origin, places=np.array(json.dumps(places)))
    temporary.replace(path)


@functools.lru_cache(maxsize=1)
def _prepared(folder: Path) -> tuple[Hashes, NDArray[np.int32], list[str]]:
    import numpy as np

    with np.load(folder / "evaluation.npz") as opened:
        return opened["hashes"], opened["origins"], json.loads(str(opened["places"]))


def shared_with(folder: Path, text: str) -> str | None:
    """The evaluation row that the text shares a sequence with, as file:line."""
    import numpy as np

    known, origins, places = _prepared(folder)
    if not len(known):
        return None
    units, length = _units(text)
    looked_up = _windows(units, length) if len(units) >= length else units[:0]
    looked_up = np.append(looked_up, _whole(units))
    at = np.searchsorted(known, looked_up)
    at[at == len(known)] = 0
    found = np.flatnonzero(known[at] == looked_up)
    return places[origins[at[found[0]]]] if len(found) else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _of_evaluation(text: str) -> Hashes:
    units, length = _units(text)
    if len(units) >= length:
        return _windows(units, length)
    return _whole(units) if len(units) >= _FEWEST_UNITS else units[:0]


def _units(text: str) -> tuple[Hashes, int]:
    """What is counted, as numbers, and how many in sequence are too many."""
    import numpy as np

    words = _WORD.findall(text.casefold())
    if rules.is_unspaced(text):
        codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype="<u4")
        return codes.astype(np.uint64), CHARACTERS
    return dedup.word_hashes([" ".join(words)])[0], WORDS


def _windows(units: Hashes, length: int) -> Hashes:
    """A hash of each sequence of `length` units: from windows of 1, 2, 4 ... units, by the digits of the length."""
    made, width = None, 0
    block, step = dedup.mixed(units), 1
    while True:
        if length & step:
            part = block[width : width + len(units) - length + 1]
            made = part if made is None else made + _power(width) * part
            width += step
        if step * 2 > length:
            assert made is not None
            return made
        block = block[:-step] + _power(step) * block[step:]
        step *= 2


def _whole(units: Hashes) -> Hashes:
    """One hash of all units; another than that of a window with the same ones."""
    import numpy as np

    if not len(units):
        return units[:0]
    return _windows(units, len(units)) ^ np.uint64(len(units) * _FACTOR % _MODULUS)


def _power(exponent: int) -> np.uint64:
    import numpy as np

    return np.uint64(pow(_FACTOR, exponent, _MODULUS))
