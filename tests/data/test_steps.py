"""Steps in their order: what is mended, what is refused and why, and what survives the defaults."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.config import CleanConfig
from onecard.data.steps import Outcome, Steps
from onecard.errors import ConfigError, DataError, MissingExtra
from onecard.settings import Source, build

ARTICLE = (
    "语言模型是一种根据前面的文字推测后面文字的程序。要让它学会一个行业的说法，先要有这个行业的文字。文字从哪里来？医院有病历，"
    "律师有合同，学校有教案，爱好者有多年积下的笔记。它们散在各处，编码不一，重复很多，还夹着网页的广告和乱码。所以第一步总是清洗："
    "统一编码，去掉控制字符，删掉重复的段落，把太短的和全是符号的放到一边，并且说清楚每一条为什么被放下。第二步是训练分词器，让常用的"
    "词只占一个编号。第三步才是训练。训练之前应当先算一算，显存够不够，时间要多久，电费是多少；训练之后把预计的和实际的放在一起看。"
    "很多人跳过前面的步骤，直接拿别人的脚本来跑，跑了三个小时才发现显存不够，或者第二天早上看到损失变成了无穷大。慢一点，把数据看清楚，"
    "反而更快。最后一步是把模型放到自己的电脑上，用普通的接口提供服务，数据从头到尾没有离开过家门，这正是许多人想要的。"
    "至于用哪一种模型，反倒不必太早决定，先把手上的文字整理好，再按照机器的大小来选择就可以了。"
)


PROSE = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"


def steps(**settings: Any) -> Steps:
    return Steps(CleanConfig(sources=[Source(path="x")], **settings))


SURVIVORS = {
    "modern": ARTICLE,
    "english": "It was the best of times, it was the worst of times.",
    "classical": "子曰：“学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？”",
    "poem": "采采芣苢，薄言采之。\n采采芣苢，薄言有之。\n\n"
    "采采芣苢，薄言掇之。\n采采芣苢，薄言捋之。\n\n采采芣苢，薄言袺之。\n采采芣苢，薄言襭之。",
    "refrain": "The ship sailed out at dawn,\nO heave away, my boys.\n"
    "The wind was cold and strong,\nO heave away, my boys.\n"
    "We saw the harbour lights,\nO heave away, my boys.",
    "code": "求平方和：\n\n```python\ndef total(rows):\n"
    "    return sum(row['x'] ** 2 + row['y'] ** 2 for row in rows)\n```\n\n"
    "| x | y |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |",
    "program": "for (int i = 0; i < n; ++i) {\n    if (a[i] > best) { best = a[i]; at = i; }\n}\n"
    'printf("%d at %d\\n", best, at);',
    "dialogue": "“吃了吗？”\n“吃了。”\n“吃的什么？”\n“面。”\n“什么面？”\n“牛肉面。”\n“好吃吗？”\n“还行。”",
    "medical": "血常规：白细胞 12.3×10^9/L，中性粒 85.2%，血红蛋白 98 g/L，"
    "血小板 210×10^9/L；血压 138/86 mmHg，心率 102 次/分，体温 38.9℃。",
    "list": "家具清单：\n- 沙发 2 张\n- 板凳 4 张\n- 地板 30 平方米\n- 书桌 1 张",
}


@pytest.mark.parametrize("name", SURVIVORS)
def test_what_survives_the_defaults_untouched(name: str) -> None:
    outcome = steps().apply(SURVIVORS[name])
    assert (outcome.text, outcome.reason, outcome.changes) == (SURVIVORS[name], None, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\u200b ", "empty"),
        ("锟斤拷锟斤拷锟斤拷锟斤拷锟斤拷，今天天气很好。", "garbled"),
        ("太短了", "too_short"),
        ("哈哈哈哈" * 20, "too_repetitive"),
        ("★☆★ ■□ ●○ ◆◇ ▲△ →← 你好 ♠♣ ▓░ ╬╦ ≈≠ ∑", "too_many_symbols"),
        ("《》《》〈〉【】「」『』……？！？！，、；：（）（甲）", "too_much_punctuation"),
        ("首页 | 新闻 | 体育 | 财经 | 联系我们\n上一页\n下一页", "boilerplate"),
        ("沙发！！！", "forum_filler"),
        ("顶\n顶起来\n楼主好人一生平安", "forum_filler"),
        ("祛痘产品效果好，详情加微信：abc12345咨询。长按下方二维码关注，更多优惠等你来！", "advertisement"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    assert steps().apply(text).reason == reason


def test_an_outcome_by_hand() -> None:
    text = f"　　{PROSE}\n上一篇：别的文章\n联系人电话13812345678，邮箱a.b@firm.cn\n"
    expected = Outcome(
        f"{PROSE}\n联系人电话<手机号>，邮箱<邮箱>",
        "zh",
        changes={"unicode": 1, "boilerplate": 1, "personal_data: mobile": 1, "personal_data: email": 1},
    )
    assert steps().apply(text) == expected
    # What was given is not found again, and English masks are used for it.
    outcome = steps().apply(f"{PROSE}13812345678", "en")
    assert (outcome.language, outcome.text) == ("en", f"{PROSE}<PHONE>")


def test_a_second_cleaning_changes_nothing() -> None:
    text = f"\ufeff　　{PROSE}\n首页 | 新闻 | 登录\n楼主发表于昨天\n沙发\n电话010-62345678\n转载请注明出处"
    once = steps().apply(text)
    again = steps().apply(once.text)
    assert once.text == f"{PROSE}\n楼主发表于昨天\n电话<电话号码>"
    assert (again.text, again.changes) == (once.text, {})


def test_steps_are_chosen_and_ordered_by_name() -> None:
    text = "\u200b短文13812345678"
    assert steps(steps=["length"]).apply(text).reason == "too_short"
    assert steps(steps=["personal_data"]).apply(text).text == "\u200b短文<手机号>"
    assert steps(steps=[]).apply(text) == Outcome(text, "zh")
    with pytest.raises(ConfigError, match="steps"):
        build(CleanConfig, {"sources": ["x"], "steps": ["unicod"]})


def test_languages_that_are_kept() -> None:
    only_chinese = steps(languages=["zh"])
    assert only_chinese.apply(PROSE).reason is None
    assert only_chinese.apply("話說天下大勢，分久必合，合久必分。周末七國分爭，并入於秦。").language == "zh-Hant"
    refused = only_chinese.apply("In the beginning God created the heaven and the earth.")
    assert (refused.reason, refused.detail) == ("other_language", "en")
    assert steps(languages=["zh-Hant"]).apply(PROSE).reason == "other_language"


def test_personal_data_kept_or_dropped() -> None:
    text = f"{PROSE}请打13812345678或010-62345678。"
    assert steps(personal_data="keep").apply(text) == Outcome(text, "zh")
    dropped = steps(personal_data="drop").apply(text)
    assert (dropped.reason, dropped.detail) == ("personal_data", "1 landline, 1 mobile")
    assert steps(personal_data="drop", personal_data_kinds=["email"]).apply(text).reason is None


def test_limits_are_settings() -> None:
    half = "哈哈哈哈" * 20
    assert steps(maximum_repetition=1).apply(half).reason is None
    assert steps(minimum_characters=200).apply(half).detail == "80 characters"
    assert steps(maximum_advertising=1).apply(f"{PROSE}详情加微信：abc12345").reason is None
    assert steps(maximum_advertising=0).apply(f"{PROSE}详情加微信：abc12345").reason == "advertisement"


def test_workers_can_be_handed_one() -> None:
    made = pickle.loads(pickle.dumps(steps(languages=["en"])))
    assert made.apply(PROSE).reason == "other_language"


def test_a_trace_tells_each_step_that_did_something() -> None:
    text = f"　　{PROSE}\n上一篇：别的文章\n13812345678"
    trace = list(steps().trace(text))
    assert [(change.step, change.count, change.reason) for change in trace] == [
        ("unicode", 1, None),
        ("boilerplate", 1, None),
        ("personal_data", 1, None),
    ]
    assert trace[1].before == f"{PROSE}\n上一篇：别的文章\n13812345678"
    assert trace[1].after == f"{PROSE}\n13812345678"
    assert [(change.step, change.reason) for change in steps().trace("短")] == [("length", "too_short")]


def test_conversion_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'onecard\[chinese\]'"):
        steps(chinese="simplified")


def test_simplified_and_traditional() -> None:
    pytest.importorskip("opencc")
    traditional = "話說天下大勢，分久必合，合久必分。周末七國分爭，并入於秦。"
    outcome = steps(chinese="simplified").apply(traditional)
    assert outcome.text == "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。"
    assert (outcome.language, outcome.changes) == ("zh", {"chinese": 1})
    other = steps(chinese="traditional").apply("她的头发很长，皇后在后面发现了这件干净的衣服，很高兴。")
    assert other.text == "她的頭髮很長，皇后在後面發現了這件乾淨的衣服，很高興。"
    assert other.language == "zh-Hant"
    english = "The word 道 means way in Chinese philosophy."
    assert steps(chinese="simplified").apply(english).text == english


def test_unlike_the_reference(tmp_path: Path) -> None:
    draw = random.Random(0)
    advice = ["按时服药", "少吃盐", "多散步", "定期复查", "监测血压", "戒烟限酒", "早睡早起", "清淡饮食"]
    sentences = [
        f"患者第{draw.randrange(99)}次来诊，医生说要{'，'.join(draw.sample(advice, 4))}，"
        f"{draw.randrange(60)}天以后再来。"
        for _ in range(1200)
    ]
    reference = tmp_path / "good.txt"
    reference.write_text("\n".join(sentences), encoding="utf-8")
    made = steps(reference=reference)
    assert made.apply("患者第7次来诊，医生说要早睡早起，少吃盐，定期复查，按时服药，9天以后再来。").reason is None
    refused = made.apply("犇猋骉麤毳淼掱焱垚赑晶森鑫品众磊，魑魅魍魉饕餮貔貅耄耋。")
    assert refused.reason == "unlike_reference"
    assert steps(reference=reference, maximum_bits_per_byte=100).apply(refused.text).reason is None
    reference.write_text("太短", encoding="utf-8")
    with pytest.raises(DataError, match="at least 20,000 characters"):
        steps(reference=reference)
    with pytest.raises(DataError, match="there is no such reference"):
        steps(reference=tmp_path / "gone.txt")


FRAGMENTS = [
    "上一篇：", "首页", "登录", "|", "```", "\n", "\n\n", " ", "\u3000", "沙发", "顶", "楼主", "加微信：abc12345",
    "二维码", "。", "！", "版权所有", "13812345678", "@", "a.b@c.com", "1.2.3.4", "QQ", "Click here to buy", "\ud800",
    "\u200d", "\xa0", "Ã©", "é", "#", "-", "责任编辑：", "关注", "点击上方“", "”", "11010519491231002X", "中文",
    "English words", "繁體字", "かな", "😀",
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=40))
@settings(max_examples=300, deadline=None)
def test_whatever_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    made = steps(minimum_characters=0)
    outcome = made.apply(text)
    assert outcome == made.apply(text)
    assert (outcome.reason is None) or outcome.reason
    assert all(count > 0 for count in outcome.changes.values())
    assert outcome.changes or outcome.text == text
    trace = list(made.trace(text))
    assert sum(change.count for change in trace) == sum(outcome.changes.values())
    assert [change.reason for change in trace if change.reason] == ([outcome.reason] if outcome.reason else [])
