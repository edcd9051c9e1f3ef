"""Rows of every format: what is kept, what is refused, and where it stood."""

from __future__ import annotations

import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onecard.data import formats
from onecard.data.records import Rejection, Row, read_rows, source_files
from onecard.errors import ConfigError, DataError
from onecard.settings import Source


def read(path: Path | str, **settings: Any) -> tuple[list[Row], list[Rejection]]:
    rejected: list[Rejection] = []
    rows = list(read_rows(Source(path=str(path), **settings), strict=False, reject=rejected.append))
    return rows, rejected


def texts(path: Path | str, **settings: Any) -> list[str]:
    rows, rejected = read(path, **settings)
    assert rejected == []
    return [row.values["text"] for row in rows]


# --- encodings of the same rows -----------------------------------------------------------------------------------

TWENTY = [{"name": f"第{i}行", "text": f"我们在这里说的是第{i}个问题，其中有些是真的。"} for i in range(20)]
WITH_RARE = [{**row, "text": row["text"] + "𠮷"} for row in TWENTY]


@pytest.mark.parametrize(
    ("codec", "rows", "end"),
    [
        ("utf-8", WITH_RARE, "\n"),
        ("utf-8-sig", WITH_RARE, "\n"),
        ("gbk", TWENTY, "\n"),
        ("gb18030", WITH_RARE, "\n"),
        ("utf-16", WITH_RARE, "\n"),
        ("utf-16-le", WITH_RARE, "\n"),
        ("utf-16-be", WITH_RARE, "\n"),
        ("utf-8", WITH_RARE, "\r\n"),
        ("gb18030", WITH_RARE, "\r\n"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_the_same_rows_from_every_encoding(
    tmp_path: Path, codec: str, rows: list[dict[str, str]], end: str, suffix: str
) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        lines = ["name,text", *(f"{row['name']},{row['text']}" for row in rows)]
    path.write_bytes((end.join(lines) + end).encode(codec))
    found, rejected = read(path)
    assert rejected == []
    assert [row.values for row in found] == rows


def test_everything_works_under_a_c_locale(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in WITH_RARE).encode("gb18030"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "onecard.cli",
            "clean",
            str(path),
            "--output",
            str(tmp_path / "语料"),
            "--no-near-duplicates",
        ],
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    from onecard.data.corpus import read_documents

    kept = [document.text for document in read_documents(tmp_path / "语料")]
    assert kept == [row["text"] for row in WITH_RARE]


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_broken_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"name": 1}\n'  # 1
        b'{"name": "Nan", "extra": [1, 2]}\n'  # 2
        b"\n"  # 3
        b'["an", "array"]\n'  # 4
        b'{"name": "\\ud83d alone"}\n'  # 5
        b'{"name": "\\ud83d\\udc4d pair"}\n'  # 6
        b'\x00\x00{"name": "padded"}\x00\x00\n'  # 7
        b"   \n"  # 8
        b'{"name": NaN}\n'  # 9
        b'{"name": "bad byte \xff"}\n'  # 10
        b'{"name": "cut o'  # 11
    )
    rows, rejected = read(path)
    assert [(row.line, row.values) for row in rows] == [
        (1, {"name": 1}),
        (2, {"name": "Nan", "extra": [1, 2]}),
        (5, {"name": "\ufffd alone"}),
        (6, {"name": "👍 pair"}),
        (7, {"name": "padded"}),
        (9, {"name": None}),
    ]
    assert [(item.line, item.reason, item.file) for item in rejected] == [
        (4, "not_an_object", str(path)),
        (10, "undecodable_bytes", str(path)),
        (11, "bad_json", str(path)),
    ]
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: .*not_an_object"):
        list(read_rows(Source(path=str(path)), strict=True, reject=rejected.append))


def test_unicode_line_separators_do_not_split_records(tmp_path: Path) -> None:
    odd = "一\u2028二\u2029三\x85四\x0b五\x0c六"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": odd}, ensure_ascii=False) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text(f"{odd}\n{odd}\n", encoding="utf-8")
    (tmp_path / "c.csv").write_text(f"text\n{odd}\n", encoding="utf-8")
    # JSON forbids raw control characters inside strings; these two are written as escapes by json.dumps.
    assert texts(tmp_path, split="line") == [odd] * 4


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('["一", "二"]', [({"text": "一"}, 1), ({"text": "二"}, 1)]),
        ('[\n {"a": 1},\n {"a": 2}\n]\n', [({"a": 1}, 2), ({"a": 2}, 3)]),
        ('{"version": [1, 2], "data":\n[{"a": "]"},\n{"a": 2}]}', [({"a": "]"}, 2), ({"a": 2}, 3)]),
        ('{"text": "one row", "tags": ["x", "y"]}', [({"text": "one row", "tags": ["x", "y"]}, 1)]),
        (
            '{"Title": "t", "Body": "long", "comments": [{"body": "a"}, {"body": "b"}]}',
            [({"Title": "t", "Body": "long", "comments": [{"body": "a"}, {"body": "b"}]}, 1)],
        ),
        (
            '{"id": 1, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
            [({"id": 1, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, 1)],
        ),
        (
            '{"id": 1, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}',
            [({"id": 1, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, 1)],
        ),
        ('{"conversations": [{"messages": []}, {"a": 2}]}', [({"messages": []}, 1), ({"a": 2}, 1)]),
        ('{"content": " ", "data": [{"a": 1}, {"a": 2}]}', [({"a": 1}, 1), ({"a": 2}, 1)]),
        ('{"messages": [{"from": "me", "text": "hello"}]}', [({"from": "me", "text": "hello"}, 1)]),
        ('{"a": 1}\n{"a": 2}\n', [({"a": 1}, 1), ({"a": 2}, 2)]),
        ("[]", []),
    ],
)
def test_json_documents(tmp_path: Path, content: str, expected: list[tuple[dict[str, Any], int]]) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    rows, rejected = read(path)
    assert rejected == []
    assert [(row.values, row.line) for row in rows] == expected


def test_an_object_with_damaged_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"text": "' + "这是一个好的句子，我们都知道".encode() * 3 + b'\xff"}')
    rows, rejected = read(path)
    assert (rows, [item.reason for item in rejected]) == ([], ["undecodable_bytes"])


def test_a_json_list_that_breaks_off_gives_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"a": 1},\n{"a": 2},\n{"a": ', encoding="utf-8")
    rows, rejected = read(path)
    assert [row.values["a"] for row in rows] == [1, 2]
    assert [(item.reason, item.line) for item in rejected] == [("bad_json", 4)]


# --- tables -------------------------------------------------------------------------------------------------------


def test_csv_keeps_words_quotes_and_newlines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,label\r\nnull,NA\r\nNone,\r\n"a, b",1\r\n'
        b'"say ""hi""",null\r\n"two\r\nlines",2\r\nlast,nan\r\n'
    )
    rows, rejected = read(path)
    assert rejected == []
    assert [(row.line, row.values) for row in rows] == [
        (2, {"text": "null", "label": "NA"}),
        (3, {"text": "None", "label": ""}),
        (4, {"text": "a, b", "label": "1"}),
        (5, {"text": 'say "hi"', "label": "null"}),
        (6, {"text": "two\r\nlines", "label": "2"}),
        (8, {"text": "last", "label": "nan"}),
    ]


def test_csv_bad_rows_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\ngood,1\ntoo,many,cells\nfew\n"never closed,2\nalso good,3\n', encoding="utf-8")
    rows, rejected = read(path)
    assert [(row.values["text"], row.line) for row in rows] == [("good", 2), ("also good", 6)]
    assert [(item.reason, item.line) for item in rejected] == [
        ("wrong_number_of_columns", 3),
        ("wrong_number_of_columns", 4),
        ("unclosed_quote", 5),
    ]


def test_csv_separators_and_long_cells(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\nx, y;1\n", encoding="utf-8")
    assert read(tmp_path / "a.csv")[0][0].values == {"text": "x, y", "label": "1"}
    (tmp_path / "b.csv").write_text("text\n" + "字" * 300_000 + "\n", encoding="utf-8")
    assert texts(tmp_path / "b.csv") == ["字" * 300_000]


def test_tsv_with_and_without_quoting(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('label\ttext\n1\t"open quote\n0\tsays "hi"\n', encoding="utf-8")
    assert texts(tmp_path / "a.tsv") == ['"open quote', 'says "hi"']
    (tmp_path / "b.tsv").write_text('label\ttext\n1\t"a ""b"" c"\n0\t"two\nlines"\n', encoding="utf-8")
    assert texts(tmp_path / "b.tsv") == ['a "b" c', "two\nlines"]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["一", "二"], "n": [1, None]}), tmp_path / "a.parquet")
    rows, _ = read(tmp_path / "a.parquet")
    assert [(row.values, row.line) for row in rows] == [({"text": "一", "n": 1}, 1), ({"text": "二", "n": None}, 2)]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    assert [item.reason for item in read(tmp_path / "b.parquet")[1]] == ["damaged_file"]


# --- YAML ---------------------------------------------------------------------------------------------------------


def test_yaml_conversations_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(
        "categories:\n- ai\nconversations:\n- - 你是谁\n  - no\n- - Is it 1.50?\n  - 'yes: it is'\n", encoding="utf-8"
    )
    assert [(row.values, row.line) for row in read(path)[0]] == [
        ({"conversations": ["你是谁", "no"]}, 4),
        ({"conversations": ["Is it 1.50?", "yes: it is"]}, 6),
    ]
    path.write_text("- text: 一\n  n: 1\n- 二\n", encoding="utf-8")
    assert [row.values for row in read(path)[0]] == [{"text": "一", "n": "1"}, {"text": "二"}]
    path.write_text("one: row\n", encoding="utf-8")
    assert [row.values for row in read(path)[0]] == [{"one": "row"}]
    path.write_text("only a sentence\n", encoding="utf-8")
    assert [item.reason for item in read(path)[1]] == ["not_an_object"]
    path.write_text("a: [1, 2\nb: 3\n", encoding="utf-8")
    assert [item.reason for item in read(path)[1]] == ["bad_yaml"]


# --- text ---------------------------------------------------------------------------------------------------------


def test_split_of_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n一\n二\n　\n三\n\n", encoding="utf-8")
    assert texts(path, split="file") == ["一\n二\n　\n三\n"]
    assert texts(path, split="line") == ["一", "二", "三"]
    rows, _ = read(path, split="paragraph")
    assert [(row.values["text"], row.line) for row in rows] == [("一\n二", 2), ("三", 5)]


@pytest.mark.parametrize(
    ("line", "count", "expected"),
    [("字" * 120, 20, "line"), ("字" * 120, 19, "file"), ("字" * 80, 500, "file"), ("word " * 80, 30, "line")],
)
def test_auto_split(line: str, count: int, expected: str) -> None:
    assert formats.choose_split([line + "\n"] * count) == expected


def test_a_huge_text_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_TEXT_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("1234567\n1234567\n123\n", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["1234567\n1234567", "123"]


def test_damage_in_text_is_said_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("这是一个好的句子，我们都知道。\n".encode() * 3 + b"bad \xff\n" + "再来一句。\n".encode())
    rows, rejected = read(path, split="line")
    assert len(rows) == 4
    assert [(item.reason, item.line) for item in rejected] == [("undecodable_bytes", 4)]
    rows, rejected = read(path, split="file")
    assert rejected == []
    assert "bad \ufffd\n" in rows[0].values["text"]
    assert "1 places could not be decoded" in capsys.readouterr().err


# --- where files are ----------------------------------------------------------------------------------------------


def test_compressed_files_and_a_damaged_one(tmp_path: Path) -> None:
    import zstandard

    data = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(2000)).encode()
    expected = [f"row {i}" for i in range(2000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(data))
    frames = zstandard.ZstdCompressor()
    (tmp_path / "a.jsonl.zst").write_bytes(frames.compress(data[:10_000]) + frames.compress(data[10_000:]))
    for suffix in ("gz", "xz", "zst"):
        assert texts(tmp_path / f"a.jsonl.{suffix}") == expected, suffix
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(data)[:-20])
    assert [item.reason for item in read(tmp_path / "cut.jsonl.gz")[1]] == ["damaged_file"]


def test_folders_globs_and_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.md", ".hidden.txt", ".git/x.txt", "a/picture.gif", "a/p.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "a/p.txt").write_bytes(b"%PDF-1.4")
    files = source_files(Source(path=str(tmp_path)))
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "a/p.txt",
        "a/picture.gif",
        "a/y.md",
        "a/z.txt",
        "b.txt",
    ]
    rows, rejected = read(tmp_path)
    assert [row.values["text"] for row in rows] == ["a/y.md", "a/z.txt", "b.txt"]
    assert [(item.reason, Path(item.file).name, item.line) for item in rejected] == [
        ("binary_file", "p.txt", 0),
        ("unsupported_file", "picture.gif", 0),
    ]
    assert texts(tmp_path / "**/*.md") == ["a/y.md"]


def test_links_are_followed_once_and_dead_ones_refused(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    for path in (folder / "own/a.txt", elsewhere / "b.txt"):
        path.parent.mkdir(parents=True)
        path.write_text(path.name, encoding="utf-8")
    (elsewhere / "round").symlink_to(elsewhere)
    for name, target in (("linked", elsewhere), ("again", folder / "own"), ("up", tmp_path), ("dead.txt", "nowhere")):
        (folder / name).symlink_to(target)
    files = source_files(Source(path=str(folder)))
    assert [path.relative_to(folder).as_posix() for path in files] == ["linked/b.txt", "own/a.txt"]
    rejected = read(folder)[1]
    assert [(item.reason, item.file) for item in rejected] == [("unreadable_file", str(folder / "dead.txt"))]
    with pytest.raises(DataError, match=r"dead\.txt: .*unreadable_file"):
        list(read_rows(Source(path=str(folder)), strict=True, reject=rejected.append))
    (folder / "only").mkdir()
    (folder / "only/dead.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"No file of .* can be read"):
        read(folder / "only")


def test_what_onecard_wrote_is_not_read_as_input(tmp_path: Path) -> None:
    for name in ("a.txt", "corpus/onecard.json", "corpus/report.json", "other/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert texts(tmp_path) == ["a.txt", "other/b.txt"]
    assert texts(tmp_path / "*") == ["a.txt", "other/b.txt"]


def test_a_literal_path_wins_over_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "数据 集[1]　一"
    folder.mkdir()
    (folder / "a.txt").write_text("found", encoding="utf-8")
    assert texts(folder) == ["found"]


@pytest.mark.parametrize("name", ["missing.txt", "*.jsonl", "empty", "thing.doc"])
def test_nothing_to_read_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "thing.doc").write_bytes(b"\xd0\xcf\x11\xe0")
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert name in caught.value.what
    assert "\n" not in str(caught.value)


def test_files_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kept_words"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')", encoding="utf-8")
    (package / "data" / "a.txt").write_text("from a package", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert texts("package:kept_words/data/a.txt") == ["from a package"]
    assert texts("package:kept_words/data") == ["from a package"]
    with pytest.raises(DataError, match="package:kept_words/none"):
        read("package:kept_words/none.txt")
    with pytest.raises(ConfigError) as caught:
        read("package:not_there_at_all/a.txt")
    assert "pip install --no-deps not-there-at-all" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        read("package:PyYAML/a.txt")
    assert "package:yaml/a.txt" in caught.value.remedy
