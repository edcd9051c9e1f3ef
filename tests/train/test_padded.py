"""Fine-tuning models that cannot keep packed documents apart, or shall not: a row a document, by the same verb."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import lines

from families import STATEFUL, make_family, make_stateful
from onecard.config import FinetuneConfig
from onecard.errors import ConfigError
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import build
from onecard.train import session
from onecard.train.finetune import finetune


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no figures."""
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


def model_directory(folder: Path, kind: str, tokenizer_directory: Path) -> Path:
    """A tiny model of a kind, with the tokenizer of the tests."""
    size = {"vocab_size": len(load_tokenizer(tokenizer_directory))}
    model = make_stateful(kind, **size) if kind in STATEFUL else make_family(kind, **size)
    shutil.copytree(tokenizer_directory, folder / kind, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder / kind)
    return folder / kind


def tuned(folder: Path, model: Path, **changes: Any) -> list[dict[str, Any]]:
    """Four updates with evaluations and samples between them; the lines of metrics.jsonl."""
    # Answers of very different length.
    rows = [{"prompt": f"Question {i}?", "completion": "yes " * (1 + 3 * (i % 4)) + f"{i}"} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / "run"),
        "max_length": 64,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "evaluate_every": 2,
        "held_out": 0.2,
        "compile": False,
        "precision": "fp32",
        "overwrite": True,
    }
    finetune(build(FinetuneConfig, settings | changes))
    return lines(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("kind", ["mamba"])
def test_a_model_that_carries_state_is_tuned_padded_and_it_is_said(
    tmp_path: Path, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model = model_directory(tmp_path, kind, tiny_model_directory)
    found = tuned(tmp_path, model)
    assert "cannot keep documents in one row apart" in capsys.readouterr().err
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found[-1]["held_out_loss"] < found[1]["held_out_loss"]
    made: Any = load_model(tmp_path / "run")
    assert all(torch.isfinite(parameter).all() for parameter in made.parameters())
    with pytest.raises(ConfigError, match="cannot keep the documents of a packed row apart"):
        tuned(tmp_path, model, packing="true")


@pytest.mark.parametrize("kind", ["gemma2"])
def test_packing_changes_neither_evaluation_nor_what_an_update_of_all_rows_does(
    tmp_path: Path, tiny_model_directory: Path, kind: str
) -> None:
    """One update over every row, packed and padded: the same loss, norm and held-out loss."""
    model = model_directory(tmp_path, kind, tiny_model_directory)
    packed, padded = (
        tuned(tmp_path, model, packing=packing, gradient_accumulation_steps=16, max_steps=2, evaluate_every=1)
        for packing in ("true", "false")
    )
    for one, other in zip(packed, padded):
        for key in ("loss", "held_out_loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
        assert one["tokens"] == other["tokens"]
