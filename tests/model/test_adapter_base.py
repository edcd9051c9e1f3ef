"""A PEFT adapter as a model: added to the base that it names, exactly, or refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onecard.errors import OnecardError
from onecard.model import lora
from onecard.model.adapter_base import SETTINGS
from onecard.model.load import load_model, load_tokenizer, model_directory, weights_hash

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def adapter(tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of rank 4 and alpha 8, with random numbers on both sides, beside a copy of the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    model: Any = load_model(base)
    lora.add(model, 4, 8.0, target_modules=TARGETS)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.is_adapter(name):
                parameter.normal_(0, 0.3)
    lora.save(model, tmp_path / "adapter", base, facts={"base_weights": weights_hash(base)})
    return tmp_path / "adapter"


def test_the_weights_are_those_of_the_sum_by_hand(adapter: Path, tmp_path: Path) -> None:
    made, base = load_model(adapter), load_model(tmp_path / "base")
    stored = load_file(adapter / "adapter_model.safetensors")
    for name, weight in made.state_dict().items():
        before = base.state_dict()[name]
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in stored:
            # alpha / r = 2.
            before = before + 2.0 * stored[f"{stem}.lora_B.weight"] @ stored[f"{stem}.lora_A.weight"]
            assert name.split(".")[-2] in TARGETS
        torch.testing.assert_close(weight, before, rtol=1e-5, atol=1e-5, msg=name)
    ids = load_tokenizer(adapter)("你好 fox")["input_ids"]
    assert ids == load_tokenizer(tmp_path / "base")("你好 fox")["input_ids"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of PEFT, to transformers
def test_logits_are_those_of_peft(adapter: Path, tmp_path: Path) -> None:
    with lora.quiet():
        from peft import PeftModel

    theirs = PeftModel.from_pretrained(load_model(tmp_path / "base"), str(adapter)).eval()
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(load_model(adapter)(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_it_is_made_once_and_again_for_other_content(adapter: Path, tmp_path: Path) -> None:
    first = model_directory(adapter)
    marked = first / "mark"
    marked.touch()
    assert model_directory(adapter) == first and marked.exists()
    moved = tmp_path / "elsewhere" / "adapter"
    shutil.copytree(adapter, moved)
    assert model_directory(moved) == first
    weights = load_file(moved / "adapter_model.safetensors")
    save_file({key: 2 * tensor for key, tensor in weights.items()}, moved / "adapter_model.safetensors")
    assert model_directory(moved) != first


def changed(adapter: Path, **settings: Any) -> None:
    written = json.loads((adapter / SETTINGS).read_text())
    (adapter / SETTINGS).write_text(json.dumps(written | settings))


def test_a_base_that_is_not_there_is_named(adapter: Path) -> None:
    changed(adapter, base_model_name_or_path="someone/some-model-7B")
    with pytest.raises(OnecardError, match="someone/some-model-7B") as caught:
        model_directory(adapter)
    assert "base_model_name_or_path" in caught.value.remedy


def test_a_base_beside_the_adapter_is_found(adapter: Path) -> None:
    changed(adapter, base_model_name_or_path="../base")
    assert model_directory(adapter).is_dir()


def test_an_adapter_of_other_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    save_file({key: tensor + 1e-3 for key, tensor in weights.items()}, path, metadata={"format": "pt"})
    with pytest.raises(OnecardError, match="other weights"):
        model_directory(adapter)


@pytest.mark.parametrize("fault", ["renamed", "half", "lacking"])
def test_an_adapter_that_does_not_find_its_layers_is_refused(adapter: Path, fault: str) -> None:
    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    if fault == "renamed":
        weights = {key.replace("q_proj", "query"): tensor for key, tensor in weights.items()}
    elif fault == "half":
        weights = {key: tensor for key, tensor in weights.items() if ".layers.0." not in key}
    else:
        changed(adapter, target_modules=["q_proj", "v_proj", "down_proj", "no_such_proj"])
        weights = {key.replace("down_proj", "no_such_proj"): tensor for key, tensor in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(OnecardError, match="same layers|does not fit"):
        model_directory(adapter)


def test_what_lies_beside_is_that_of_the_adapter_then_of_the_base(adapter: Path, tmp_path: Path) -> None:
    first = model_directory(adapter)
    assert (first / "chat_template.jinja").is_file()
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.123}))
    second = model_directory(adapter)
    assert json.loads((second / "generation_config.json").read_text())["temperature"] == 0.123
    # Older tools keep the template inside tokenizer_config.json.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tmp_path / "base" / name, adapter / name)
    settings = json.loads((adapter / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ 'of the adapter' }}"}))
    assert load_tokenizer(adapter).chat_template == "{{ 'of the adapter' }}"


def test_a_base_of_few_bits_is_refused(adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "base" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(OnecardError, match="few bits"):
        model_directory(adapter)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_a_tied_embedding_is_refused(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with lora.quiet():
        from peft import LoraConfig, get_peft_model

        model = load_model(tiny_model_directory)
        assert model.config.tie_word_embeddings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", target]))
            adapted.peft_config["default"].base_model_name_or_path = str(tiny_model_directory)
            adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(OnecardError, match="embedding"):
        model_directory(tmp_path / "adapter")
