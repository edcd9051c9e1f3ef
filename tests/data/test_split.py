"""Which documents are held out."""

from __future__ import annotations

import numpy as np
import pytest

from onecard.data.split import held_out, held_out_count, question_is_held_out, question_key, rank


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


def test_chats_are_held_out_by_their_first_question() -> None:
    def said(*contents: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]

    chats = [said(f"Question {number}?", "yes") for number in range(2000)]
    held = [question_is_held_out(0, 0.1, chat) for chat in chats]
    assert 150 < sum(held) < 250
    # Other answers, later questions, case, spaces and punctuation change nothing; a system message neither.
    for chat, side in zip(chats[:300], held):
        number = chat[0]["content"].split()[1]
        again = [{"role": "system", "content": "Be brief."}, *said(f"question  {number} ！", "no", "Why?", "So.")]
        assert question_is_held_out(0, 0.1, again) is side
    assert held != [question_is_held_out(1, 0.1, chat) for chat in chats]
    assert not any(question_is_held_out(0, 0.0, chat) for chat in chats)
    assert all(question_is_held_out(0, 1.0, chat) for chat in chats)
    # Questions without a letter are told apart all the same.
    assert question_key(said("?!", "a")) != question_key(said("!!", "a"))
    assert question_key(said("高血压？", "a")) == question_key(said("高血压", "b"))
