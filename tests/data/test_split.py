"""Which documents are held out."""

from __future__ import annotations

import numpy as np
import pytest

from onecard.data.split import held_out, held_out_count, rank


@pytest.mark.parametrize(
    ("documents", "share", "count"),
    [(100, 0.05, 5), (10, 0.01, 1), (9, 0.01, 0), (9, 0.3, 3), (1000, 0.0, 0), (4, 1.0, 4), (0, 0.5, 0)],
)
def test_count(documents: int, share: float, count: int) -> None:
    assert held_out_count(documents, share) == count


def chosen(ids: list[str], share: float, seed: int) -> set[str]:
    ranks = np.array([rank(seed, name.encode()) for name in ids], dtype=np.uint64)
    return {name for name, one in zip(ids, held_out(ranks, share).tolist()) if one}


def test_depends_on_ids_and_seed_alone() -> None:
    ids = [f"a:{i}" for i in range(100)]
    assert len(chosen(ids, 0.1, 0)) == 10
    assert chosen(ids[::-1], 0.1, 0) == chosen(ids, 0.1, 0)
    assert chosen(ids, 0.1, 1) != chosen(ids, 0.1, 0)
    # The hashes are fixed for ever: a corpus made again elsewhere holds out the same documents.
    assert sorted(chosen(ids, 0.03, 0)) == ["a:33", "a:49", "a:9"]
