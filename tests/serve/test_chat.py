"""`onecard chat` on a pipe: lines are questions, commands act, the history fits."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.config import ChatConfig
from onecard.model.load import load_tokenizer
from onecard.serve import chat as chat_module
from onecard.serve.chat import chat
from onecard.serve.requests import FinishEvent, TokenEvent
from onecard.tokenizer.template import encode_prompt


def talk(monkeypatch: pytest.MonkeyPatch, model: Path, text: str | bytes, **settings: Any) -> list[dict[str, Any]]:
    raw = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
    settings = {"max_new_tokens": 6, "seed": 1, **settings}
    answers: list[dict[str, Any]] = chat(ChatConfig(model=model, **settings))["answers"]
    return answers


def test_each_line_is_a_question_and_only_answers_are_on_stdout(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = talk(monkeypatch, tiny_model_directory, "你好\n\nfox \\\njumps\n/exit\nnever asked\n")
    assert [answer["question"] for answer in answers] == ["你好", "fox \njumps"]
    output = capsys.readouterr()
    assert output.out == "".join(answer["answer"] + "\n" for answer in answers)
    assert "tokens/s" in output.err
    assert ">" not in output.err


def test_the_same_seed_answers_the_same_and_retry_asks_again(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path
) -> None:
    first = talk(monkeypatch, tiny_model_directory, "fox\n/retry\n/reset\nfox\n", temperature=1.5)
    again = talk(monkeypatch, tiny_model_directory, "fox\n/retry\n/reset\nfox\n", temperature=1.5)
    assert [answer["answer"] for answer in first] == [answer["answer"] for answer in again]
    assert [answer["question"] for answer in first] == ["fox", "fox", "fox"]
    assert first[0]["answer"] != first[1]["answer"]


def test_greedy_after_reset_is_as_at_the_beginning_but_not_under_a_system_message(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path
) -> None:
    seen: list[list[int]] = []
    original = chat_module._Chat._answer

    def spy(self: Any, ids: list[int]) -> Any:
        seen.append(ids)
        return original(self, ids)

    monkeypatch.setattr(chat_module._Chat, "_answer", spy)
    talk(monkeypatch, tiny_model_directory, "fox\nfox\n/reset\nfox\n/system be kind\nfox\n", temperature=0)
    beginning, second, after_reset, under_system = seen
    assert beginning == after_reset
    assert second[: len(beginning)] == beginning
    assert len(under_system) > len(beginning)


def test_history_that_outgrows_the_context_loses_its_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = talk(monkeypatch, tiny_model_directory, "the quick brown fox jumps over the lazy dog\n" * 6)
    assert len(answers) == 6
    assert "forgotten" in capsys.readouterr().err
    answers = talk(monkeypatch, tiny_model_directory, "x" * 600 + "\nfox\n")
    assert [answer["question"] for answer in answers] == ["fox"]
    assert "context holds 256" in capsys.readouterr().err


def test_bytes_that_are_not_utf8_do_not_end_the_session(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path
) -> None:
    answers = talk(monkeypatch, tiny_model_directory, b"\xff\xfe\nfox\n")
    assert [answer["question"] for answer in answers] == ["\ufffd\ufffd", "fox"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path
) -> None:
    original = chat_module._Chat._show
    interrupted: list[bool] = []

    def show(self: Any, handle: Any, pieces: list[str]) -> FinishEvent:
        if not interrupted:
            interrupted.append(True)
            event = next(iter(handle))
            assert isinstance(event, TokenEvent)
            pieces.append(event.text)
            raise KeyboardInterrupt
        return original(self, handle, pieces)

    monkeypatch.setattr(chat_module._Chat, "_show", show)
    answers = talk(monkeypatch, tiny_model_directory, "fox\ndog\n", max_new_tokens=200)
    assert answers[0]["finish_reason"] == "abort"
    assert answers[0]["completion_tokens"] < 200
    assert answers[1]["question"] == "dog"


def test_a_model_that_saw_no_chat_continues_what_is_written(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "pretrain"
    shutil.copytree(tiny_model_directory, run / "model")
    artifact.write_manifest(run, "run", settings={"plan": {"verb": "pretrain"}})
    seen: list[list[int]] = []
    original = chat_module._Chat._answer

    def spy(self: Any, ids: list[int]) -> Any:
        seen.append(ids)
        return original(self, ids)

    monkeypatch.setattr(chat_module._Chat, "_answer", spy)
    talk(monkeypatch, run, "fox\n")
    assert seen == [encode_prompt(load_tokenizer(run), "fox")]
    assert "continues what you write" in capsys.readouterr().err
