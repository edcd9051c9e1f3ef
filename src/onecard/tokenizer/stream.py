"""Many documents, of any length, become ids: on all processors, in bounded memory, exactly as if encoded whole.

In: a tokenizer and documents. Out: their ids as arrays, in order. A tokenizer keeps some 100 bytes for each byte of a
text while it works on it, so that one line of 100 MB would need gigabytes: a long text is cut where no token crosses.
A place is good where a letter or digit ends and something else begins, and where the 400 characters on either side give
the same ids apart as together; the split rules and merges of a tokenizer look no further than their own piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from onecard.data.tokens import Encoded
from onecard.tokenizer.encoding import Encoder, encoder_of
from onecard.tokenizer.messages import well_formed
from onecard.tokenizer.template import document_ends

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

# A longer text is cut into pieces of at most this, if it has places where that is safe.
PIECE_CHARACTERS = 200_000
CONTEXT_CHARACTERS = 400
TRIED_PLACES = 50
# Encoded at a time: enough to keep all processors busy, little enough to keep memory flat.
BATCH_CHARACTERS = 2_000_000


def encode_stream(tokenizer: PreTrainedTokenizerFast, documents: Iterable[tuple[str, str]]) -> Iterator[Encoded]:
    """(source, text) pairs as BOS, text, EOS; one batch is encoded while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as worker:
        before = None
        for batch in _batches(documents):
            begun = worker.submit(encode_arrays, tokenizer, [text for _, text in batch])
            if before is not None:
                yield from _encoded(*before)
            before = batch, begun
        if before is not None:
            yield from _encoded(*before)


def _encoded(batch: list[tuple[str, str]], begun: Any) -> Iterator[Encoded]:
    for (source, _), ids in zip(batch, begun.result()):
        yield Encoded(source, ids)


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_arrays(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """`template.encode_documents` of many texts as arrays; none of them needs more memory for being long."""
    encoder = encoder_of(tokenizer)
    begin, end = (np.array(ids, dtype=np.uint32) for ids in document_ends(tokenizer))
    parts: list[list[NDArray[np.uint32]]] = [[begin] for _ in texts]
    for batch in _piece_batches(encoder, texts):
        for is_first in (True, False):
            chosen = [(owner, piece) for owner, piece, first in batch if first == is_first]
            copy = encoder.plain if is_first else encoder.inner
            encoded = copy.encode_batch_fast([piece for _, piece in chosen], add_special_tokens=False)
            for (owner, _), found in zip(chosen, encoded):
                parts[owner].append(np.array(found.ids, dtype=np.uint32))
    return [np.concatenate([*found, end]) for found in parts]


def _piece_batches(encoder: Encoder, texts: Sequence[str]) -> Iterator[list[tuple[int, str, bool]]]:
    """(number of the text, piece, whether it begins the text) in batches, the pieces of a text in their order."""
    batch: list[tuple[int, str, bool]] = []
    characters = 0
    for owner, text in enumerate(texts):
        for number, piece in enumerate(safe_pieces(encoder, well_formed(text), PIECE_CHARACTERS)):
            if characters + len(piece) > BATCH_CHARACTERS and batch:
                yield batch
                batch, characters = [], 0
            batch.append((owner, piece, number == 0))
            characters += len(piece)
    if batch:
        yield batch


def safe_pieces(encoder: Encoder, text: str, characters: int) -> Iterator[str]:
    """The text in pieces of up to so many characters whose ids, one after another, are those of the whole.

    A piece is longer where there is no safe place to cut it.
    """
    if encoder.puts_space and any(token in text for token in encoder.markup):
        # Behind each of these tokens a text begins anew, with a space before it.
        yield text
        return
    start = 0
    while len(text) - start > characters:
        cut, reach = None, start + characters
        while cut is None and reach < len(text):
            cut = _safe_place(encoder, text, max(start + 1, reach - characters // 2), reach)
            reach += characters // 2
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _safe_place(encoder: Encoder, text: str, first: int, last: int) -> int | None:
    """The last place in [first, last] where no token crosses, if one of those tried is; None otherwise."""
    tried = 0
    for place in range(last, first - 1, -1):
        if not text[place - 1].isalnum() or text[place].isalnum():
            continue
        tried += 1
        if _is_safe(encoder, text, place):
            return place
        if tried == TRIED_PLACES:
            break
    return None


def _is_safe(encoder: Encoder, text: str, place: int) -> bool:
    left, right = text[max(0, place - CONTEXT_CHARACTERS) : place], text[place : place + CONTEXT_CHARACTERS]

    def ids(part: str) -> list[int]:
        found: list[int] = encoder.inner.encode(part, add_special_tokens=False).ids
        return found

    return ids(left) + ids(right) == ids(left + right)
