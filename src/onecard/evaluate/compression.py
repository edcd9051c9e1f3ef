"""What `xz -9e` reaches on the same text: the yardstick that a language model has to beat.

In: training and held-out documents. Out: bits per byte by language, and of all.

xz has no training, so it is given the training text as a prefix: what the held-out text costs is
size(xz(training + held-out)) - size(xz(training)), both in the same joined form: documents one after another, a line
feed after each (the model pays for the ends of documents too). The bytes divided by are those of the held-out text
alone, as for the model. The dictionary is at least the 64 MiB of preset 9 and never smaller than the whole text.

It does not know any model.
"""

from __future__ import annotations

import lzma
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onecard.data.corpus import Document

PRESET = 9 | lzma.PRESET_EXTREME
PRESET_DICTIONARY_BYTES = 64 << 20
# About one minute of work in each thread, and about 2 GiB of memory (xz takes 10 times its dictionary).
MAXIMUM_TRAINING_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Compressed:
    """What xz reached: the bytes that the held-out text added, its own bytes, the training bytes before it."""

    added_bytes: int = 0
    bytes: int = 0
    training_bytes: int = 0
    training_was_cut: bool = False

    def __add__(self, other: Compressed) -> Compressed:
        return Compressed(
            self.added_bytes + other.added_bytes,
            self.bytes + other.bytes,
            self.training_bytes + other.training_bytes,
            self.training_was_cut or other.training_was_cut,
        )

    @property
    def bits_per_byte(self) -> float:
        """Bits to store one byte of the held-out text."""
        return self.added_bytes * 8 / self.bytes if self.bytes else 0.0


def compressed_bytes(data: bytes) -> int:
    """The size of what `xz -9e` makes of `data`, with a dictionary that reaches back to its beginning."""
    dictionary = max(PRESET_DICTIONARY_BYTES, len(data))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": PRESET, "dict_size": dictionary}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters))


def compress_documents(
    documents: Iterable[Document], *, maximum_training_bytes: int = MAXIMUM_TRAINING_BYTES, threads: int = 2
) -> dict[str, Compressed]:
    """What xz reaches by language (each with its own training text), then "all": their sum.

    Languages without held-out text are left out. Of the training text of a language the first
    `maximum_training_bytes` are used; `training_was_cut` says when that was not all.
    """
    training: dict[str, bytearray] = defaultdict(bytearray)
    held_out: dict[str, bytearray] = defaultdict(bytearray)
    text_bytes: dict[str, int] = defaultdict(int)
    cut: set[str] = set()
    for item in documents:
        data = item.text.encode()
        if item.split == "held_out":
            held_out[item.language] += data + b"\n"
            text_bytes[item.language] += len(data)
        elif item.language not in cut and len(training[item.language]) + len(data) < maximum_training_bytes:
            training[item.language] += data + b"\n"
        else:
            cut.add(item.language)
    languages = sorted(language for language, count in text_bytes.items() if count)
    # lzma works outside Python's lock, so threads use the cores; the longer ones begin first.
    parts = [bytes(training[name]) + tail for name in languages for tail in (bytes(held_out[name]), b"")]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        sizes = list(pool.map(compressed_bytes, parts))
    found = {
        name: Compressed(
            added_bytes=sizes[2 * index] - sizes[2 * index + 1],
            bytes=text_bytes[name],
            training_bytes=len(training[name]),
            training_was_cut=name in cut,
        )
        for index, name in enumerate(languages)
    }
    return found | {"all": sum(found.values(), Compressed())}
