"""Navigation, forum filler and advertisements go; poems, code, tables, dialogues and prose about such things stay."""

from __future__ import annotations

import pytest

from onecard.data.web_text import without_advertisements, without_boilerplate, without_filler

POEM = (
    "采采卷耳，不盈顷筐。\n嗟我怀人，寘彼周行。\n\n陟彼崔嵬，我马虺隤。\n"
    "我姑酌彼金罍，维以不永怀。\n\n陟彼高冈，我马玄黄。\n我姑酌彼兕觥，维以不永伤。"
)
DIALOGUE = "“顶不住了！”他说。\n“支持住。”\n“沙发呢？”\n“搬走了。”\n“谢谢。”\n“不谢。”\n“路过？”\n“路过。”"
CODE = "安装之后运行：\n\n```\n首页\n登录\n注册\nprint('上一页')\n下一页\n+1\n沙发\n```\n\n然后看结果。"
TABLE = "| 首页 | 登录 | 注册 |\n| --- | --- | --- |\n| 沙发 | 客服热线：400-820-8820 | 下一页 |\n\n表一：页面与家具。"
MARKDOWN = (
    "# Related posts\n\n- Share this\n- Contact\n- Home\n\n* 上一页\n\n## 版权所有\n\nThe list above names links."
)
MEDICAL = (
    "血压 138/86 mmHg，心率 72 次/分。\n1. 阿司匹林 100 mg，每日 1 次\n"
    "2. 氨氯地平 5 mg，每日 1 次\n复查：血糖 6.1 mmol/L"
)
LETTERS = "Home\n\nI went home. Nobody was there.\n\nNext\n\nThe next day I left, and I never came back again."
KEPT_EVERYWHERE = (POEM, DIALOGUE, CODE, TABLE, MARKDOWN, MEDICAL, LETTERS)


@pytest.mark.parametrize("text", KEPT_EVERYWHERE)
def test_texts_that_no_rule_touches(text: str) -> None:
    assert without_boilerplate(text) == (text, 0)
    assert without_filler(text) == (text, 0)
    assert without_advertisements(text, chinese=True)[:2] == (text, 0)
    assert without_advertisements(text, chinese=False)[:2] == (text, 0)


@pytest.mark.parametrize(
    "line",
    [
        "上一篇：春天的故事",
        "下一篇: 秋天的故事",
        "当前位置：首页 > 新闻 > 国内",
        "首页 | 新闻 | 体育 | 财经 | 联系我们",
        "首页  关于我们  产品中心  联系我们",
        "责任编辑：小王",
        "浏览次数：1024次",
        "版权所有 © 2020 某某网站",
        "某某医院 版权所有",
        "京ICP备12345678号-1",
        "未经授权不得转载",
        "【返回顶部】",
        "扫一扫，关注我们的公众号",
        "已有 35 位网友参与评论",
        "分享到：微信 微博 QQ空间",
        "查看: 5911|回复: 14",
        "发表于 2005-8-4 21:37:32 | 显示全部楼层",
        "您需要 登录 才可以下载或查看，没有帐号？注册",
        "本帖最后由 小王 于 2012-3-4 编辑",
        "Share this:",
        "Share on Facebook",
        "Skip to main content",
        "Home > News > Health",
        "Home | About us | Contact | Login",
        "Copyright © 2019 Example Press. All rights reserved.",
        "We use cookies to give you the best experience on our site.",
        "12 comments",
        "« Previous post",
        "All Rights Reserved",
    ],
)
def test_boilerplate_lines_go(line: str) -> None:
    around = "正文的第一段说的是别的事情。\n{}\nThe second paragraph is about something else."
    assert without_boilerplate(around.format(line)) == (around.format("").replace("\n\n", "\n"), 1)
    assert without_boilerplate(line) == ("", 1)


@pytest.mark.parametrize(
    "line",
    [
        "版权所有者有权禁止他人复制，这是著作权法的规定。",
        "上一篇文章里我们谈到了分词。",
        "首页很难看。",
        "责任编辑的工作是核对事实，也要对稿件的标题负责。",
        "Share this bread with your brother, he said.",
        "Copyright law protects authors for seventy years after their death.",
        "Home is where the heart is.",
        "We use cookies in this recipe; bake them for ten minutes.",
        "唐诗 | 宋词 | 元曲",
        "2019 comments on the treaty were filed by the states.",
        "点击数据库的图标，然后选择导出。",
        "查看病历需要本人的身份证。",
        "发表于一九三六年的这篇小说写的是一个小镇。",
        "没有账号的读者可以先读前三章，它们是公开的，不需要付钱，也不需要登记姓名和住址，放在图书馆门口的桌子上。",
        "登录后我发现文件都在。",
    ],
)
def test_lines_that_only_look_like_boilerplate_stay(line: str) -> None:
    text = f"正文的第一段说的是别的事情。\n{line}\nThe second paragraph is about something else."
    assert without_boilerplate(text) == (text, 0)


def test_a_column_of_menu_items_is_a_menu_from_three_on() -> None:
    assert without_boilerplate("首页\n登录\n注册\n\n今天天气很好。") == ("今天天气很好。", 3)
    two = "首页\n登录\n\n今天天气很好。"
    assert without_boilerplate(two) == (two, 0)


def test_the_frame_of_an_account() -> None:
    body = "今天我们讲怎样养鸡。鸡舍要干燥，饲料要新鲜。"
    framed = f"点击上方“养鸡能手”关注我们！{body}转载请注明出处 编辑：小李"
    assert without_boilerplate(framed) == (body, 2)
    told = f"{body}他点击了关注的按钮，又把文章分享给朋友。"
    assert without_boilerplate(told) == (told, 0)


@pytest.mark.parametrize(
    "line",
    ["顶", "沙发！！！", "楼主好人一生平安", "+1", "顶顶顶", "感谢楼主分享", "回复可见", "mark", "同求", "路过看看。"],
)
def test_filler_as_a_whole_document_or_beside_a_thread(line: str) -> None:
    assert without_filler(line) == ("", 1)
    thread = "楼主发表于 2012-3-4：这台显卡能跑多大的模型？\n{}\n能跑七十亿参数的，量化以后。"
    assert without_filler(thread.format(line)) == (thread.format("").replace("\n\n", "\n"), 1)


@pytest.mark.parametrize("word", ["顶", "d", "up", "支持楼主", "沙发", "+1", "看看"])
def test_filler_that_ends_otherwise_is_none(word: str) -> None:
    text = (word * 24)[:23] + "x"
    # A pattern that tried every way to divide the line would never come to an end.
    assert without_filler(text) == (text, 0)


def test_words_with_another_life_stay_where_no_forum_is() -> None:
    furniture = "家具清单\n沙发\n板凳\n地板\n书桌"
    assert without_filler(furniture) == (furniture, 0)
    prose = "我支持楼主的看法，不过顶楼的住户不会同意。"
    assert without_filler(prose) == (prose, 0)


@pytest.mark.parametrize(
    "text",
    [
        "祛痘产品效果好，详情加微信：abc12345咨询。",
        "招商热线：400-123-4567，名额有限！",
        "长按下方二维码关注，更多优惠等你来！",
        "代开发票，点数低，QQ 123456789。",
        "Click here to buy cheap viagra now!",
        "Limited time offer! Free shipping on all orders, order now !",
    ],
)
def test_advertisements_are_known(text: str) -> None:
    chinese = not text.isascii()
    assert without_advertisements(text, chinese=chinese)[2] > 0.5
    # Beside an article the line goes, and the article stays.
    article = "第一段讲的是皮肤的构造。\n{}\n第二段讲的是怎样保持清洁，怎样选择不刺激的用品。"
    kept, removed, _ = without_advertisements(article.format(text), chinese=chinese)
    assert (kept, removed) == (article.format("").replace("\n\n", "\n"), 1)


@pytest.mark.parametrize(
    "text",
    [
        "微信是腾讯公司在二〇一一年推出的即时通信软件，用户超过十亿。",
        "他打电话给医生，医生说先量血压，再决定要不要来医院。",
        "该社区建立了24小时热线电话，设置意见箱4个。",
        "扫码支付改变了小店的生意，二维码贴在每个柜台上。",
        "You may now act now that the law has changed.",
        "He called the casino and asked for the manager.",
    ],
)
def test_prose_about_such_things_does_not_advertise(text: str) -> None:
    assert without_advertisements(text, chinese=not text.isascii()) == (text, 0, 0.0)


def test_the_share_that_advertises_by_hand() -> None:
    # 8 characters of prose, then 16 of advertising: "加微信abcde123，立刻有货。" has 16 with its full stop.
    prose, advertisement = "今天天气非常好。", "加微信abcde123，立刻有货。"
    assert (len(prose), len(advertisement)) == (8, 17)
    assert without_advertisements(prose + advertisement, chinese=True) == (prose + advertisement, 0, 17 / 25)
