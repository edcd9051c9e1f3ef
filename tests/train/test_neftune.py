"""Noise on the embeddings: how much, where, when."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Stop, run, weights

from onecard.config import FinetuneConfig
from onecard.model import attention
from onecard.model.load import load_model
from onecard.settings import build
from onecard.train import session
from onecard.train.finetune import finetune
from onecard.train.loop import has_dropout
from onecard.train.neftune import add_noise

ALPHA = 5.0
WIDTH = 64


def embedded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """What enters the first layer."""
    seen: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        model.get_decoder()(**inputs, use_cache=False)
    finally:
        handle.remove()
    return seen[0].detach()


def test_each_document_has_noise_by_its_own_length(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    assert attention.switch(model)
    inputs = {
        "input_ids": torch.arange(3, 115)[None],
        "position_ids": torch.cat([torch.arange(12), torch.arange(100)])[None],
        "cu_seq_lens_q": torch.tensor([0, 12, 112, 112, 112], dtype=torch.int32),
        "max_length_q": 112,
    }
    plain = embedded(model, inputs)
    add_noise(model, ALPHA)
    assert has_dropout(model), "so that evaluations leave training mode"
    assert torch.equal(embedded(model, inputs), plain), "evaluation mode adds none"
    model.train()
    torch.manual_seed(0)
    noise = embedded(model, inputs) - plain
    torch.manual_seed(0)
    assert torch.equal(embedded(model, inputs) - plain, noise)
    for part, length in ((noise[0, :12], 12), (noise[0, 12:], 100)):
        most = ALPHA / (length * WIDTH) ** 0.5
        # Uniform: 768 and 6400 draws come close to the edges and spread by 1 / sqrt(3) of them.
        assert 0.98 * most < part.abs().max() <= most * 1.001
        assert part.std() == pytest.approx(most / 3**0.5, rel=0.05)


def test_padding_has_none(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    inputs = {
        "input_ids": torch.arange(3, 19).view(2, 8),
        "attention_mask": torch.tensor([[1] * 8, [1] * 3 + [0] * 5]),
    }
    plain = embedded(model, inputs)
    add_noise(model, ALPHA)
    model.train()
    noise = embedded(model, inputs) - plain
    assert torch.equal(noise[1, 3:], torch.zeros(5, WIDTH))
    assert 0.9 * ALPHA / (3 * WIDTH) ** 0.5 < noise[1, :3].abs().max() <= 1.001 * ALPHA / (3 * WIDTH) ** 0.5
    assert 0.9 * ALPHA / (8 * WIDTH) ** 0.5 < noise[0].abs().max() <= 1.001 * ALPHA / (8 * WIDTH) ** 0.5


def settings(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes {i}."} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / "run"),
        "max_length": 64,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "evaluate_every": 2,
        "save_every": 2,
        "held_out": 0.2,
        "compile": False,
        "precision": "fp32",
        "lora_rank": 4,
        "neftune_alpha": 5.0,
        "lora_plus_ratio": 4.0,
        "lora_start": "pissa_niter_16",
    }
    return made | changes


def test_it_replays_under_checkpointing_and_over_a_stop(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    changes = settings(tmp_path, tiny_model_directory)
    for name, more in (
        ("whole", {}),
        ("plain", {"neftune_alpha": 0.0}),
        ("again", {"activation_checkpointing": "full"}),
    ):
        finetune(build(FinetuneConfig, changes | {"output": str(tmp_path / name), **more}))
    whole, plain, again = (weights(tmp_path / name) for name in ("whole", "plain", "again"))
    assert whole == again, "what backward computes anew has the same noise"
    assert whole != plain
    assert run("finetune", changes, Stop("update", 3, signal.SIGTERM))[0] == 130
    assert run("finetune", changes)[0] == 0
    assert weights(tmp_path / "run") == whole
