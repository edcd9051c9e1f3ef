"""Tidying changes accidents and keeps meaning; languages; how repetition and symbols are measured."""

from __future__ import annotations

import pytest

from onecard.data import rules


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Indentation and blank lines as in scraped novels; the ideographic space inside a title stays.
        ("第一回　宴桃园\n\n  \n\t滚滚长江\n\n\t青山依旧", "第一回　宴桃园\n\n\n滚滚长江\n\n青山依旧"),
        ("　　他说：“好。”\n　　“不好。”　\n", "他说：“好。”\n“不好。”"),
        ("一\n\n\n\n\n\n二", "一\n\n\n二"),
        ("a  \r\nb\t\rc", "a\nb\nc"),
        # Code and lists keep theirs.
        ("def f():\n    return 1\n", "def f():\n    return 1"),
        ("- 一\n  - 二", "- 一\n  - 二"),
        # Full-width forms are how Chinese is written.
        ("，：？；（）ＡＢＣ１２３㎏︰", "，：？；（）ＡＢＣ１２３㎏︰"),
        # Decomposed accents are joined.
        ("cafe\u0301", "café"),
        ("a\x00b\x07c\x1bd\x9fe", "abcde"),
        ("你\u200b好\ufeff吗\u200d？ co\u00adop", "你好吗？ coop"),
        ("一\u2028二\u2029三\x85四\x0b五", "一\n二\n\n三\n四\n五"),
        # Joined emoji, flags, skin tones, and joiners of Persian and Hindi.
        ("👨‍👩‍👧 🏳️‍🌈 👍🏽", "👨‍👩‍👧 🏳️‍🌈 👍🏽"),
        ("می‌خواهم क्‍ष", "می‌خواهم क्‍ष"),
        # Mojibake where it is certain, and the look-alikes that are real text.
        ("schÃ¶n â€œsaidâ€\x9d she", "schön “said” she"),
        ("naïve Ã la carte © 2020 – déjà vu", "naïve Ã la carte © 2020 – déjà vu"),
    ],
)
def test_normalise(before: str, after: str) -> None:
    assert rules.normalise(before) == after
    assert rules.normalise(after) == after


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("话说天下大势，分久必合，合久必分。", "zh"),
        ("用 PyTorch 训练 Transformer 语言模型的时候要注意显存。", "zh"),
        ("In the beginning God created the heaven and the earth.", "en"),
        ("The word 道 means way in Chinese philosophy and in daily life.", "en"),
        ("これは日本語の文章です。漢字も入っています。", "other"),
        ("Съешь ещё этих мягких французских булок", "other"),
        ("Le chat est très fatigué après l'été", "other"),
        ("la casa di mia nonna era molto grande e piena di libri " * 5, "other"),
        ("1234 5678 +++", "other"),
        ("la casa di mia nonna", "other"),
        ("Der Hund ist nicht in das Haus gelaufen", "other"),
        ("Hello world", "en"),
        ("話說天下大勢，分久必合，合久必分。", "zh-Hant"),
        ("學而時習之，不亦說乎？有朋自遠方來，不亦樂乎？", "zh-Hant"),
        ("学而时习之，不亦说乎？有朋自远方来，不亦乐乎？", "zh"),
        ("报告结果是:HBsAg(+),HBsAb(-),HBeAg(+),HBeAb(-),HBcAb(+)", "zh"),
        ("一般般···", "zh"),
        ("天下太平", "zh"),  # the same in both
    ],
)
def test_language(text: str, language: str) -> None:
    assert rules.language_of(text) == language


def test_garbled() -> None:
    sentence = "今天天气很好，我们出去走走，顺便买了一些水果。"
    # Five signs in 100 characters are too many, five in 250 are not, and four in 20 may be about the thing itself.
    assert rules.is_garbled("锛" * 5 + "天" * 95)
    assert not rules.is_garbled("锛" * 5 + "天" * 245)
    assert not rules.is_garbled("“锟斤拷”“锟斤拷”是乱码，锛和鐨是生僻字。")
    assert rules.is_garbled(sentence.encode().decode("gbk", "replace"))
    assert rules.is_garbled("锟斤拷锟斤拷锟斤拷锟斤拷锟斤拷")
    assert rules.is_garbled("It \ufffds a \ufffd test \ufffd of \ufffd signs \ufffd.")
    assert not rules.is_garbled(sentence)
    assert not rules.is_garbled("Plain text.")


def test_repetition_by_hand() -> None:
    assert rules.repetition("") == 0
    # Four equal lines: three of the four repeat the first.
    assert rules.repetition("abcdef\n" * 3 + "abcdef") == pytest.approx(0.75)
    # 30 characters of period 10: 21 spans of 10, of which 10 are distinct.
    assert rules.repetition("abcdefghij" * 3) == pytest.approx(11 / 21)


def test_symbol_ratio_by_hand() -> None:
    assert rules.symbol_ratio("你好，world！ 3.5%") == 0
    assert rules.symbol_ratio("a + b = c") == pytest.approx(2 / 5)
    assert rules.symbol_ratio("नमस्ते दुनिया") == 0  # vowel signs are marks, not symbols


def test_the_language_of_a_long_text_is_that_of_most_of_it() -> None:
    assert rules.language_of("An abstract in English stands first. " * 100 + "正文却是用中文写成的。" * 2000) == "zh"
    english = "The physician asked what he had eaten, and when it began. " * 200
    assert rules.language_of("la casa de mi madre " * 5 + english) == "en"


def test_repetition_of_a_long_text_is_that_of_its_pieces() -> None:
    # Distinct within each piece of 20,000 characters, although the second piece repeats the first.
    piece = "".join(chr(0x4E00 + i) for i in range(20_000))
    assert rules.repetition(piece + piece) == 0
    # The second half of each piece repeats the first: 19,991 spans, of which 10,000 are distinct.
    half = piece[:10_000]
    assert rules.repetition(half + half) == pytest.approx(1 - 10_000 / 19_991)


def test_a_quick_answer_is_never_wrong() -> None:
    # 20 characters make 11 spans; 15 distinct ones leave at most 11 - (15 - 9) = 5 repeats: just below 0.5.
    text = "一二三四五六七八九十甲乙丙丁戊" + "一二三四五"
    assert len(text) == 20
    assert rules.is_surely_varied(text, 5 / 11)
    assert not rules.is_surely_varied(text, 4.9 / 11)
    assert rules.repetition(text) == 0
    assert not rules.is_surely_varied("哈" * 40, 0.5)
    assert not rules.is_surely_varied("一\n二", 0.5)
