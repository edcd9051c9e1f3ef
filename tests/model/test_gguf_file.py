"""GGUF files as models: the same weights, the same tokens, unpacked once, and every fault named."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from gguf_files import write_gguf
from onecard import artifact
from onecard.errors import ArtifactError, MissingExtra
from onecard.model import gguf_file
from onecard.model.load import load_model, load_tokenizer, model_directory, tokenizer_file

TEXTS = [
    "The quick brown fox said so,  at length.\n",
    "话说天下大势，分久必合。",
    "1234567890 👍👨‍👩‍👧\t<|im_start|>user\n\n  a<|im_end|>",
]
CHAT = [{"role": "user", "content": "你好?"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onecard" / "gguf"


@pytest.fixture
def file(tmp_path: Path, tiny_model_directory: Path) -> Path:
    return write_gguf(tiny_model_directory, tmp_path / "tiny.F32.gguf")


def test_it_is_the_model_that_it_was_made_of(file: Path, tiny_model_directory: Path) -> None:
    model, before = load_model(file), load_model(tiny_model_directory)
    found = model.state_dict()
    assert found.keys() == before.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.state_dict().items())
    assert model.dtype == torch.float32
    ids = torch.arange(3, 23)[None]
    assert torch.equal(model(ids).logits, before(ids).logits)
    tokenizer, original = load_tokenizer(file), load_tokenizer(tiny_model_directory)
    for text in TEXTS:
        assert tokenizer(text).input_ids == original(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rendered == original.apply_chat_template(CHAT, tokenize=False) and "你好?" in rendered
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (original.eos_token_id, original.bos_token_id)


def test_quantized_weights_become_dense_and_are_near(
    tmp_path: Path, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(write_gguf(tiny_model_directory, tmp_path / "tiny.Q8_0.gguf", quantized=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    differs = 0
    for name, before in load_model(tiny_model_directory).state_dict().items():
        found = model.state_dict()[name]
        if before.ndim == 2:
            # Blocks of 32 are rounded to steps of which the largest has 127, kept in fp16: 1/2 + 127 / 2^11 of a step.
            largest = before.reshape(before.shape[0], -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32)
            assert bool(((found - before).abs() <= 0.57 * largest.reshape(before.shape) / 127).all())
        differs += not torch.equal(found, before)
    assert differs > 10
    said = capsys.readouterr().err
    assert "unpacking tiny.Q8_0.gguf (0M parameters, Q8_0, F32) once" in said and "Converting" not in said


def test_it_is_unpacked_once_whatever_it_is_called(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = model_directory(file)
    assert place.is_relative_to(cache) and place.name == "tiny.F32"
    assert artifact.verify(place).kind == "model"
    assert artifact.verify(place).parents[0]["content_hash"] == artifact.hash_file(file)
    assert tokenizer_file(file) == place / "tokenizer.json"
    assert len({path.stat().st_mode for path in place.iterdir()}) == 1

    def never(*_: Any) -> Path:
        raise AssertionError("unpacked again")

    monkeypatch.setattr(gguf_file, "_unpack", never)
    # Nor is the package needed any more.
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert model_directory(file) == place
    assert model_directory(file.rename(tmp_path / "other.GGUF")) == place


def test_another_file_of_the_same_name_is_another_model(file: Path, tiny_model_directory: Path) -> None:
    first = model_directory(file)
    write_gguf(tiny_model_directory, file, quantized=True)
    assert model_directory(file) != first


def test_what_is_broken_is_named_and_leaves_nothing(
    file: Path, cache: Path, tmp_path: Path, tiny_model_directory: Path
) -> None:
    for name, data, what in (
        ("text.gguf", b"hello", "is no GGUF file"),
        ("empty.gguf", b"", "is no GGUF file"),
        ("cut.gguf", file.read_bytes()[:-5000], "is damaged"),
        ("short.gguf", file.read_bytes()[:200], "is damaged"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ArtifactError, match=what) as fault:
            model_directory(tmp_path / name)
        assert name in fault.value.what and fault.value.remedy
    with pytest.raises(ArtifactError, match="There is no file"):
        load_model(tmp_path / "none.gguf")
    with pytest.raises(ArtifactError, match="transformers cannot unpack .*: .*martian") as fault:
        model_directory(write_gguf(tiny_model_directory, tmp_path / "mars.gguf", architecture="martian"))
    assert "safetensors" in fault.value.remedy
    writer = gguf.GGUFWriter(str(tmp_path / "vocabulary.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="holds no weights"):
        model_directory(tmp_path / "vocabulary.gguf")
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_without_the_package_it_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtra, match=r"needs the package gguf.*onecard\[gguf\]"):
        model_directory(file)


def test_a_directory_of_such_a_name_is_a_directory(tmp_path: Path, tiny_model_directory: Path) -> None:
    shutil.copytree(tiny_model_directory, tmp_path / "model.gguf")
    assert model_directory(tmp_path / "model.gguf") == tmp_path / "model.gguf"
