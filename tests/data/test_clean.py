"""The whole of `onecard clean` on small inputs: what is kept, the arithmetic of the report, the split."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.cli import main
from onecard.config import CleanConfig
from onecard.data.clean import clean
from onecard.data.corpus import read_documents
from onecard.data.dedup import jaccard, shingles
from onecard.errors import ArtifactError, DataError
from onecard.settings import Source

FIRST = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"
SECOND = "机器学习模型需要大量高质量数据才能取得好的效果，清洗数据往往比调整参数更加重要！"


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(tmp_path: Path, *sources: Any, **settings: Any) -> dict[str, Any]:
    made = [Source.model_validate(source) for source in sources]
    return clean(CleanConfig(sources=made, output=tmp_path / "corpus", overwrite=True, **settings))


def rejections(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "corpus/rejected-00000.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def random_chinese(seed: int, characters: int = 60) -> str:
    draw = random.Random(seed)
    return "".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(characters))


def test_report_arithmetic_and_reasons(tmp_path: Path) -> None:
    mixed = write_rows(
        tmp_path / "mixed.jsonl",
        [
            {"text": FIRST},  # 1 kept
            {"text": "短"},  # 2
            {"text": f"\u200b{FIRST}  "},  # 3 equal once tidied
            {"text": SECOND},  # 4 near
            {"text": "  \n "},  # 5
            {"text": 7},  # 6
            ["no", "object"],  # 7
            {"text": "好" * 100},  # 8
            {"text": "In the beginning God created the heaven and the earth.\r\n"},  # 9 kept
            {"text": "+=<>|~" * 5 + "abcdefghij"},  # 10
        ],
    )
    answer = run(tmp_path, mixed, held_out=0)
    assert answer["read"] == 10
    assert answer["kept"] == 2
    assert answer["rejected"] == {
        "empty": 1,
        "exact_duplicate": 1,
        "missing_text": 1,
        "near_duplicate": 1,
        "not_an_object": 1,
        "too_many_symbols": 1,
        "too_repetitive": 1,
        "too_short": 1,
    }
    english = "In the beginning God created the heaven and the earth."
    assert answer["characters"] == len(FIRST) + len(english)
    assert answer["bytes"] == 3 * len(FIRST) + len(english)
    assert answer["changed"] == 1
    assert answer["by_source"]["mixed.jsonl"] == {
        "read": 10,
        "kept": 2,
        "rejected": 8,
        "characters": answer["characters"],
        "bytes": answer["bytes"],
        "held_out": 0,
    }
    assert {language: counts["kept"] for language, counts in answer["by_language"].items()} == {"en": 1, "zh": 1}
    found = {row["line"]: row for row in rejections(tmp_path)}
    assert {line: row["reason"] for line, row in found.items()} == {
        2: "too_short",
        3: "exact_duplicate",
        4: "near_duplicate",
        5: "empty",
        6: "missing_text",
        7: "not_an_object",
        8: "too_repetitive",
        10: "too_many_symbols",
    }
    assert all(row["file"] == str(mixed) and row["source"] == "mixed.jsonl" for row in found.values())
    assert found[3]["detail"] == "mixed.jsonl:1"
    assert found[4]["detail"] == "mixed.jsonl:1 (similarity 0.727)"
    assert found[4]["text"] == SECOND
    written = json.loads((tmp_path / "corpus/report.json").read_text(encoding="utf-8"))
    assert {**written, "output": str(tmp_path / "corpus")} == answer
    manifest = artifact.verify(tmp_path / "corpus")
    assert manifest.kind == "corpus"
    assert sorted(manifest.files) == ["documents-00000.parquet", "rejected-00000.jsonl", "report.json"]
    page = (tmp_path / "corpus/report.html").read_text(encoding="utf-8")
    assert "near_duplicate, 1:" in page
    assert SECOND in page


def test_documents_and_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "novels"
    folder.mkdir()
    (folder / "one.txt").write_bytes(f"{FIRST}\n".encode("gb18030"))
    (folder / "list.json").write_text(json.dumps([random_chinese(1), random_chinese(2)]), encoding="utf-8")
    run(tmp_path, folder, {"path": str(folder / "one.txt"), "name": "again", "language": "fr"}, near_duplicates=False)
    documents = list(read_documents(tmp_path / "corpus"))
    assert [(item.id, item.source, item.language.partition("-")[0]) for item in documents] == [
        ("novels/list.json:1", "novels", "zh"),
        ("novels/list.json:1.2", "novels", "zh"),
        ("novels/one.txt:1", "novels", "zh"),
    ]
    assert documents[2].text == FIRST
    assert [row["detail"] for row in rejections(tmp_path)] == ["novels/one.txt:1"]


def test_group_by_joins_rows_in_sequence(tmp_path: Path) -> None:
    verses = [("Ruth", 1), ("Ruth", 1), ("Ruth", 2), ("Joel", 2), ("Ruth", 2)]
    rows = [{"book": book, "chapter": c, "text": f"verse number {i}"} for i, (book, c) in enumerate(verses)]
    path = write_rows(tmp_path / "kjv.jsonl", rows)
    answer = run(
        tmp_path, {"path": str(path), "group_by": ["book", "chapter"]}, minimum_characters=1, near_duplicates=False
    )
    assert answer["read"] == answer["kept"] == 4
    assert [(item.id, item.text) for item in read_documents(tmp_path / "corpus")] == [
        ("kjv.jsonl:Ruth/1", "verse number 0\nverse number 1"),
        ("kjv.jsonl:Ruth/2", "verse number 2"),
        ("kjv.jsonl:Joel/2", "verse number 3"),
        ("kjv.jsonl:Ruth/2.2", "verse number 4"),
    ]
    with pytest.raises(DataError, match="group_by names boook.*book, chapter, text"):
        run(tmp_path, {"path": str(path), "group_by": ["boook"]})


def test_the_field_with_the_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"Titel": "x", "Inhalt": FIRST}])
    with pytest.raises(DataError, match=r"a\.jsonl: a field with the text was not found.*Titel, Inhalt"):
        run(tmp_path, path)
    with pytest.raises(DataError, match="the field body was not found"):
        run(tmp_path, {"path": str(path), "field": "body"})
    assert run(tmp_path, {"path": str(path), "field": "Inhalt"})["kept"] == 1
    assert run(tmp_path, write_rows(tmp_path / "b.jsonl", [{"title": "x", "Content": FIRST}]))["kept"] == 1


def test_a_file_without_text_costs_only_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "labels.csv").write_text("id,label\n" + "1,a\n" * 150, encoding="utf-8")
    (folder / "metadata.json").write_text('{"version": "1"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"labels\.csv: a field with the text was not found.*id, label"):
        run(tmp_path, folder)
    capsys.readouterr()
    write_rows(folder / "text.jsonl", [{"text": FIRST}])
    answer = run(tmp_path, folder)
    assert (answer["kept"], answer["rejected"]) == (1, {"missing_text": 151})
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("a field with the text was not found") == 2
    assert "Its 150 rows are set aside as missing_text" in said


def test_held_out_never_repeats_training_text(tmp_path: Path) -> None:
    rows = []
    for seed in range(60):
        text = random_chinese(seed, 120)
        rows += [{"text": text}, {"text": text[:110] + random_chinese(1000 + seed, 10)}, {"text": text}]
    random.Random(0).shuffle(rows)
    paths = [write_rows(tmp_path / "a.jsonl", rows[:90]), write_rows(tmp_path / "b.jsonl", rows[90:])]
    answer = run(tmp_path, *paths, held_out=0.3)
    assert answer["kept"] == 60
    documents = list(read_documents(tmp_path / "corpus"))
    kept = Counter(item.source for item in documents)
    held = Counter(item.source for item in documents if item.split == "held_out")
    assert held == {source: round(0.3 * count) for source, count in kept.items()}
    assert answer["held_out"] == held.total()
    train = [shingles(item.text) for item in documents if item.split == "train"]
    for item in documents:
        if item.split == "held_out":
            assert max(jaccard(shingles(item.text), other) for other in train) < 0.7


def test_same_output_whatever_the_hash_seed(tmp_path: Path) -> None:
    rows = [{"text": random_chinese(i % 40) + ("改" if i > 40 else "")} for i in range(80)]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"text": "短"}, 5])
    hashes = set()
    for seed in ("1", "2"):
        output = tmp_path / f"corpus-{seed}"
        subprocess.run(
            [sys.executable, "-m", "onecard.cli", "clean", str(path), "--output", str(output), "--quiet"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        hashes.add(artifact.read_manifest(output).content_hash)
    assert len(hashes) == 1


def test_strict_stops_at_the_first_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": FIRST}, [1], {"text": SECOND}])
    assert main(["clean", str(path), "--output", str(tmp_path / "corpus"), "--strict"]) == 2
    assert "a.jsonl, line 2" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def test_nothing_left_names_the_rule(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "短"}, {"text": "也短"}, {"text": ""}])
    with pytest.raises(DataError) as caught:
        run(tmp_path, path)
    assert "too_short took 2 of 3" in caught.value.what
    assert not (tmp_path / "corpus").exists()


def test_rejections_of_odd_file_names_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_rows(folder / "a.jsonl", [{"text": FIRST}])
    (folder / os.fsdecode("对话.gif".encode("gbk"))).write_bytes(b"")
    run(tmp_path, folder)
    assert [row["file"].endswith("\ufffd.gif") for row in rejections(tmp_path)] == [True]


def test_existing_output_is_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": FIRST}])
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/mine.txt").write_text("x", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(ArtifactError, match="not made by onecard"):
            clean(CleanConfig(sources=[Source(path=str(path))], output=tmp_path / "corpus", overwrite=overwrite))
    assert (tmp_path / "corpus/mine.txt").read_text(encoding="utf-8") == "x"


def test_no_held_out_document_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, write_rows(tmp_path / "a.jsonl", [{"text": FIRST}]))
    assert "no document is held out" in capsys.readouterr().err


def test_what_was_masked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"{FIRST}电话13812345678、13912345678，邮箱a@firm.cn"}])
    assert run(tmp_path, path)["changes"] == {"personal_data: email": 1, "personal_data: mobile": 2}
    assert "Personal data was masked: 1 email, 2 mobile." in capsys.readouterr().err
    run(tmp_path, path, personal_data="keep")
    assert "masked" not in capsys.readouterr().err


def test_json_output_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": FIRST}])
    assert main(["clean", str(path), "--output", str(tmp_path / "corpus"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["read"], answer["kept"], answer["rejected"]) == (1, 1, {})


ARTICLE = (
    "做豆腐先要挑豆子。颗粒饱满、颜色发黄的新豆子出浆多，隔年的陈豆泡再久也有一股涩味。豆子洗净以后用凉水泡上，夏天五六个钟头，"
    "冬天要一整夜，泡到用指甲一掐就断，断面平平的，没有硬芯，就可以上磨了。石磨转得慢，磨出来的浆细，电磨快得多，只是容易发热，"
    "豆香就跑掉一些。磨好的浆倒进布袋里，吊起来一边晃一边挤，豆渣留在袋里，可以喂猪，也可以加点葱花烙饼。生浆上锅煮，"
    "最要紧的是看住火：泡沫一下子涌上来，那还不是开，得用勺子撇了沫，再煮上十来分钟，喝了才不会闹肚子。点卤水是手艺。"
    "师傅左手端着碗，沿着锅边一点一点地淋，右手拿勺子轻轻推，眼看着清亮的浆里浮出一朵一朵的豆花，就得停手，多一滴就老了。"
    "盖上锅盖闷一刻钟，把豆花舀进铺了纱布的木框，压上石头。压得轻是嫩豆腐，拌一勺酱油和香菜就能吃；压得重是老豆腐，下锅煎，"
    "两面焦黄，里面还是软的。镇上的人天不亮就来排队，端着自家的盆，边等边说昨晚的雨。"
)


def test_an_ordinary_chinese_article_is_kept(tmp_path: Path) -> None:
    assert 380 <= len(ARTICLE) <= 420
    path = tmp_path / "豆腐.txt"
    path.write_text(ARTICLE, encoding="gb18030")
    result = run(tmp_path, {"path": str(path)}, held_out=0.0)
    assert (result["kept"], result["rejected"]) == (1, {})
    assert [document.text for document in read_documents(tmp_path / "corpus", "train")] == [ARTICLE]
