"""How well a model predicts text: nats by token, perplexity, bits per byte; by language and by source.

In: a causal language model, its tokenizer, a stream of documents. Out: a `Score` for each group of documents.

A document is the tokens `bos text eos`. Every token after the first is scored exactly once, in overlapping windows, so
the cost of the end of the document is included; the bytes are those of the text alone. Sums are kept, never means of
means, so the numbers are the same for any batch size. Documents pass through in a stream: memory does not grow with the
set (nor with the vocabulary: scoring.py).

It does not know where documents come from, nor what the numbers are compared with.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from onecard.evaluate.scoring import Passage, Scorer, batches, check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from onecard.data.corpus import Document

# So many batches' windows are put in order of length at a time: little padding, and memory that stays bounded.
BATCHES_SORTED_TOGETHER = 32
DOCUMENTS_ENCODED_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over a group of documents: the cost of its text in nats, the tokens scored, the UTF-8 bytes of the text."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    documents: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.documents + other.documents,
        )

    @property
    def loss(self) -> float:
        """Nats by token: the mean over all tokens of the group."""
        return self.nats / self.tokens if self.tokens else 0.0

    @property
    def perplexity(self) -> float:
        """exp(loss): comparable only between models with the same tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits to store one byte of the text: comparable between all models, and with compressors."""
        return self.nats / math.log(2) / self.bytes if self.bytes else 0.0


class Group(NamedTuple):
    """What scores are summed by."""

    language: str
    source: str


class Row(NamedTuple):
    """One document as tokens, with the UTF-8 bytes of its text."""

    group: Group
    ids: Sequence[int]
    bytes: int


class Window(NamedTuple):
    """Tokens start..end of a document are read; those from `first_scored` on (positions in the document) are scored."""

    start: int
    end: int
    first_scored: int


class _Piece(NamedTuple):
    """One window with its tokens; `first_target` counts from the start of the window."""

    group: Group
    ids: Sequence[int]
    first_target: int
    bytes_share: float

    @property
    def passage(self) -> Passage:
        """Its tokens, those from `first_target` on marked."""
        return Passage(self.ids, [place >= self.first_target for place in range(len(self.ids))])


def windows(length_tokens: int, window_tokens: int, stride_tokens: int) -> Iterator[Window]:
    """The windows over a document in which each token after the first is scored once.

    Each window after the first moves on by `stride_tokens` and scores what the one before did not reach, with at least
    window - stride tokens before it; the last is moved back to end with the document, for the most context.
    """
    if not 1 <= stride_tokens < window_tokens:
        raise ValueError(f"a stride of {stride_tokens} does not fit a window of {window_tokens} tokens")
    start, scored = 0, 1
    while scored < length_tokens:
        end = min(start + window_tokens, length_tokens)
        yield Window(max(0, end - window_tokens), end, scored)
        start, scored = start + stride_tokens, end


def by_language(groups: dict[Group, Score]) -> dict[str, Score]:
    """Sums by language in alphabetical order, then "all"."""
    return _sums(groups, lambda group: group.language) | {"all": sum(groups.values(), Score())}


def by_source(groups: dict[Group, Score]) -> dict[str, Score]:
    """Sums by source in alphabetical order."""
    return _sums(groups, lambda group: group.source)


def _sums(groups: dict[Group, Score], key: Callable[[Group], str]) -> dict[str, Score]:
    totals: dict[str, Score] = defaultdict(Score)
    for group, score in groups.items():
        totals[key(group)] += score
    return dict(sorted(totals.items()))


def score_groups(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    documents: Iterable[Document],
    *,
    window_tokens: int,
    stride_tokens: int,
    batch_windows: int = 8,
    advance: Callable[[float], None] | None = None,
) -> dict[Group, Score]:
    """The score of each pair of language and source.

    `batch_windows` full windows, or as many tokens in shorter ones, go through the model together. `advance` is called
    with the bytes of text done since the last call. ArtifactError if the model gives numbers that are not finite.
    """
    return score_rows(
        model,
        _rows(tokenizer, documents),
        window_tokens=window_tokens,
        stride_tokens=stride_tokens,
        batch_windows=batch_windows,
        advance=advance,
    )


def _rows(tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]) -> Iterator[Row]:
    """Encode documents some at a time, which is quicker than one by one."""
    from onecard.tokenizer.template import encode_documents

    remaining = iter(documents)
    while some := list(islice(remaining, DOCUMENTS_ENCODED_TOGETHER)):
        for item, ids in zip(some, encode_documents(tokenizer, [item.text for item in some])):
            yield Row(Group(item.language, item.source), ids, len(item.text.encode()))


def score_rows(
    model: PreTrainedModel,
    rows: Iterable[Row],
    *,
    window_tokens: int,
    stride_tokens: int,
    batch_windows: int = 8,
    advance: Callable[[float], None] | None = None,
) -> dict[Group, Score]:
    """`score_groups` for documents that are tokens already."""
    totals: dict[Group, Score] = defaultdict(Score)
    scorer = Scorer(model)
    budget_tokens = max(1, batch_windows) * window_tokens
    pieces = _pieces(rows, window_tokens, stride_tokens, totals)
    while together := _take(pieces, budget_tokens * BATCHES_SORTED_TOGETHER):
        # Longest first: if memory does not suffice, that shows at once and not at the end.
        together.sort(key=lambda piece: len(piece.ids), reverse=True)
        for batch in batches(together, budget_tokens):
            for piece, nats in zip(batch, scorer.nats([piece.passage for piece in batch])):
                totals[piece.group] += Score(nats=nats, tokens=len(piece.ids) - piece.first_target)
            if advance is not None:
                advance(sum(piece.bytes_share for piece in batch))
    check_finite([score.nats for score in totals.values()])
    return dict(totals)


def _pieces(
    rows: Iterable[Row], window_tokens: int, stride_tokens: int, totals: dict[Group, Score]
) -> Iterator[_Piece]:
    """Cut rows into windows; the bytes and the document are counted in `totals` as the row passes."""
    for row in rows:
        totals[row.group] += Score(bytes=row.bytes, documents=1)
        to_score = max(1, len(row.ids) - 1)
        for start, end, first_scored in windows(len(row.ids), window_tokens, stride_tokens):
            share = row.bytes * (end - first_scored) / to_score
            yield _Piece(row.group, row.ids[start:end], first_scored - start, share)


def _take(pieces: Iterator[_Piece], limit_tokens: int) -> list[_Piece]:
    taken: list[_Piece] = []
    tokens = 0
    while tokens < limit_tokens and (piece := next(pieces, None)) is not None:
        taken.append(piece)
        tokens += len(piece.ids)
    return taken
