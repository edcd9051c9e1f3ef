"""Healing: what was pruned learns from the original, zeros stay, and an interrupted healing goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onecard.compress import healing, prune
from onecard.config import PruneConfig, ResumeConfig
from onecard.errors import ArtifactError, Interrupted
from onecard.train.reach import resume


def healed(model: Path, corpus: Path, output: Path, **settings: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"model": model, "corpus": corpus, "output": output, "question_count": 2}
    made |= {"max_new_tokens": 4, "calibration_rows": 4, "calibration_tokens": 32, "heal_tokens": 128}
    made |= {"heal_updates": 6, "heal_learning_rate": 1e-2}
    return prune.prune(PruneConfig.model_validate({**made, **settings}))


def test_a_smaller_model_learns_what_the_original_says(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    cut = {"intermediate_size": 32}
    before = healed(tiny_model_directory, tiny_corpus, tmp_path / "cut", **cut, heal_updates=0)
    found = healed(tiny_model_directory, tiny_corpus, tmp_path / "p", **cut)
    assert (found["healing"]["updates"], found["healing"]["learning_rate"]) == (6, 1e-2)
    assert found["shape"] == before["shape"]
    stored, unhealed = (load_file(tmp_path / name / "model.safetensors") for name in ("p", "cut"))
    assert {name: (x.shape, x.dtype) for name, x in stored.items()} == {
        name: (x.shape, x.dtype) for name, x in unhealed.items()
    }
    assert not torch.equal(stored["model.layers.0.mlp.up_proj.weight"], unhealed["model.layers.0.mlp.up_proj.weight"])
    assert (tmp_path / "p" / "pruning.json").read_text() == (tmp_path / "cut" / "pruning.json").read_text()
    # Nothing is left of the work, but its page.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "p"]
    assert "Loss" in (tmp_path / "p" / "healing.html").read_text()


def test_the_first_update_follows_the_original_alone(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    """A model of which next to nothing was cut has nothing to learn from the original, whatever the text says."""
    found = healed(tiny_model_directory, tiny_corpus, tmp_path / "p", intermediate_size=127, heal_learning_rate=1e-9)
    assert 0 <= found["healing"]["loss"] < 1e-3
    assert found["original"]["bits_per_byte"]["all"] > 2


@pytest.mark.parametrize("sparsity", [0.5, "2:4"])
def test_zeros_stay_zeros(tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path, sparsity: float | str) -> None:
    healed(tiny_model_directory, tiny_corpus, tmp_path / "cut", sparsity=sparsity, heal_updates=0)
    found = healed(tiny_model_directory, tiny_corpus, tmp_path / "p", sparsity=sparsity)
    stored, unhealed = (load_file(tmp_path / name / "model.safetensors") for name in ("p", "cut"))
    for name, tensor in stored.items():
        if "proj" in name:
            kept = unhealed[name] != 0
            assert (tensor[~kept] == 0).all()
            assert (tensor[kept] != unhealed[name][kept]).float().mean() > 0.9
    assert found["zeros"] == sum(int((x == 0).sum()) for name, x in stored.items() if "proj" in name)


def test_an_interrupted_healing_goes_on(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"drop_layers": 1, "heal_updates": 4}
    whole = healed(tiny_model_directory, tiny_corpus, tmp_path / "whole", **settings)

    def stopped(*_: Any) -> Any:
        raise Interrupted("Interrupted.", "Run it again.")

    with monkeypatch.context() as patch:  # the run has a plan by then, and no update yet
        patch.setattr("onecard.train.loop.Loop.run", stopped)
        with pytest.raises(Interrupted):
            healed(tiny_model_directory, tiny_corpus, tmp_path / "p", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p-healing", "whole"]
    with pytest.raises(ArtifactError, match="healing of a pruning"):
        resume(ResumeConfig(run=tmp_path / "p-healing" / "run"))
    with pytest.raises(ArtifactError, match="begun with other settings"):
        healed(tiny_model_directory, tiny_corpus, tmp_path / "p", intermediate_size=64, heal_updates=4)
    with monkeypatch.context() as patch:  # what was pruned is found and not made again
        patch.setattr(prune, "write_pruned", None)
        found = healed(tiny_model_directory, tiny_corpus, tmp_path / "p", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "whole"]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("p", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert found["dropped_layers"] == whole["dropped_layers"]


def test_a_healing_begun_with_other_settings_is_replaced_when_told(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> Any:
        raise Interrupted("Interrupted.", "Run it again.")

    with monkeypatch.context() as patch:
        patch.setattr(healing, "train", stopped)
        with pytest.raises(Interrupted):
            healed(tiny_model_directory, tiny_corpus, tmp_path / "p", intermediate_size=64)
    found = healed(tiny_model_directory, tiny_corpus, tmp_path / "p", drop_layers=1, overwrite=True)
    assert found["shape"]["channels"] == 128
    (tmp_path / "q-healing").mkdir()
    (tmp_path / "q-healing" / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="not made by a healing"):
        healed(tiny_model_directory, tiny_corpus, tmp_path / "q", drop_layers=1, overwrite=True)
    assert (tmp_path / "q-healing" / "mine.txt").read_text() == "mine"
