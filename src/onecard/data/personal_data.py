"""Personal data in a text: found by its form and its check digits, and masked.

In: a text and the kinds that are looked for. Out: the text with a mask in place of each find, and counts by kind.
What is found by form alone is found where the form is rare in ordinary text; names follow a weak rule (see `_NAME`).

Sources of the forms: identity numbers GB 11643-1999 (ISO 7064 MOD 11-2), bank cards ISO/IEC 7812 (Luhn), licence plates
GA 36-2018.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Collection

_MASKS = {
    "id_card": ("<身份证号>", "<ID_NUMBER>"),
    "bank_card": ("<银行卡号>", "<BANK_CARD>"),
    "mobile": ("<手机号>", "<PHONE>"),
    "landline": ("<电话号码>", "<PHONE>"),
    "email": ("<邮箱>", "<EMAIL>"),
    "plate": ("<车牌号>", "<LICENCE_PLATE>"),
    "account": ("<账号>", "<ACCOUNT>"),
    "ip": ("<IP地址>", "<IP_ADDRESS>"),
    "name": ("<姓名>", "<NAME>"),
}

# Runs of digits, with the spaces and hyphens that people put into them: numbers are looked for in these alone.
_DIGITS = re.compile(r"[0-9][0-9 ()\-]{5,28}[0-9Xx]")
_BEFORE, _AFTER = r"(?<![0-9A-Za-z_.])", r"(?![0-9A-Za-z_]|\.[0-9])"
_ID_CARD = re.compile(rf"{_BEFORE}[1-9][0-9]{{5}} ?(?:18|19|20)[0-9]{{6}} ?[0-9]{{3}}[0-9Xx]{_AFTER}")
_BANK_CARD = re.compile(
    rf"{_BEFORE}(?:[3-6][0-9]{{15,18}}|[3-6][0-9]{{3}}(?:[ -][0-9]{{4}}){{3}}(?:[ -]?[0-9]{{3}})?){_AFTER}"
)
# Numbers of the operators: 13x to 19x, less the blocks that were never given out.
_MOBILE = re.compile(
    rf"{_BEFORE}(?:\(?\+?(?:00)?86\)?[ -]?)?1(?:3[0-9]|4[5-9]|5[0-35-9]|6[2567]|7[0-8]|8[0-9]|9[0-35-9])"
    rf"(?:[0-9]{{8}}|[ -][0-9]{{4}}[ -][0-9]{{4}}){_AFTER}"
)
# An area code, set off by a hyphen, a space or brackets, and seven or eight digits; or a service number.
_LANDLINE = re.compile(
    rf"{_BEFORE}(?:\(?0(?:10|2[0-9]|[3-9][0-9]{{2}})(?:\) ?|-|\)-| )[2-8](?:[0-9]{{6,7}}|[0-9]{{2,3}}[ -][0-9]{{4}})"
    rf"(?:-[0-9]{{1,5}})?|[48]00-[0-9]{{3}}-?[0-9]{{4}}|[48]00[0-9]{{7}}){_AFTER}"
)
_EMAIL_BEFORE = re.compile(r"[A-Za-z0-9._%+-]{1,64}$")
_EMAIL_AFTER = re.compile(r"(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])")
# Domains set aside for examples (RFC 2606), and addresses by which programs reach a repository.
_NOBODY = re.compile(r"(?:^|\.)(?:example|test|invalid|localhost)(?:\.(?:com|net|org|cn))?$", re.IGNORECASE)
_NOBODYS_NAME = ("git", "root", "user", "noreply", "no-reply")
_PLATE = re.compile(
    "[京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼][A-HJ-NP-Z][·•・. -]?(?=[A-HJ-NP-Z]{0,2}[0-9])"
    "[A-HJ-NP-Z0-9]{4}(?:[A-HJ-NP-Z0-9]{1,2}|[挂学警港澳])(?![A-Za-z0-9])"
)
_ACCOUNT = re.compile(
    r"((?:[微薇威V]信|[QＱ]{2}|扣扣|\bVX)(?:号码?|群号?|ID)?\s*(?:[:：是为]\s*|\s))(?![A-Za-z]+\b)[A-Za-z0-9][A-Za-z0-9_-]{4,19}"
    r"|(QQ(?:号码?|群号?)?)[1-9][0-9]{4,11}(?![0-9])",
    re.IGNORECASE,
)
# What every account begins with; without regard to case a search is ten times slower, and few texts need that one.
_ACCOUNT_BEGINNING = re.compile("[微薇威Vv]信|[QqＱｑ]{2}|扣扣|[Vv][Xx]")
_ACCOUNT_MARKS = ("信", "QQ", "qq", "ＱＱ", "扣扣", "VX", "vx")
_INSIDE_IP = re.compile(r"\.[0-9]{1,3}\.[0-9]")  # found quickly, since it begins with one certain character
_IP = re.compile(r"[0-9][0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z_-]|\.[0-9])")
# Four small numbers are more often a version or a section than somebody's address.
_SMALLEST_LARGE_OCTET = 64
_PARTS_OF_WORDS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.-")

_SURNAMES = (
    "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡贾丁魏薛叶阎余潘杜戴夏钟汪田任姜范方石姚谭廖"
    "邹熊金陆郝孔白崔康毛邱秦江史顾侯邵孟龙万段雷钱汤尹黎易常武乔贺赖龚文"
)
_NAME_FORM = f"(?:欧阳|上官|司马|诸葛|[{_SURNAMES}])[\u4e00-\u9fff]"
_NAME = re.compile(
    f"(?P<before>(?:姓名|联系人|患者|病人|收件人|收货人|负责人|法人代表|法定代表人|户名)\\s*[:：]\\s*){_NAME_FORM}{{1,2}}(?![\u4e00-\u9fff])"
    f"|(?<![\u4e00-\u9fff]){_NAME_FORM}{{1,2}}(?=先生|女士|小姐|同志|大夫|医生|医师|主任|教授|老师|律师|经理)"
)
"""Names: after a label and a colon, or at the start of a phrase before a title. Everywhere else they are not found."""


def masked(text: str, kinds: Collection[str], *, chinese: bool) -> tuple[str, Counter[str]]:
    """The text with a mask such as <手机号> (or <PHONE>) for each find, and how many there were of each kind."""
    found: Counter[str] = Counter()

    def mask(kind: str) -> str:
        found[kind] += 1
        return _MASKS[kind][0 if chinese else 1]

    if "email" in kinds and "@" in text:
        text = _with_masked_addresses(text, mask)
    if not _KINDS_OF_NUMBERS.isdisjoint(kinds):
        text = _with_masked_numbers(text, kinds, mask)
    if "ip" in kinds and _INSIDE_IP.search(text):
        text = _IP.sub(lambda match: mask("ip") if _is_public(match) else match[0], text)
    marked = "account" in kinds and chinese and any(mark in text for mark in _ACCOUNT_MARKS)
    if marked and _ACCOUNT_BEGINNING.search(text):
        text = _ACCOUNT.sub(lambda match: (match[1] or match[2]) + mask("account"), text)
    if "plate" in kinds and chinese:
        text = _PLATE.sub(lambda _: mask("plate"), text)
    if "name" in kinds and chinese:
        text = _NAME.sub(lambda match: (match["before"] or "") + mask("name"), text)
    return text, found


def _with_masked_numbers(text: str, kinds: Collection[str], mask: Callable[[str], str]) -> str:
    parts = []
    done = 0
    for run in _DIGITS.finditer(text):
        spans: list[tuple[int, int, str]] = []
        for kind, form, is_real in _NUMBERS:
            if kind not in kinds:
                continue
            # A bracket and a plus may stand before the run; two characters after it decide whether a number ends there.
            for match in form.finditer(text, max(run.start() - 2, done), run.end() + 2):
                start, end = match.span()
                free = all(end <= first or start >= last for first, last, _ in spans)
                if end <= run.end() and free and is_real(match[0]):
                    spans.append((start, end, kind))
        for start, end, kind in sorted(spans):
            parts += [text[done:start], mask(kind)]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def is_id_card(text: str) -> bool:
    """Whether 18 characters are an identity number of the People's Republic: a date that was, and the check digit."""
    number = text.replace(" ", "").upper()
    try:
        born = datetime.date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = sum(int(digit) * (2**place % 11) for digit, place in zip(number[:17], range(17, 0, -1)))
    return born <= datetime.date(2100, 1, 1) and number[17] == "10X98765432"[total % 11]


def is_bank_card(text: str) -> bool:
    """Whether the last digit is the check digit of the others (Luhn), and they are not one digit over and over."""
    number = re.sub("[ -]", "", text)
    # Counted from the right, every second digit is doubled.
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(number))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0 and len(set(number)) > 2


_NUMBERS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("id_card", _ID_CARD, is_id_card),
    ("bank_card", _BANK_CARD, is_bank_card),
    ("mobile", _MOBILE, lambda _: True),
    ("landline", _LANDLINE, lambda _: True),
)
_KINDS_OF_NUMBERS = frozenset(kind for kind, _, _ in _NUMBERS)


def _with_masked_addresses(text: str, mask: Callable[[str], str]) -> str:
    """Look around each @, not for the start of an address everywhere: a long run of letters costs nothing."""
    parts = []
    done = 0
    at = text.find("@")
    while at >= 0:
        domain = _EMAIL_AFTER.match(text, at + 1)
        name = _EMAIL_BEFORE.search(text[max(done, at - 64) : at]) if domain else None
        if domain and name and not _NOBODY.search(domain[0]) and name[0].lower() not in _NOBODYS_NAME:
            parts += [text[done : at - len(name[0])], mask("email")]
            done = domain.end()
        at = text.find("@", max(at + 1, done))
    return "".join([*parts, text[done:]]) if parts else text


def _is_public(match: re.Match[str]) -> bool:
    """Whether four numbers are the address of a machine on the internet, and not a version or part of something."""
    if match.string[max(match.start() - 1, 0) : match.start()] in _PARTS_OF_WORDS:
        return False
    octets = [int(octet) for octet in match[0].split(".")]
    first, second = octets[:2]
    private = (
        first in (0, 10, 127)
        or first >= 224
        or (first, second) in ((192, 168), (169, 254))
        or (first == 172 and 16 <= second < 32)
    )
    return _SMALLEST_LARGE_OCTET <= max(octets) <= 255 and not private
