"""Loops and repeated n-grams, counted by hand."""

from __future__ import annotations

import pytest

from onecard.evaluate.repetition import Repetition, beginning, longest_loop, measure, repeated_share, summarize, units


def test_units_are_characters_of_chinese_and_words_of_other_scripts() -> None:
    assert units("他用 GPU训练了模型，真快!") == [
        *"他用",
        "gpu",
        *"训练了模型，真快!",
    ]
    assert units("It's a dog's life.") == ["it's", "a", "dog's", "life", "."]
    assert units("𠮷野家は", punctuation=False) == ["𠮷", "野", "家", "は"]
    assert units("ＧＰＵ 42。", punctuation=False) == ["ｇｐｕ", "42"]
    assert units(" \n\t") == []


def test_share_of_repeated_four_grams() -> None:
    # a b c d a b c d has the 4-grams abcd bcda cdab dabc abcd: five, one of them again.
    assert repeated_share(list("abcdabcd")) == pytest.approx(1 / 5)
    assert repeated_share(list("aaaaaaa")) == pytest.approx(3 / 4)
    assert repeated_share(list("abcdefgh")) == 0.0
    assert repeated_share(list("abc")) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c", 0),
        ("a a", 2),
        ("a b a b a", 5),
        ("x a b a b y", 4),
        ("a b a", 0),
        ("a a b b b", 3),
        ("好的好的好的。", 6),
        ("分久必合，合久必分。", 0),
        ("", 0),
    ],
)
def test_longest_loop(text: str, expected: int) -> None:
    assert longest_loop(units(text)) == expected


def test_a_passage_longer_than_a_block_is_no_loop_but_repeats() -> None:
    passage = [str(i) for i in range(65)]
    assert longest_loop(passage + passage) == 0
    # 130 - 3 = 127 4-grams; the second passage repeats its own 62.
    assert repeated_share(passage + passage) == pytest.approx(62 / 127)


def test_summary_is_the_mean_share_and_the_longest_loop() -> None:
    assert measure("好好好好好") == Repetition(1 / 2, 5)
    assert summarize(["好好好好好", "a b c d e f"]) == Repetition(1 / 4, 5)
    assert summarize([]) == Repetition(0.0, 0)


def test_beginning_ends_with_a_whole_unit() -> None:
    assert beginning("The quick brown fox", 2) == "The quick"
    assert beginning("话说天下大势", 3) == "话说天"
    assert beginning("a b", 9) == "a b"
    assert beginning("a b", 0) == ""
