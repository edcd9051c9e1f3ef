"""A dry run tells what the steps would do, adds up, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onecard.cli import main
from onecard.config import CleanConfig
from onecard.data.preview import dry_run, spread
from onecard.errors import DataError
from onecard.settings import Source

PROSE = "机器学习模型需要大量高质量的数据才能取得好的效果，清洗数据往往比调整参数更重要。"


def test_spread_is_even_and_bounded() -> None:
    assert spread(range(5), 10) == ([0, 1, 2, 3, 4], 5)
    # 100 items by 10: every second, fourth, eighth one was held; of the 13 left ten are taken, evenly.
    chosen, seen = spread(range(100), 10)
    assert seen == 100
    assert chosen == [8 * (i * 13 // 10) for i in range(10)]
    assert spread(range(7), 0) == ([], 7)


def test_counts_add_up(tmp_path: Path) -> None:
    rows = [PROSE, f"  {PROSE}13812345678", "短", "沙发", PROSE]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows) + "{\n", encoding="utf-8")
    result = dry_run(CleanConfig(sources=[Source(path=str(path))]), 10)
    assert (result["read"], result["looked_at"], result["kept"], result["changed"]) == (5, 5, 3, 2)
    assert result["rejected"] == {"too_short": 1, "forum_filler": 1}
    assert result["unreadable_rows"] == {"bad_json": 1}
    assert result["steps"]["unicode"] == {"changed": 1, "changes": 1, "rejected": 0}
    assert result["steps"]["forum_filler"] == {"changed": 1, "changes": 1, "rejected": 1}
    assert result["steps"]["personal_data"] == {"changed": 1, "changes": 1, "rejected": 0}
    example = result["examples"]["personal_data"][0]
    assert example["place"] == "a.jsonl:2"
    assert example["before"].endswith("⟦13812345678⟧")
    assert example["after"].endswith("⟦<手机号>⟧")


def test_the_flag_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"{PROSE}\n上一篇：别的\n", encoding="utf-8")
    output = tmp_path / "corpus"
    assert main(["clean", str(path), "--output", str(output), "--dry-run", "5"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 would be kept, 1 would be changed" in said
    assert "⟦上一篇：别的⟧" in said.replace("⏎", "") or "上一篇：别的" in said
    assert main(["clean", str(path), "--output", str(output), "--dry-run", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["boilerplate"]["changes"] == 1
    assert not output.exists()


def test_nothing_to_look_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(DataError, match="no text to look at"):
        dry_run(CleanConfig(sources=[Source(path=str(path))]), 10)
