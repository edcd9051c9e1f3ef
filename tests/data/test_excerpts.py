"""Places that changed, marked; invisible characters made visible."""

from __future__ import annotations

from onecard.data.excerpts import bracketed, differences, harmless, shortened, visible


def test_what_differs_is_marked() -> None:
    before, after = differences("电话13812345678，谢谢", "电话<手机号>，谢谢")
    assert before == [("电话", False), ("13812345678", True), ("，谢谢", False)]
    assert after == [("电话", False), ("<手机号>", True), ("，谢谢", False)]
    assert bracketed(before) == "电话⟦13812345678⟧，谢谢"


def test_an_excerpt_begins_shortly_before_the_first_difference() -> None:
    text = "一二三四五六七八九十" * 20
    before, after = differences(text + "旧的结尾", text + "新的结尾", 50)
    assert before == [("… ", False), (text[:30], False), ("旧", True), ("的结尾", False)]
    assert after == [("… ", False), (text[:30], False), ("新", True), ("的结尾", False)]


def test_what_a_removal_pulls_in_at_the_end_is_not_marked() -> None:
    rest = "".join(chr(0x4E00 + i) for i in range(300))
    before, after = differences("上一页\n" + rest, rest, 100)
    assert before == [("上一页\n", True), (rest[:96], False), (" …", False)]
    assert after == [(rest[:96], False), (rest[96:100], False), (" …", False)]


def test_invisible_characters() -> None:
    assert visible("a\tb\nc\u3000d\u200be f") == "a⇥b⏎c▢d[U+200B]e f"
    assert visible("a b", spaces=True) == "a·b"
    assert harmless("红\x1b[31m字\u3000a\tb\nc") == "红[U+001B][31m字\u3000a\tb\nc"
    assert shortened("一二三", 2) == "一二 …"
    assert shortened("一二三", 3) == "一二三"
