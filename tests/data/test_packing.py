from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.data.packing import IGNORED, PackedRows, PaddedRows, Segment, StreamRows, best_fit, gather
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.errors import DataError


def store_of(folder: Path, documents: list[Encoded], *, learned: bool = False) -> TokenStore:
    return write_store(folder / "store", documents, vocabulary=100_000, tokenizer_hash="", learned=learned)


def test_a_stream_is_cut_at_the_row_and_labels_reach_over_the_cut(tmp_path: Path) -> None:
    store = store_of(tmp_path, [Encoded("a", [10, 11, 12, 13, 14]), Encoded("a", [20, 21, 22])])
    rows = StreamRows(store, 4)
    assert rows.per_source == [2]
    assert rows.segments(0) == [Segment(0, 4, 5)]
    assert rows.segments(1) == [Segment(4, 5, 5), Segment(5, 8, 8)]
    batch = gather(rows, [0, 1], pad_id=0)
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert batch.labels.tolist() == [11, 12, 13, 14, IGNORED, 21, 22, IGNORED]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert batch.boundaries.tolist()[:4] == [0, 4, 5, 8]
    assert set(batch.boundaries.tolist()[4:]) <= {8}
    assert (batch.labelled, batch.tokens, batch.longest) == (6, 8, 4)


def test_every_token_is_used_once_and_every_next_token_learned_once(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents, number = [], 0
    for _ in range(60):
        length = int(generator.integers(0, 40))  # empty documents too
        documents.append(Encoded("ab"[int(generator.integers(2))], list(range(number, number + length))))
        number += length
    store = store_of(tmp_path, documents)
    rows = StreamRows(store, 16)
    used, pairs = Counter[int](), Counter[tuple[int, int]]()
    for row in range(sum(rows.per_source)):
        batch = gather(rows, [row], pad_id=99_999)
        used.update(batch.input_ids.tolist())
        pairs.update((int(i), int(k)) for i, k in zip(batch.input_ids, batch.labels) if k != IGNORED)
    padding = used.pop(99_999)
    assert used == Counter(range(number))
    assert padding == 16 * sum(rows.per_source) - number
    assert pairs == Counter((a, b) for d in documents for a, b in zip(d.ids, d.ids[1:]))


def test_sources_of_a_stream_do_not_share_rows(tmp_path: Path) -> None:
    store = store_of(tmp_path, [Encoded("a", [1] * 5), Encoded("b", [2] * 3), Encoded("a", [1] * 2)])
    rows = StreamRows(store, 4)
    assert rows.per_source == [2, 1]
    seen = [set(gather(rows, [n], pad_id=0).input_ids.tolist()) for n in range(3)]
    assert seen == [{1}, {1, 0}, {2, 0}]


def test_a_stream_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token"):
        StreamRows(store_of(tmp_path, [Encoded("a", [])]), 8)


def test_best_fit_fills_rows_and_loses_nothing() -> None:
    generator = np.random.default_rng(3)
    # Chats: most short, a long tail cut at the row.
    lengths = np.minimum(512, generator.lognormal(4.7, 0.8, 3000).astype(np.int64) + 4)
    rows = best_fit(lengths, np.arange(3000), 512)
    assert sorted(d for row in rows for d in row) == list(range(3000))
    assert all(lengths[row].sum() <= 512 for row in rows)
    assert lengths.sum() / (512 * len(rows)) > 0.98
    assert best_fit(lengths, np.arange(3000), 512) == rows


def test_best_fit_takes_the_fullest_row_that_has_room() -> None:
    lengths = np.array([6, 5, 4, 3, 2])
    assert best_fit(lengths, np.arange(5), 10) == [[0, 2], [1, 3, 4]]
    assert best_fit(lengths, np.array([1, 3]), 10) == [[1, 3]]


def test_only_learned_tokens_are_labels(tmp_path: Path) -> None:
    """Lengths 5 and 9 with pad = eos = 7: the true end of turn is a label, the padding never is."""
    eos = 7
    short = Encoded("a", [1, 2, 3, 4, eos], [False, False, False, True, True])
    long = Encoded("a", [1, 2, 3, 4, 5, 6, 8, 9, eos], [False] * 6 + [True] * 3)
    rows = PackedRows(store_of(tmp_path, [short, long], learned=True), 10)
    batch = gather(rows, [0, 1], pad_id=eos)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, eos, eos, 1, 2, 3, 4, eos] + [eos] * 5
    x = IGNORED
    assert batch.labels.tolist() == [x, x, x, x, x, 8, 9, eos, x, x, x, x, 4, eos, x] + [x] * 5
    assert batch.labelled == 5
    assert batch.tokens == 14


def test_missing_rows_are_filled_and_attended_alone(tmp_path: Path) -> None:
    rows = StreamRows(store_of(tmp_path, [Encoded("a", list(range(1, 9)))]), 8)
    batch = gather(rows, [0], pad_id=0, row_count=3)
    assert batch.input_ids.shape == (24,)
    assert batch.labelled == 7
    assert batch.tokens == 8
    assert sorted(set(batch.boundaries.tolist())) == [0, 8, 16, 24]
    assert batch.position_ids.max() == 7


def test_padded_rows_hold_one_document_each_and_use_every_token_once(tmp_path: Path) -> None:
    """An empty document has no row; one that is too long has several, and labels reach over the cut."""
    texts = [Encoded("a", [10, 11, 12, 13, 14]), Encoded("b", [30]), Encoded("a", []), Encoded("a", [20, 21, 22, 23])]
    rows = PaddedRows(store_of(tmp_path, texts), 4)
    assert rows.per_source == [3, 1]
    assert [rows.segments(row) for row in range(4)] == [
        [Segment(0, 4, 5)],
        [Segment(4, 5, 5)],
        [Segment(6, 10, 10)],
        [Segment(5, 6, 6)],
    ]
    batch = gather(rows, [3, 0], pad_id=0, row_count=3)
    assert batch.input_ids.tolist() == [30, 0, 0, 0, 10, 11, 12, 13, 0, 0, 0, 0]
    assert batch.labels.tolist() == [IGNORED] * 4 + [11, 12, 13, 14] + [IGNORED] * 4
    assert batch.row_lengths.tolist() == [1, 4, 0]
    assert (batch.labelled, batch.tokens) == (4, 5)


def test_padded_rows_without_a_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row"):
        PaddedRows(store_of(tmp_path, [Encoded("a", [])]), 4)


def test_a_batch_elsewhere_holds_the_same(tmp_path: Path) -> None:
    batch = gather(PackedRows(store_of(tmp_path, [Encoded("a", [1, 2, 3])]), 4), [0], pad_id=0)
    seen: list[int] = []

    def place(array: Any) -> Any:
        seen.append(array.size)
        return array.copy()

    made = batch.moved(place)
    assert len(seen) == 4
    assert made.tokens == batch.tokens == 3 and made.row_lengths is batch.row_lengths
    for name in ("input_ids", "labels", "position_ids", "boundaries"):
        assert getattr(made, name) is not getattr(batch, name)
        assert (getattr(made, name) == getattr(batch, name)).all()
