"""Overlap with a reference, against values computed by hand (those of sacrebleu and rouge-score on the same texts)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onecard.evaluate.similarity import (
    bleu,
    bleu_counts,
    chrf,
    chrf_counts,
    common_subsequence,
    exact_match,
    f1,
    rouge_2,
    rouge_l,
)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        # Three characters in common of 4 and 5: 2 * 3 / 9.
        ("高血压病", "是高血压吗？", 2 * 3 / 9),
        ("The cat sat.", "the cat", 2 * 2 / 5),
        # A word counts as often as it stands: one "a" in common of 3 and 1.
        ("a a a", "a", 2 * 1 / 4),
        ("用 GPU 训练", "用gpu训练！", 1.0),
        ("", "x", 0.0),
        ("。", "", 1.0),
        ("dog", "cat", 0.0),
    ],
)
def test_f1_by_hand(text: str, reference: str, expected: float) -> None:
    assert f1(text, reference) == pytest.approx(expected)
    assert f1(reference, text) == pytest.approx(expected)


def test_exact_match_forgives_only_space_around() -> None:
    assert exact_match(" 北京。\n", "北京。")
    assert not exact_match("北京", "北京。")
    assert not exact_match("Beijing", "beijing")


def test_rouge_by_hand() -> None:
    # Pairs: the cat, cat sat, sat on of 3; the cat, cat is, is on of 3: one in common.
    assert rouge_2("The cat sat on", "the cat is on") == pytest.approx(2 * 1 / 6)
    # In order: the cat on.
    assert rouge_l("The cat sat on", "the cat is on") == pytest.approx(2 * 3 / 8)
    # 高血 血压 压要 | 高血 血压 压病 病要: 2 in common of 3 and 4; in order 高血压要 of 4 and 5.
    assert rouge_2("高血压要。", "高血压病要") == pytest.approx(2 * 2 / 7)
    assert rouge_l("高血压要。", "高血压病要") == pytest.approx(2 * 4 / 9)
    assert rouge_2("高", "高血压") == rouge_l("", "高血压") == rouge_l("", "") == 0.0


def test_the_common_subsequence_is_that_of_the_table() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        first, second = ("".join(generator.choice(list("abc"), generator.integers(0, 90))) for _ in range(2))
        table = np.zeros((len(first) + 1, len(second) + 1), dtype=int)
        for i, one in enumerate(first):
            for j, other in enumerate(second):
                table[i + 1, j + 1] = table[i, j] + 1 if one == other else max(table[i, j + 1], table[i + 1, j])
        assert common_subsequence(first, second) == table[-1, -1]


def summed(counts: object) -> np.ndarray:
    return np.array(counts, dtype=float).sum(0)


def test_bleu_by_hand() -> None:
    # Units the cat sat on the red mat . against the cat sat on a mat . : 6 of 8, 4 of 7, 2 of 6, 1 of 5, not shorter.
    english = bleu_counts("The cat sat on the red mat .", "The cat sat on a mat.")
    assert english == [8, 7, 6, 8, 4, 7, 2, 6, 1, 5]
    assert float(bleu(summed([english]))) == pytest.approx((6 / 8 * 4 / 7 * 2 / 6 * 1 / 5) ** 0.25)
    # 8 characters against 11: 7 of 8, 5 of 7, 3 of 6, 1 of 5, whose geometric mean is 1/2, and shorter.
    chinese = bleu_counts("高血压要少吃盐。", "高血压病人应当少吃盐。")
    assert float(bleu(summed([chinese]))) == pytest.approx(0.5 * math.exp(1 - 11 / 8))
    # Of both together: sums first, then one share.
    both = (13 / 16 * 9 / 14 * 5 / 12 * 2 / 10) ** 0.25 * math.exp(1 - 18 / 16)
    assert float(bleu(summed([english, chinese]))) == pytest.approx(both)
    # No 3-gram and no 4-gram in common: half of one match, then a quarter.
    rough = bleu_counts("a b x c d", "a b y c d")
    assert float(bleu(summed([rough]))) == pytest.approx((4 / 5 * 2 / 4 * 0.5 / 3 * 0.25 / 2) ** 0.25)
    assert float(bleu(summed([bleu_counts("", "a b")]))) == 0.0
    assert float(bleu(summed([bleu_counts("a b c", "a b c")]))) == 0.0  # it has no 4-gram to judge by
    assert float(bleu(summed([bleu_counts("a b c d e", "v w x y z")]))) == 0.0


def test_chrf_by_hand() -> None:
    # 少盐 in 少吃盐: characters 2 of 2 and 3; pairs 0 of 1 and 2; the text has no longer ones.
    counts = chrf_counts("少 盐", "少吃盐")
    assert counts == [2, 3, 2, 1, 2, 0, 0, 1, 0, *[0] * 9]
    precision, recall = (1 + 0) / 2, (2 / 3 + 0) / 2
    assert float(chrf(summed([counts]))) == pytest.approx(5 * precision * recall / (4 * precision + recall))
    assert float(chrf(summed([chrf_counts("高血压要少吃盐。", "高血压病人应当少吃盐。")]))) == pytest.approx(
        0.2829528908, abs=1e-9
    )
    assert float(chrf(summed([chrf_counts("same text here", "same text here")]))) == 1.0
    assert float(chrf(summed([chrf_counts("", "x")]))) == 0.0
