"""Files in every usual encoding give the same characters, and only line feeds end lines."""

from __future__ import annotations

import codecs
import functools
from pathlib import Path

import pytest

from onecard.data import encoding
from onecard.errors import ConfigError

CHINESE = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。\n我们在这里说的是真的。\n"
TRADITIONAL = "這個國家的人們說，他們會來這裡學習，因為時間還很多。\n我們應該對這個問題有更好的認識。\n"


def read(path: Path, name: str = "auto") -> tuple[str, str]:
    """(encoding found, whole text)"""
    opener = functools.partial(path.open, "rb")
    found = encoding.inspect(opener, name)
    return found.encoding, "".join(encoding.read_lines(opener, found))


@pytest.mark.parametrize(
    ("codec", "mark"),
    [
        ("utf-8", b""),
        ("utf-8", codecs.BOM_UTF8),
        ("gbk", b""),
        ("gb18030", b""),
        ("utf-16-le", codecs.BOM_UTF16_LE),
        ("utf-16-be", codecs.BOM_UTF16_BE),
        ("utf-16-le", b""),
        ("utf-16-be", b""),
        ("utf-32-le", codecs.BOM_UTF32_LE),
        ("utf-32-be", b""),
    ],
)
def test_chinese_text_is_read_in_every_encoding(tmp_path: Path, codec: str, mark: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(mark + CHINESE.encode(codec))
    assert read(path)[1] == CHINESE


def test_traditional_text_in_big5(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TRADITIONAL.encode("big5"))
    assert read(path)[1] == TRADITIONAL


def test_utf16_chinese_without_any_ascii_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "我们在这里说的是真的。他们都知道这件事情，因为大家看过这本书。"
    path.write_bytes(text.encode("utf-16-le"))  # not one zero byte in it
    assert b"\0" not in path.read_bytes()
    assert read(path)[1] == text


def test_english_utf16_without_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("To be, or not to be: that is the question.\n".encode("utf-16-be"))
    assert read(path)[1] == "To be, or not to be: that is the question.\n"


def test_four_byte_character_under_the_name_gbk(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("我们去".encode("gbk") + b"\x95\x34\xb2\x35" + "家吃饭，这是真的。".encode("gbk"))
    assert read(path)[1] == "我们去𠮷家吃饭，这是真的。"
    assert read(path, "gbk") == ("gb18030", "我们去𠮷家吃饭，这是真的。")


def test_ascii_start_then_gb18030_far_behind_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    head = "plain ascii line\n" * (2 * encoding.SAMPLE_BYTES // 17)
    path.write_bytes((head + CHINESE).encode("gb18030"))
    assert read(path) == ("gb18030", head + CHINESE)


def test_one_damaged_byte_leaves_utf8_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CHINESE.encode() + b"\xff\n" + CHINESE.encode())
    name, text = read(path)
    assert name == "utf-8-sig"
    assert text == CHINESE + encoding.DAMAGED + "\n" + CHINESE


def test_twins_are_told_apart_by_what_only_one_has() -> None:
    czech = "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv."
    for codec in ("iso8859-2", "cp1250"):
        assert encoding._corrected("cp1250", czech.encode(codec), whole=True) == codec
    windows = "機種依存の文字①㈱を含む文章。".encode("cp932")
    assert encoding._corrected("shift_jis_2004", windows, whole=True) == "cp932"
    assert encoding._corrected("shift_jis_2004", "か゚".encode("shift_jis_2004"), whole=True) == "shift_jis_2004"


@pytest.mark.parametrize(
    "data", [b"%PDF-1.7 text follows", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), bytes(range(256)) * 40]
)
def test_binary_files_are_no_text(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(encoding.NotText):
        read(path)


def test_nul_padding_is_not_utf16(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "abc"}\n' + bytes(4096))
    assert read(path) == ("utf-8-sig", '{"text": "abc"}\n' + "\0" * 4096)


def test_only_feeds_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    line = "a\u2028b\u2029c\x85d\x0be\x0cf\rg"
    path.write_bytes(f"{line}\r\n{line}\nlast".encode())
    opener = functools.partial(path.open, "rb")
    lines = list(encoding.read_lines(opener, encoding.inspect(opener)))
    assert lines == [line + "\r\n", line + "\n", "last"]
    assert [encoding.strip_line_end(text) for text in lines] == [line, line, "last"]


def test_carriage_returns_end_lines_where_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\rtwo\rthree")
    opener = functools.partial(path.open, "rb")
    assert list(encoding.read_lines(opener, encoding.inspect(opener))) == ["one\r", "two\r", "three"]


def test_line_ends_across_block_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BLOCK_BYTES", 5)
    path = tmp_path / "a.txt"
    path.write_bytes("一二三\r\n四五六七\r\n八".encode("gb18030"))
    opener = functools.partial(path.open, "rb")
    text_format = encoding.inspect(opener, "gb18030")
    assert list(encoding.read_lines(opener, text_format)) == ["一二三\r\n", "四五六七\r\n", "八"]


def test_an_unknown_name_is_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a")
    with pytest.raises(ConfigError, match="utf-ate"):
        read(path, "utf-ate")
