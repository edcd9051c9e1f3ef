"""Long texts in short pieces, where only statistics are wanted and a rare cut in a word does not matter.

A tokenizer keeps some 100 bytes for each byte of a text while it works on it, so that one line of 5 MB would need most
of a gigabyte by itself. Ids that a model is trained on must not be made this way: a cut may change the split near it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CHUNK_CHARACTERS = 20_000


def chunks(texts: Iterable[str], characters: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Cut long texts so that memory stays bounded; a cut falls on a line break or a space where there is one near."""
    for text in texts:
        start = 0
        while len(text) - start > characters:
            end = start + characters
            near = max(text.rfind("\n", end - 1000, end), text.rfind(" ", end - 1000, end))
            # The white space begins the next chunk, as it begins the next piece.
            end = near if near > start else end
            yield text[start:end]
            start = end
        yield text[start:]


def batches(texts: Iterable[str], characters: int = 1_000_000) -> Iterator[list[str]]:
    """Texts in lists of so many characters or a little more: enough for all processors, little enough for memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
