from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onecard.errors import ArtifactError
from onecard.model.load import (
    check_tokenizer_fits,
    load_model,
    load_tokenizer,
    model_directory,
    silence_transformers,
    vocabulary_rows,
)


def test_a_run_directory_stands_for_its_model(tmp_path: Path, tiny_model_directory: Path) -> None:
    run = tmp_path / "数据 集" / "模型　一"
    shutil.copytree(tiny_model_directory, run / "model")
    assert model_directory(run) == run / "model"
    assert model_directory(run / "model") == run / "model"
    assert load_model(run).dtype == torch.float32
    assert not load_model(run).training
    assert len(load_tokenizer(run)) == len(load_tokenizer(tiny_model_directory))


def test_what_is_missing_is_named(tmp_path: Path, tiny_model_directory: Path) -> None:
    with pytest.raises(ArtifactError, match="There is no model at"):
        model_directory(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        model_directory(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ArtifactError, match="is not finished") as fault:
        model_directory(tmp_path)
    assert "resumes" in fault.value.remedy
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_directory, copy)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")  # a pickle is not looked at
    with pytest.raises(ArtifactError, match=r"no \*\.safetensors"):
        load_model(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match="holds no tokenizer"):
        load_tokenizer(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_said_in_one_line(tmp_path: Path, tiny_model_directory: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_directory, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:100])
    with pytest.raises(ArtifactError, match="cannot be read") as fault:
        load_model(copy)
    assert "\n" not in fault.value.what


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path, tiny_model_directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_directory, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lack 1 weights, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy)


def test_the_code_of_a_model_is_not_run(tmp_path: Path, tiny_model_directory: Path) -> None:
    import json

    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_directory, copy)
    settings = json.loads((copy / "config.json").read_text())
    settings |= {"model_type": "their_own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}
    (copy / "config.json").write_text(json.dumps(settings))
    (copy / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_model(copy)
    assert not (tmp_path / "ran").exists()


def test_only_the_console_speaks(tiny_model_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    silence_transformers()
    load_model(tiny_model_directory)
    said = capfd.readouterr()
    assert said.out + said.err == ""


def test_a_tokenizer_of_another_model_is_refused(tiny_model_directory: Path) -> None:
    tokenizer, model = load_tokenizer(tiny_model_directory), load_model(tiny_model_directory)
    check_tokenizer_fits(tokenizer, model, tiny_model_directory)
    assert vocabulary_rows(tokenizer) == len(tokenizer)
    tokenizer.add_tokens(["<|another|>"])
    with pytest.raises(ArtifactError, match="do not belong together"):
        check_tokenizer_fits(tokenizer, model, tiny_model_directory)


def test_torchao_is_not_imported_with_a_model_and_is_there_for_who_wants_it() -> None:
    """Transformers would import it for a kind of weights that is not read here: a second or two of every start."""
    code = """
import sys
from onecard.model.load import silence_transformers
silence_transformers()
from transformers import LlamaForCausalLM
assert "torchao" not in sys.modules
import importlib.util
assert importlib.util.find_spec("torchao") is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
