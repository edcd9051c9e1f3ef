"""How alike two texts are, and the signatures by which candidates are found."""

from __future__ import annotations

import numpy as np
import pytest

from onecard.data.dedup import bands_for, digests, estimate, jaccard, shingles, shingles_of, signatures

FIRST = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"
SECOND = "机器学习模型需要大量高质量数据才能取得好的效果，清洗数据往往比调整参数更加重要！"


def test_the_known_pair() -> None:
    assert jaccard(shingles(FIRST), shingles(SECOND)) == pytest.approx(0.727, abs=0.001)


def test_grams_of_characters_by_hand() -> None:
    # 天地玄, 地玄黄, 玄黄 and a space, 黄 space a; each is three code points in one number.
    by_hand = {
        sum(ord(c) << (21 * (2 - i)) for i, c in enumerate(gram)) for gram in ("天地玄", "地玄黄", "玄黄 ", "黄 a")
    }
    assert set(shingles("天地玄黄　A").tolist()) == by_hand
    assert list(shingles("天地玄黄　A")) == sorted(by_hand)


def test_grams_of_words_by_hand() -> None:
    grams = shingles("The cat sat  on\nthe mat")
    assert len(grams) == 4  # the cat sat, cat sat on, sat on the, on the mat
    assert set(shingles("THE CAT SAT").tolist()) < set(grams.tolist())
    # the cat sat, cat sat on are common; of 4 + 3 two stand twice.
    assert jaccard(grams, shingles("the cat sat on a")) == pytest.approx(2 / 5)


def test_many_together_are_what_each_is_alone() -> None:
    texts = [
        FIRST,
        "",
        "The cat sat on the mat, the cat sat on it.",
        "一",
        "Ünder 𠀀 the cat sat",
        "a b",
        SECOND,
        FIRST,
    ]
    for text, found in zip(texts, shingles_of(texts), strict=True):
        assert found.tolist() == shingles(text).tolist()
    # the cat sat, cat sat on, sat on the, on the mat, the mat, the ... : two of the nine stand twice.
    assert [len(found) for found in shingles_of(texts)][1:4] == [0, 7, 0]


def test_short_texts_are_not_equal_for_being_short() -> None:
    assert jaccard(shingles("好的"), shingles("好的")) == 0
    found = signatures(["hello world", "other words", "好的", "不行", ""], bands_for(0.7))
    assert not found.bands.any()


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold: float) -> None:
    bands = bands_for(threshold)
    assert 128 % bands == 0
    assert (1 - threshold ** (128 // bands)) ** bands < 1e-3


def test_signatures_depend_on_each_text_alone() -> None:
    texts = [FIRST, "", "The cat sat on the mat and slept.", SECOND, "一", "a b", FIRST.replace("模型", "方法")]
    together = signatures(texts, 32)
    for place, text in enumerate(texts):
        alone = signatures([text], 32)
        assert np.array_equal(alone.bands[0], together.bands[place]), text
        assert np.array_equal(alone.sketches[0], together.sketches[place]), text
    assert together.bands[0].all()
    assert not together.bands[1].any()


def test_the_estimate_is_near_the_truth() -> None:
    base = "".join(chr(0x4E00 + i) for i in range(400))
    texts = [base[:keep] + "".join(chr(0x6000 + i) for i in range(400 - keep)) for keep in (400, 360, 300, 200, 0)]
    sketches = signatures(texts, 32).sketches
    for text, sketch in zip(texts, sketches):
        true = jaccard(shingles(base), shingles(text))
        assert estimate(sketches[:1], sketch[None])[0] == pytest.approx(true, abs=0.15)
    assert estimate(sketches[:1], sketches[:1])[0] == 1


def test_digests_tell_texts_apart() -> None:
    found = digests([b"a", b"b", b"a", b""])
    assert found.shape == (4, 2)
    assert (found[0] == found[2]).all()
    assert len({tuple(row) for row in found.tolist()}) == 3
