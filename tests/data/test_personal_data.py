"""What is masked by its form and check digit, and the numbers of ordinary text that are not."""

from __future__ import annotations

import pytest

from onecard.data.personal_data import is_bank_card, is_id_card, masked

DEFAULT = ["id_card", "bank_card", "mobile", "landline", "email", "account", "plate", "ip"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The two examples of GB 11643-1999.
        ("身份证11010519491231002X，请核对。", "身份证<身份证号>，请核对。"),
        ("440524188001010014", "<身份证号>"),
        ("手机：13812345678。", "手机：<手机号>。"),
        ("电话138 1234 5678或139-8765-4321", "电话<手机号>或<手机号>"),
        ("(+86)13812345678 和 +86 13812345678", "<手机号> 和 <手机号>"),
        ("座机010-62345678转3", "座机<电话号码>转3"),
        ("（0755）2345678", "（0755）2345678"),  # only brackets of ASCII are looked for
        ("(0755) 2345-6789、400-820-8820", "<电话号码>、<电话号码>"),
        ("邮箱zhang.san@mail.company.cn，谢谢", "邮箱<邮箱>，谢谢"),
        ("卡号4532015112830366", "卡号<银行卡号>"),
        ("卡号4532 0151 1283 0366", "卡号<银行卡号>"),
        ("车牌京A·12345和粤BD12345", "车牌<车牌号>和<车牌号>"),
        ("微信号：li_ming88，QQ 123456789", "微信号：<账号>，QQ <账号>"),
        ("加我qq42950063", "加我qq<账号>"),
        ("信息：Qq 5556667，ｑＱ 9998887", "信息：Qq <账号>，ｑＱ <账号>"),
        ("微信同号，Vx li_99887", "微信同号，Vx <账号>"),
        ("来自202.96.128.86的访问", "来自<IP地址>的访问"),
    ],
)
def test_what_is_masked(text: str, expected: str) -> None:
    assert masked(text, DEFAULT, chinese=True)[0] == expected
    assert masked(expected, DEFAULT, chinese=True)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "身份证110105194912310021，校验位不对",
        "编号4532015112830367",  # the check digit is wrong
        "订单23812345678",
        "参数1381234567890123456789",
        "价格13812345.678元",
        "血压 138/86 mmHg，心率 72，体温 36.5，血糖 6.1，尿酸 420 umol/L，白细胞 12.3×10^9/L",
        "2019-07-21 08:30 至 2019-07-22 18:45",
        "圆周率是3.14159265358979323846264338327950288",
        "版本1.2.3.4，本机127.0.0.1，内网192.168.1.254和10.20.30.99",
        "人口 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
        "沪A股上涨，京B股下跌，新G20会议",
        "git@github.com:user/repo.git 与 someone@example.com",
        "微信 WeChat 和 QQ Mail，QQ2013版，微信支付",
        "ISBN 978-7-111-40701-0",
        "a@b，@某人，5 @ 3",
        "哈希 9f1381234567812ab",
    ],
)
def test_numbers_of_ordinary_text_stay(text: str) -> None:
    assert masked(text, DEFAULT, chinese=True) == (text, {})


def test_counts_by_kind_and_masks_of_english() -> None:
    text = "Call 13812345678 or 13912345678, or write to jo@firm.com."
    made, found = masked(text, DEFAULT, chinese=False)
    assert made == "Call <PHONE> or <PHONE>, or write to <EMAIL>."
    assert found == {"mobile": 2, "email": 1}


def test_only_the_kinds_asked_for() -> None:
    text = "13812345678 jo@firm.com 110105194912310021"
    assert masked(text, ["email"], chinese=False)[0] == "13812345678 <EMAIL> 110105194912310021"
    assert masked(text, [], chinese=True) == (text, {})


def test_names_by_choice_and_by_a_weak_rule() -> None:
    text = "患者：李小明，由王医生和欧阳志远教授诊治。张家口的天气很好，高明的方法也有。"
    assert masked(text, [*DEFAULT], chinese=True)[0] == text
    expected = "患者：<姓名>，由王医生和欧阳志远教授诊治。张家口的天气很好，高明的方法也有。"
    assert masked(text, ["name"], chinese=True) == (expected, {"name": 1})
    assert masked("赵四海先生来了", ["name"], chinese=True)[0] == "<姓名>先生来了"


def test_check_digits() -> None:
    assert is_id_card("11010519491231002X")
    assert not is_id_card("11010519491331002X")  # there is no thirteenth month
    assert not is_id_card("110105194912310020")
    assert is_bank_card("4532015112830366")
    assert not is_bank_card("4532015112830365")
    assert not is_bank_card("0000000000000000")


def test_a_long_run_without_an_address_is_quick() -> None:
    text = "a" * 200_000 + "@"
    assert masked(text, DEFAULT, chinese=False) == (text, {})
