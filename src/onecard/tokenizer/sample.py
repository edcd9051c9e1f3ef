"""An even share of a corpus, read as often as needed: what a tokenizer is trained on and measured with.

In: a corpus directory and a number of characters. Out: pieces of its training documents, in their order. A trainer
keeps about a kilobyte for each different piece of 16 characters, so that a large corpus is sampled: every piece of
20,000 characters is in or out by the hash of its document and place, the same at every reading and on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from onecard.data.corpus import Document, read_documents
from onecard.tokenizer.chunks import chunks


class Sample:
    """The training text of a corpus, at most about `most_characters` of it.

    `documents` and `characters` are those of the corpus; `share` is how much of it is read.
    """

    def __init__(self, corpus: Path, most_characters: int) -> None:
        self.corpus = corpus
        self.documents = self.characters = 0
        for document in read_documents(corpus, "train"):
            self.documents += 1
            self.characters += len(document.text)
        self.share = min(1.0, most_characters / max(self.characters, 1))

    def __iter__(self) -> Iterator[str]:
        for document in read_documents(self.corpus, "train"):
            for number, piece in enumerate(chunks([document.text])):
                if self._takes(document, number):
                    yield piece

    def _takes(self, document: Document, number: int) -> bool:
        mark = zlib.crc32(f"{document.source} {document.id} {number}".encode("utf-8", "replace"))
        return self.share == 1 or mark < self.share * 2**32

    def first(self, characters: int) -> Iterator[str]:
        """The pieces from the beginning until there are so many characters; the last is cut."""
        left = characters
        for piece in self:
            if left <= 0:
                return
            yield piece[:left]
            left -= len(piece)
