"""Fine-tuning a model that comes as a GGUF file: like the model itself, and exact when it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import cut, during

from gguf_files import write_gguf
from onecard import artifact
from onecard.config import FinetuneConfig
from onecard.errors import ArtifactError
from onecard.settings import build
from onecard.train.finetune import finetune

pytestmark = pytest.mark.usefixtures("quick")


def tuned(folder: Path, model: Path, output: str, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes {i}."} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / output),
        "max_length": 64,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "evaluate_every": 3,
        "save_every": 2,
        "compile": False,
        "precision": "fp32",
    }
    return finetune(build(FinetuneConfig, settings | changes))


def test_it_trains_as_the_model_it_was_made_of_and_goes_on_exactly(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tiny_model_directory, tmp_path / "tiny.gguf")
    tuned(tmp_path, tiny_model_directory, "plain")
    tuned(tmp_path, file, "whole")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        during(patch, 4, cut)
        tuned(tmp_path, file, "broken")
    shutil.rmtree(tmp_path / "cache")  # it is unpacked again, into the same weights
    tuned(tmp_path, file, "broken")
    made = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "whole", "broken")]
    for other in made[1:]:
        assert made[0].keys() == other.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in made[0].items())
    parent = artifact.read_manifest(tmp_path / "broken").parents[0]
    assert parent == {"path": str(file), "content_hash": artifact.hash_file(file)}


def test_a_broken_file_is_named_before_anything_is_made(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tiny_model_directory, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"tiny\.gguf is damaged"):
        tuned(tmp_path, file, "run")
    assert not (tmp_path / "run").exists()
