"""`columns`, `message_keys` and `roles` of a source: files of any names are read as if they had the usual ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onecard.data.chats import as_messages, read_chats
from onecard.data.documents import read_raw_documents
from onecard.data.labelled import read_labelled
from onecard.data.preferences import read_comparisons
from onecard.data.records import Rejection, read_items, read_rows
from onecard.errors import ConfigError, DataError
from onecard.settings import Source, build


def rows_of(source: Source) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(source, strict=True, reject=lambda rejection: None)]


def json_lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_only_what_is_named_is_read_under_the_new_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("编号,症状,建议,messages\n1,发烧,多喝水,[]\n2,咳嗽,休息,[]\n", encoding="utf-8")
    source = Source(path=str(path), columns={"question": "症状", "answer": "建议"})
    assert rows_of(source) == [{"question": "发烧", "answer": "多喝水"}, {"question": "咳嗽", "answer": "休息"}]
    chats = list(read_chats([source], strict=True, reject=lambda rejection: None))
    assert [chat.messages[1]["content"] for chat in chats] == ["多喝水", "休息"]


def test_documents_labels_and_preferences_read_them_too(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"t": "一段话", "k": "c1", "y": 1, "good": "甲", "bad": "乙"})
    text = Source(path=path, columns={"text": "t", "chapter": "k"}, group_by=["chapter"])
    assert [one.text for one in read_raw_documents(text, strict=True, reject=lambda rejection: None)] == ["一段话"]
    labelled = read_labelled(
        [Source(path=path, columns={"text": "t", "label": "y"})],
        label_field="auto",
        several=False,
        strict=True,
        reject=lambda rejection: None,
    )
    assert [(one.text, one.labels) for one in labelled] == [("一段话", ("1",))]
    pairs = Source(path=path, columns={"prompt": "t", "chosen": "good", "rejected": "bad"})
    (pair,) = read_comparisons([pairs], strict=True, reject=lambda rejection: None)
    assert pair.chosen and pair.rejected
    assert (pair.chosen[-1]["content"], pair.rejected[-1]["content"]) == ("甲", "乙")


def test_a_column_that_a_table_lacks_is_refused_at_its_first_row_with_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question_text,answer_text\n" + "q,a\n" * 3, encoding="utf-8")
    source = Source(path=str(path), columns={"question": "questions_text", "answer": "answer_text"})
    with pytest.raises(DataError) as caught:
        next(read_items(source))
    assert "there is no column questions_text" in caught.value.what
    assert caught.value.what.endswith("its columns are: question_text, answer_text.")
    assert "question_text" in caught.value.remedy


def test_in_a_table_of_another_kind_it_is_refused_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\n1,2\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("q,b\n1,2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.csv: there is no column a,"):
        rows_of(Source(path=str(tmp_path), columns={"question": "q", "answer": "a"}))


def test_json_rows_may_leave_a_column_out_but_not_all_of_them(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"q": "1"}, {"q": "2", "sys": "short"})
    columns = {"prompt": "q", "system": "sys"}
    assert rows_of(Source(path=path, columns=columns)) == [{"prompt": "1"}, {"prompt": "2", "system": "short"}]
    with pytest.raises(DataError, match="there is no column ans, .*takes for completion; its columns are: q, sys"):
        rows_of(Source(path=path, columns={**columns, "completion": "ans"}))


def test_keys_of_messages_and_roles(tmp_path: Path) -> None:
    turns = [
        {"speaker": "Patient", "says": "疼"},
        {"speaker": "nurse", "says": "哪里"},
        {"speaker": "user", "says": "头"},
    ]
    turns.append({"speaker": "doctor", "says": "休息"})
    settings: dict[str, Any] = {
        "columns": {"messages": "talk"},
        "message_keys": {"role": "speaker", "content": "says"},
        "roles": {"user": "patient", "assistant": ["doctor", "nurse"]},
    }
    wanted = [("user", "疼"), ("assistant", "哪里"), ("user", "头"), ("assistant", "休息")]
    table = tmp_path / "b.csv"
    table.write_text('talk\n"' + json.dumps(turns).replace('"', '""') + '"\n', encoding="utf-8")
    for path in (json_lines(tmp_path / "a.jsonl", {"talk": turns}), str(table)):
        (values,) = rows_of(Source(path=path, **settings))
        assert [(one["role"], one["content"]) for one in as_messages(values)] == wanted


def test_rows_that_could_not_be_read_keep_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": 1}\nnonsense\n', encoding="utf-8")
    found = list(read_items(Source(path=str(path), columns={"prompt": "q"})))
    assert [item.reason if isinstance(item, Rejection) else item.values for item in found] == [
        {"prompt": 1},
        "bad_json",
    ]


def test_a_name_that_is_no_text_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="columns"):
        build(Source, {"path": "a", "columns": {"prompt": ["q"]}})


def test_what_holds_no_messages_stays_as_it_is(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    chat = [{"type": "human", "content": "q"}, {"type": "gpt", "content": "a"}]
    path = json_lines(tmp_path / "a.jsonl", {"messages": chat, "tools": tools, "output": '{"type": "json"}'})
    [row] = rows_of(Source(path=path, message_keys={"role": "type"}))
    assert row["tools"] == tools
    assert row["output"] == '{"type": "json"}'
    assert [message["role"] for message in row["messages"]] == ["human", "gpt"]
