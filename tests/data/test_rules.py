"""Tidying changes accidents and keeps meaning; languages; what is refused."""

from __future__ import annotations

import pytest

from onecard.data import rules

DEFAULTS = {"minimum_characters": 20, "maximum_repetition": 0.5, "maximum_symbol_ratio": 0.5}

ARTICLE = (
    "语言模型是一种根据前面的文字推测后面文字的程序。要让它学会一个行业的说法，先要有这个行业的文字。文字从哪里来？医院有病历，"
    "律师有合同，学校有教案，爱好者有多年积下的笔记。它们散在各处，编码不一，重复很多，还夹着网页的广告和乱码。所以第一步总是清洗："
    "统一编码，去掉控制字符，删掉重复的段落，把太短的和全是符号的放到一边，并且说清楚每一条为什么被放下。第二步是训练分词器，让常用的"
    "词只占一个编号。第三步才是训练。训练之前应当先算一算，显存够不够，时间要多久，电费是多少；训练之后把预计的和实际的放在一起看。"
    "很多人跳过前面的步骤，直接拿别人的脚本来跑，跑了三个小时才发现显存不够，或者第二天早上看到损失变成了无穷大。慢一点，把数据看清楚，"
    "反而更快。最后一步是把模型放到自己的电脑上，用普通的接口提供服务，数据从头到尾没有离开过家门，这正是许多人想要的。"
    "至于用哪一种模型，反倒不必太早决定，先把手上的文字整理好，再按照机器的大小来选择就可以了。"
)


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
    ],
)
def test_language(text: str, language: str) -> None:
    assert rules.language_of(text) == language


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("太短了", "too_short"),
        ("哈哈哈哈" * 20, "too_repetitive"),
        ("★☆★ ■□ ●○ ◆◇ ▲△ →← 你好 ♠♣ ▓░ ╬╦ ≈≠ ∑", "too_many_symbols"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    verdict = rules.refusal(text, **DEFAULTS)  # type: ignore[arg-type]
    assert verdict is not None
    assert verdict[0] == reason


def test_an_ordinary_chinese_article_passes() -> None:
    assert len(ARTICLE) >= 400
    assert rules.refusal(rules.normalise(ARTICLE), **DEFAULTS) is None  # type: ignore[arg-type]
    assert rules.refusal("It was the best of times, it was the worst of times.", **DEFAULTS) is None  # type: ignore[arg-type]
