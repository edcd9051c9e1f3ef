"""The verb align from preferences to a model directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import lines, weights

from onecard.config import AlignConfig
from onecard.data.tokens import TokenStore
from onecard.errors import DataError
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import build
from onecard.tokenizer.template import encode_chat
from onecard.train import align as verb
from onecard.train import session
from onecard.train.align import align
from onecard.train.loop import Loop
from onecard.train.preference import REFERENCE


def write_pairs(path: Path, *, count: int = 12) -> Path:
    rows = [{"prompt": f"Question {i}?", "chosen": f"Yes {i}.", "rejected": f"Never ask {i}!"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def aligned(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "rows.jsonl")],
        "output": str(folder / "run"),
        "max_length": 160,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "evaluate_every": 3,
        "save_every": 2,
        "held_out": 0.2,
        "learning_rate": 1e-3,
        "compile": False,
        "precision": "fp32",
    }
    return align(build(AlignConfig, settings | changes))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    write_pairs(tmp_path / "rows.jsonl")


def test_the_better_answer_becomes_likelier_than_the_worse(tmp_path: Path, tiny_model_directory: Path) -> None:
    result = aligned(tmp_path, tiny_model_directory)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["margin"] > rows[0]["margin"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["held_out_margin"] > 0
    assert rows[-1]["held_out_accuracy"] > 0.5
    assert result["method"] == "dpo"
    model = load_model(tmp_path / "run" / "model")
    assert any(
        not torch.equal(parameter, other)
        for parameter, other in zip(model.parameters(), load_model(tiny_model_directory).parameters())
    )


def test_the_reference_is_the_untrained_model_and_stays_it(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[TokenStore] = []
    original = verb._refer
    monkeypatch.setattr(
        verb, "_refer", lambda model, rows, *rest: (original(model, rows, *rest), stores.append(rows.store))
    )
    aligned(tmp_path, tiny_model_directory)
    store = stores[0]
    assert store.values is not None
    tokenizer, model = load_tokenizer(tiny_model_directory), load_model(tiny_model_directory).double()
    ids = store.tokens[: int(store.starts[1])].astype(np.int64).tolist()
    # The first row in training, its chosen answer: looked up by its question.
    question = next(i for i in range(12) if f"Question {i}?" in tokenizer.decode(ids))
    messages = [
        {"role": "user", "content": f"Question {question}?"},
        {"role": "assistant", "content": f"Yes {question}."},
    ]
    chat = encode_chat(tokenizer, messages)
    assert chat.ids == ids
    with torch.no_grad():
        each = model(input_ids=torch.tensor([chat.ids])).logits[0, :-1].log_softmax(-1)
    meant = sum(float(each[at, token]) for at, token in enumerate(chat.ids[1:]) if chat.assistant_mask[at + 1])
    assert store.values[0, REFERENCE] == pytest.approx(meant, abs=1e-4)
    assert not np.isnan(store.values).any()


def test_dropout_and_adapters_leave_the_beginning_where_it_is(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(str(tiny_model_directory))
    model.config.attention_dropout = 0.5
    model.save_pretrained(base)
    load_tokenizer(tiny_model_directory).save_pretrained(base)
    aligned(tmp_path, base, lora_rank=4, lora_dropout=0.5, max_steps=2)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["accuracy"] == pytest.approx(0.5, abs=0.5)
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()


def test_a_run_that_was_cut_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aligned(tmp_path, tiny_model_directory, output=str(tmp_path / "whole"))
    original = Loop.update

    def cut(self: Loop, number: int) -> Any:
        if self.step == 3:
            raise RuntimeError("power cut")
        return original(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "update", cut)
        with pytest.raises(RuntimeError, match="power cut"):
            aligned(tmp_path, tiny_model_directory)
    with monkeypatch.context() as patch:
        patch.setattr(verb, "_refer", lambda *_: pytest.fail("the reference is kept with the rows"))
        aligned(tmp_path, tiny_model_directory)
    assert weights(tmp_path / "whole") == weights(tmp_path / "run")


@pytest.mark.parametrize("method", ["ipo", "simpo", "orpo", "kto"])
def test_every_method_makes_its_loss_smaller(tmp_path: Path, tiny_model_directory: Path, method: str) -> None:
    aligned(tmp_path, tiny_model_directory, method=method, max_steps=8)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["held_out_loss"] < rows[2]["held_out_loss"]
    if method == "ipo":
        assert rows[0]["loss"] == pytest.approx(25, rel=1e-5)  # (0 - 1 / (2 x 0.1)) squared
    if method == "kto":
        assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6)


def test_answers_judged_one_by_one_want_kto(tmp_path: Path, tiny_model_directory: Path) -> None:
    judged = [{"prompt": f"Question {i}?", "completion": f"Answer {i}.", "label": i % 2 == 0} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    with pytest.raises(DataError, match="one_answer_alone") as caught:
        aligned(tmp_path, tiny_model_directory)
    assert "method = kto" in caught.value.remedy
    result = aligned(tmp_path, tiny_model_directory, method="kto", output=str(tmp_path / "kto"))
    assert result["rows"]["kept"] == 12


def test_rows_that_do_not_fit_are_set_aside_whole(tmp_path: Path, tiny_model_directory: Path) -> None:
    rows = [{"prompt": "Question?", "chosen": "Yes. " * 30, "rejected": "No."}]
    rows += [{"prompt": f"Question {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(8)]
    rows.append(rows[1])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = aligned(tmp_path, tiny_model_directory, max_steps=1, max_length=128, held_out=0.0)["rows"]
    assert found["dropped"] == {"longer_than_max_length": 1, "exact_duplicate": 1}
    assert (found["read"], found["kept"]) == (10, 8)
    aside = lines(tmp_path / "run" / "rejected-00000.jsonl")
    assert [(row["reason"], row["line"]) for row in aside] == [("longer_than_max_length", 1), ("exact_duplicate", 10)]
