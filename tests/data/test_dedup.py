"""Near-duplicates are found by estimate and judged by true similarity."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.data.dedup import NearDuplicates, TextFile, bands_for, jaccard, shingles

FIRST = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"
SECOND = "机器学习模型需要大量高质量数据才能取得好的效果，清洗数据往往比调整参数更加重要！"


def run(texts: list[str], folder: Path, threshold: float = 0.7) -> list[tuple[int, float] | None]:
    found = []
    with TextFile(folder / "texts") as kept:
        near = NearDuplicates(threshold, kept)
        for text in texts:
            match = near.find(text)
            found.append(match)
            if match is None:
                near.keep(kept.append(text))
    return found


def test_the_known_pair(tmp_path: Path) -> None:
    assert jaccard(shingles(FIRST), shingles(SECOND)) == pytest.approx(0.727, abs=0.001)
    match = run([FIRST, "完全不同的一句话，说的是今天的天气和明天的安排。", SECOND], tmp_path)
    assert match[:2] == [None, None]
    assert match[2] is not None
    assert match[2][0] == 0
    assert match[2][1] == pytest.approx(0.727, abs=0.001)


def test_a_higher_threshold_lets_the_pair_pass(tmp_path: Path) -> None:
    assert run([FIRST, SECOND], tmp_path, threshold=0.75) == [None, None]


def test_word_grams_for_spaced_text() -> None:
    assert shingles("The cat sat  on\nthe mat") == {"the cat sat", "cat sat on", "sat on the", "on the mat"}
    assert shingles("天地玄黄 A") == {"天地玄", "地玄黄", "玄黄 ", "黄 a"}


def test_short_texts_are_not_equal_for_being_short(tmp_path: Path) -> None:
    assert jaccard(set(), set()) == 0
    assert run(["hello world", "other words", "好的", "不行", ""], tmp_path) == [None] * 5


def test_the_most_similar_is_named(tmp_path: Path) -> None:
    base = "".join(chr(0x4E00 + i) for i in range(200))
    close = base[:190] + "".join(chr(0x6000 + i) for i in range(10))
    further = base[:175] + "".join(chr(0x7000 + i) for i in range(25))
    match = run([further, close, base], tmp_path, threshold=0.88)
    # 198 grams each: further and base share 173 of 223, close and base 188 of 208.
    assert match[0] is None
    assert match[1] is None
    assert match[2] == (1, pytest.approx(188 / 208))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold: float) -> None:
    bands = bands_for(threshold)
    assert 128 % bands == 0
    assert (1 - threshold ** (128 // bands)) ** bands < 1e-3


def test_texts_come_back_from_disk(tmp_path: Path) -> None:
    with TextFile(tmp_path / "texts") as texts:
        for text in ("一", "", "three\n👍"):
            texts.append(text)
        assert texts[1] == ""
        assert list(texts) == ["一", "", "three\n👍"]
        assert texts.append("x") == 3
        assert texts[2] == "three\n👍"
