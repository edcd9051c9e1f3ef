"""Files that are more than lines: web pages, archives, e-books, Word, PDF, and JSON larger than a window."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from onecard.data import cutting, json_rows, tables
from onecard.data.documents import read_raw_items
from onecard.data.markup import html_text
from onecard.data.records import Rejection, Row, read_items
from onecard.errors import MissingExtra
from onecard.settings import Source


def read(path: Path, **settings: Any) -> tuple[list[Row], list[Rejection]]:
    items = list(read_items(Source(path=str(path), **settings)))
    return [item for item in items if isinstance(item, Row)], [item for item in items if isinstance(item, Rejection)]


def texts(path: Path, **settings: Any) -> list[str]:
    rows, rejected = read(path, **settings)
    assert rejected == []
    return [row.values["text"] for row in rows]


# --- web pages ----------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html><html><head><title>标题</title><style>p {color: red}</style>
<script>if (a < b) { document.write("<p>no</p>") }</script></head>
<body class="x" hidden>
<nav><ul><li>首页</li><li>登录</li></ul></nav>
<h1>第一章&nbsp;开始</h1>
<p>一段 <b>粗</b>体
文字&mdash;&#20013;文。<br>第二行<p>没有关闭的一段
<div style="display:none">看不见<div>也看不见</div></div>
<table><tr><th>名</th><th>值</th></tr><tr><td>甲</td><td>1 &lt; 2</td></tr></table>
<pre>  def f():
    return 1
</pre>
<form><input value="x"><button>提交</button></form>
<p>完</body></html>"""


def test_the_visible_text_of_a_page() -> None:
    expected = (
        "第一章\u00a0开始\n\n一段 粗体 文字—中文。\n第二行\n\n没有关闭的一段\n\n名\t值\n甲\t1 < 2\n\n"
        "  def f():\n    return 1\n\n完"
    )
    assert html_text([PAGE]) == expected
    # Whatever the pieces in which it comes.
    for size in (1, 7, 50):
        assert html_text(PAGE[at : at + size] for at in range(0, len(PAGE), size)) == expected


def test_pages_in_a_stated_encoding(tmp_path: Path) -> None:
    page = '<html><head><meta charset="{}"></head><body><p>{}</p></body></html>'
    (tmp_path / "a.html").write_bytes(page.format("shift_jis", "日本語のページ").encode("shift_jis"))
    (tmp_path / "b.htm").write_bytes(page.format("gb2312", "简短的中文").encode("gbk"))
    # It says what it is not; UTF-8 needs no word for it.
    (tmp_path / "c.xhtml").write_bytes(page.format("iso-8859-1", "这是中文，写的是别的。").encode())
    assert texts(tmp_path) == ["日本語のページ", "简短的中文", "这是中文，写的是别的。"]
    assert texts(tmp_path / "a.html", split="paragraph") == ["日本語のページ"]


def test_a_wrong_stated_encoding_is_not_believed(tmp_path: Path) -> None:
    body = "<p>我们在这里说的是真的，因为大家看过这本书。</p>" * 20
    (tmp_path / "a.html").write_bytes(f'<meta charset="gb2312">{body}'.encode())
    assert texts(tmp_path)[0].startswith("我们在这里说的是真的")


# --- archives -----------------------------------------------------------------------------------------------------


def test_members_of_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b/two.txt", "二\n")
        archive.writestr("b/one.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "again"}\n'))
        archive.writestr("c.gif", b"GIF89a")
        archive.writestr("__MACOSX/b/two.txt", "no")
        archive.writestr("b/.hidden.txt", "no")
        archive.writestr("d.csv", "text\n三\n".encode("gb18030"))
        archive.writestr("inner.zip", b"PK")
    rows, rejected = read(tmp_path / "a.zip")
    assert [(Path(row.file).relative_to(tmp_path).as_posix(), row.line, row.values["text"]) for row in rows] == [
        ("a.zip/b/one.jsonl.gz", 1, "one"),
        ("a.zip/b/one.jsonl.gz", 2, "again"),
        ("a.zip/b/two.txt", 1, "二"),
        ("a.zip/d.csv", 2, "三"),
    ]
    assert [(Path(item.file).name, item.reason) for item in rejected] == [
        ("c.gif", "unsupported_file"),
        ("inner.zip", "unsupported_file"),
    ]
    names = [
        item.id for item in read_raw_items(Source(path=str(tmp_path / "a.zip"))) if not isinstance(item, Rejection)
    ]
    assert names == ["a.zip/b/one.jsonl.gz:1", "a.zip/b/one.jsonl.gz:2", "a.zip/b/two.txt:1", "a.zip/d.csv:2"]


def test_an_archive_with_chinese_names_of_another_system(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("xxxx.txt", "text")
    data = raw.getvalue().replace(b"xxxx.txt", "对话".encode("gb18030") + b".txt")
    (tmp_path / "a.zip").write_bytes(data)
    assert [Path(row.file).name for row in read(tmp_path / "a.zip")[0]] == ["对话.txt"]


def test_a_broken_archive_costs_itself(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "x" * 1000)
        archive.writestr("b.txt", "good")
    data = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(data.replace(b"x" * 20, b"y" * 20, 1))  # the checksum is wrong now
    (tmp_path / "b.zip").write_bytes(data[:-40])
    (tmp_path / "c.txt").write_text("还在", encoding="utf-8")
    rows, rejected = read(tmp_path)
    assert [row.values["text"] for row in rows] == ["good", "还在"]
    assert [(Path(item.file).name, item.reason) for item in rejected] == [
        ("a.txt", "damaged_file"),
        ("b.zip", "damaged_file"),
    ]


# --- books --------------------------------------------------------------------------------------------------------


def write_epub(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        )
        archive.writestr(
            "OPS/book.opf",
            '<package><manifest><item id="b" href="z%20one.xhtml"/><item id="a" href="text/two.xhtml"/>'
            '<item id="css" href="x.css"/></manifest><spine><itemref idref="b"/><itemref idref="a"/></spine></package>',
        )
        archive.writestr("OPS/text/two.xhtml", "<html><body><h1>第二章</h1><p>后来。</p></body></html>")
        archive.writestr("OPS/z one.xhtml", "<html><body><h1>第一章</h1><p>起初。</p></body></html>")


def test_an_ebook_chapter_by_chapter(tmp_path: Path) -> None:
    write_epub(tmp_path / "a.epub")
    rows, rejected = read(tmp_path / "a.epub")
    assert rejected == []
    assert [(row.line, row.values["text"]) for row in rows] == [(1, "第一章\n\n起初。"), (2, "第二章\n\n后来。")]
    assert texts(tmp_path / "a.epub", split="line") == ["第一章", "起初。", "第二章", "后来。"]
    (tmp_path / "b.epub").write_bytes((tmp_path / "a.epub").read_bytes()[:100])
    assert [item.reason for item in read(tmp_path / "b.epub")[1]] == ["damaged_file"]


def test_a_word_document(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_heading("标题", 1)
    document.add_paragraph("第一段。")
    table = document.add_table(rows=2, cols=2)
    for cell, value in zip((cell for row in table.rows for cell in row.cells), ("名", "值", "甲", "1")):
        cell.text = value
    document.add_paragraph("最后。")
    document.save(tmp_path / "a.docx")
    assert texts(tmp_path / "a.docx") == ["标题\n第一段。\n名\t值\n甲\t1\n最后。"]
    (tmp_path / "b.docx").write_bytes(b"PK\x03\x04 no")
    with zipfile.ZipFile(tmp_path / "c.docx", "w") as archive:
        archive.writestr("a.txt", "no document")
    for name in ("b.docx", "c.docx"):
        assert [item.reason for item in read(tmp_path / name)[1]] == ["damaged_file"], name


def minimal_pdf(text: str) -> bytes:
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    made, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return made + (
        b"xref\n0 5\n0000000000 65535 f \n%strailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (table, len(made))
    )


def test_a_pdf(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(minimal_pdf("Text of a page."))
    assert texts(tmp_path / "a.pdf") == ["Text of a page."]
    (tmp_path / "b.pdf").write_bytes(minimal_pdf(""))
    (tmp_path / "c.pdf").write_bytes(b"%PDF-1.4 and nothing more")
    assert [item.reason for item in read(tmp_path / "b.pdf")[1]] == ["no_text_in_file"]
    assert [item.reason for item in read(tmp_path / "c.pdf")[1]] == ["damaged_file"]


@pytest.mark.parametrize(("name", "package"), [("a.pdf", "pypdf"), ("a.docx", "docx")])
def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(MissingExtra) as caught:
        read(tmp_path / name)
    assert "onecard[documents]" in caught.value.remedy


# --- large and broken rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 1 << 20])
def test_a_list_is_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(json_rows, "_WINDOW_CHARACTERS", window)
    rows = [{"text": 'a "quoted"\nline ]', "n": [1, 2, {"x": None}]}, {"text": "二"}, {"text": "true", "b": True}]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    found, rejected = read(tmp_path / "a.json")
    assert rejected == []
    assert [row.values for row in found] == rows
    assert [row.line for row in found] == [2, 12, 15]
    (tmp_path / "b.json").write_text('["一", tru', encoding="utf-8")
    assert [item.reason for item in read(tmp_path / "b.json")[1]] == ["bad_json"]


def test_rows_that_are_too_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_rows, cutting):
        monkeypatch.setattr(module, "LONGEST_ROW_CHARACTERS", 200)
    monkeypatch.setattr("onecard.data.formats.LONGEST_ROW_CHARACTERS", 200)
    long, short = "x" * 900_000, "short"
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": one}) + "\n" for one in (short, long, short)), encoding="utf-8"
    )
    (tmp_path / "b.csv").write_text(f"text\n{short}\n{long}\n{short}\n", encoding="utf-8")
    rows, rejected = read(tmp_path)
    assert [(Path(row.file).name, row.line) for row in rows] == [
        ("a.jsonl", 1), ("a.jsonl", 3), ("b.csv", 2), ("b.csv", 4),
    ]  # fmt: skip
    assert [(Path(item.file).name, item.line, item.reason) for item in rejected] == [
        ("a.jsonl", 2, "row_too_long"), ("b.csv", 3, "row_too_long"),
    ]  # fmt: skip


def test_an_open_quote_costs_its_line_in_a_file_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LONGEST_QUOTED_CHARACTERS", 100)
    lines = ["text,label", 'good,"1"', '"open,2', *(f"row {at},3" for at in range(50)), 'and "so" on,4']
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows, rejected = read(tmp_path / "a.csv")
    assert [row.line for row in rows] == [2, *range(4, 54), 54]
    assert [(item.reason, item.line) for item in rejected] == [("unclosed_quote", 3)]


def test_yaml_objects_that_are_rows_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("title: t\nbody: long\ntags:\n- x\n- y\n", encoding="utf-8")
    assert [row.values for row in read(tmp_path / "a.yml")[0]] == [{"title": "t", "body": "long", "tags": ["x", "y"]}]
    (tmp_path / "b.yml").write_text(
        "id: 1\nmessages:\n- role: user\n  content: q\n- role: assistant\n  content: a\n", encoding="utf-8"
    )
    assert len(read(tmp_path / "b.yml")[0]) == 1
    (tmp_path / "c.yml").write_text("version: 1\nrows:\n- text: 一\n- text: 二\n", encoding="utf-8")
    assert texts(tmp_path / "c.yml") == ["一", "二"]


# --- long texts ---------------------------------------------------------------------------------------------------


def test_where_long_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LONGEST_TEXT_CHARACTERS", 20)
    cases = [
        ("a" * 12 + "\n\n" + "b\nc. d e" + "f" * 15, ["a" * 12 + "\n\n", "b\nc. d e" + "f" * 12, "fff"]),
        ("一" * 12 + "。\n" + "二" * 10, ["一" * 12 + "。\n", "二" * 10]),
        ("一" * 11 + "。”" + "二" * 15, ["一" * 11 + "。”", "二" * 15]),
        ("word word word word word", ["word word word word ", "word"]),
        ("x" * 45, ["x" * 20, "x" * 20, "x" * 5]),
        ("x" * 20, ["x" * 20]),
        ("", [""]),
    ]
    for text, expected in cases:
        assert list(cutting.pieces(text)) == expected
        assert "".join(expected) == text


def test_long_texts_become_several_documents_with_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LONGEST_TEXT_CHARACTERS", 20)
    monkeypatch.setattr("onecard.data.formats.LONGEST_TEXT_CHARACTERS", 20)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 30}) + '\n{"text": "y"}\n', encoding="utf-8")
    (tmp_path / "b.txt").write_text("一二三四五六七八九。" * 5 + "\nnext\n", encoding="utf-8")
    source = Source(path=str(tmp_path), name="s", split="line")
    found = [(item.id, item.text) for item in read_raw_items(source) if not isinstance(item, Rejection)]
    assert found == [
        ("s/a.jsonl:1", "x" * 20),
        ("s/a.jsonl:1.2", "x" * 10),
        ("s/a.jsonl:2", "y"),
        ("s/b.txt:1", "一二三四五六七八九。" * 2),
        ("s/b.txt:1.2", "一二三四五六七八九。" * 2),
        ("s/b.txt:1.3", "一二三四五六七八九。"),
        ("s/b.txt:2", "next"),
    ]
