"""Models as GGUF files: what another reader makes of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from onecard.compress import gguf_writer, reading_back
from onecard.compress.export import export
from onecard.compress.reading_back import NotTheSame, strings
from onecard.config import ExportConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.gguf_file import read_model, read_tokenizer
from onecard.model.load import load_model, load_tokenizer
from onecard.tokenizer.template import encode_chat


def exported(model: Path, output: Path, *formats: str) -> dict[str, Any]:
    return export(ExportConfig.model_validate({"model": model, "output": output, "formats": formats}))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "stretched"])
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each kind, with more rows than its tokenizer has entries and an uneven feed-forward width."""
    import transformers

    source: Path = request.getfixturevalue("tiny_tokenizer_directory")
    tokenizer = load_tokenizer(source)
    kind = "llama" if request.param == "stretched" else request.param
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 8,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "qwen2",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if request.param == "stretched":
        shape["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{names[kind]}Config")(**shape)
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp(str(request.param))
    model.save_pretrained(directory)
    for file in source.glob("*tokenizer*"):
        shutil.copy(file, directory)
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("onecard.json", "config.json"))
    return directory


def test_another_reader_finds_the_same_model(model_directory: Path, tmp_path: Path) -> None:
    result = exported(model_directory, tmp_path / "out", "f32", "q8_0")
    first, second = result["files"]
    assert first["largest_logit_difference"] <= 1e-3
    assert first["same_next_token"] == 1.0
    assert 0 < second["divergence"] < 0.1
    assert second["bytes"] < 0.35 * first["bytes"]
    model, tokenizer = load_model(model_directory), load_tokenizer(model_directory)
    path = tmp_path / "out" / first["file"]
    chat = encode_chat(tokenizer, [{"role": "user", "content": "你好 <|im_end|>"}], add_generation_prompt=True)
    ids = torch.tensor([chat.ids])
    # The reader knows nothing of stretched positions; export gives them to it.
    with torch.no_grad():
        assert "stretched" in str(path) or torch.allclose(
            read_model(path)(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-3
        )
    theirs = read_tokenizer(path)
    assert [theirs(text)["input_ids"] for text in strings()] == [tokenizer(text)["input_ids"] for text in strings()]
    reader = gguf.GGUFReader(str(path))
    rows = len(reader.fields["tokenizer.ggml.tokens"].data)
    assert rows == model.config.vocab_size == len(tokenizer) + 8
    types = [
        int(reader.fields["tokenizer.ggml.token_type"].parts[i][0])
        for i in reader.fields["tokenizer.ggml.token_type"].data
    ]
    assert types[-8:] == [int(gguf.TokenType.UNUSED)] * 8
    assert types[tokenizer.eos_token_id] == int(gguf.TokenType.CONTROL)


def test_the_template_says_the_same_without_its_marks(tiny_tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    plain = gguf_writer.plain_template(tokenizer.chat_template)
    assert "generation %" not in plain
    messages = [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    for prompt in (False, True):
        meant = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        made = tokenizer.apply_chat_template(
            messages, chat_template=plain, tokenize=False, add_generation_prompt=prompt
        )
        assert made == meant


def test_the_modelfile_stops_where_the_model_does(tiny_model_directory: Path, tmp_path: Path) -> None:
    exported(tiny_model_directory, tmp_path / "out", "f16")
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert lines[0] == f"FROM ./{tiny_model_directory.name}-f16.gguf"
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert "PARAMETER num_ctx 256" in lines


def test_frequencies_of_stretched_positions_by_hand() -> None:
    settings = {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "head_dim": 8,
    }
    found = gguf_writer._rope(settings)
    assert found is not None
    # Waves of 6.28, 62.8, 628 and 6283 positions: the first is 5.1 to a context (kept), the rest are less than one.
    assert found.tolist() == pytest.approx([1, 8, 8, 8])
    settings["rope_parameters"]["original_max_position_embeddings"] = 157  # 2.5 waves of the second to a context
    smooth = (157 / (2 * np.pi * 10) - 1) / 3
    assert gguf_writer._rope(settings)[1] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))  # type: ignore[index]


def test_what_would_be_read_otherwise_is_refused_before_anything_is_written(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    def spoiled(name: str, file: str, change: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model_directory, folder)
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))
        return folder

    def split(values: Any) -> None:
        values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\s+"

    cases = [
        (spoiled("split", "tokenizer.json", split), "knows no split"),
        (spoiled("kind", "config.json", lambda v: v.update(model_type="gemma2")), "gemma2 model cannot be written"),
        (
            spoiled("window", "config.json", lambda v: v.update(model_type="mistral", sliding_window=16)),
            "sliding window",
        ),
        (
            spoiled(
                "yarn",
                "config.json",
                lambda v: v.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
            ),
            "stretched by yarn",
        ),
    ]
    for folder, words in cases:
        with pytest.raises(ConfigError, match=words):
            gguf_writer.Writer(folder, load_tokenizer(folder))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_before(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError, match="free"):
        exported(tiny_model_directory, tmp_path / "out", "f16")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_reads_back_otherwise_is_not_kept(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strong = tmp_path / "strong"
    shutil.copytree(tiny_model_directory, strong)
    model = load_model(tiny_model_directory)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(strong)
    monkeypatch.setattr(gguf_writer, "side_by_side", lambda array, heads: array)
    with pytest.raises(NotTheSame, match="logits"):
        exported(strong, tmp_path / "out", "f32")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    original = gguf_writer.Writer._tokens
    tokenizer = load_tokenizer(tiny_model_directory)
    first, second = (tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "QZ")

    def wrong(self: gguf_writer.Writer) -> Any:
        tokens, types = original(self)
        tokens[first], tokens[second] = tokens[second], tokens[first]
        return tokens, types

    monkeypatch.setattr(reading_back, "strings", lambda: ["Q"])
    monkeypatch.setattr(gguf_writer.Writer, "_tokens", wrong)
    with pytest.raises(NotTheSame, match="splits"):
        exported(tiny_model_directory, tmp_path / "out", "f32")


def test_rows_that_no_block_divides_stay_in_16_bits(tiny_model_directory: Path) -> None:
    writer = gguf_writer.Writer(tiny_model_directory, load_tokenizer(tiny_model_directory))
    assert writer._format_of("blk.0.ffn_down", (64, 176), "q4_0") == "f16"
    assert writer._format_of("blk.0.ffn_up", (176, 64), "q4_0") == "q4_0"
    assert writer._format_of("token_embd", (384, 64), "q4_0") == "q8_0"
    assert writer._format_of("blk.0.attn_norm", (64,), "q4_0") == "f32"


def test_a_directory_for_transformers_and_vllm(model_directory: Path, tmp_path: Path) -> None:
    result = exported(model_directory, tmp_path / "out", "safetensors", "safetensors_f32")
    half, whole = result["files"]
    assert (whole["largest_logit_difference"], whole["same_next_token"]) == (0.0, 1.0)
    assert 0 < half["largest_logit_difference"] < 0.1
    assert half["bytes"] < 0.51 * whole["bytes"]
    assert half["chats_with_the_same_ids"] == 3
    model = load_model(model_directory)
    for row, kept in ((half, torch.bfloat16), (whole, torch.float32)):
        folder = tmp_path / "out" / row["file"]
        made = load_model(folder)
        for name, parameter in model.state_dict().items():
            assert torch.equal(made.state_dict()[name], parameter.to(kept).float()), name
        settings = json.loads((folder / "config.json").read_text())
        # Both generations of readers.
        assert settings["dtype"] == settings["torch_dtype"] == str(kept).removeprefix("torch.")
        assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]
        assert load_tokenizer(folder).chat_template == load_tokenizer(model_directory).chat_template
        assert (folder / "README.md").is_file()


def test_a_chat_that_is_written_otherwise_is_found(
    tiny_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = gguf_writer.plain_template
    monkeypatch.setattr(
        gguf_writer, "plain_template", lambda text: template(text).replace("<|im_end|>\\n", "<|im_end|>")
    )
    assert gguf_writer.plain_template(load_tokenizer(tiny_model_directory).chat_template) != template(
        load_tokenizer(tiny_model_directory).chat_template
    )
    with pytest.raises(NotTheSame, match="writes a chat otherwise"):
        exported(tiny_model_directory, tmp_path / "out", "f16")
    assert not (tmp_path / "out").exists()


def test_what_is_quantized_is_not_rounded_again(tiny_model_directory: Path, tmp_path: Path) -> None:
    made = tmp_path / "quantized"
    shutil.copytree(tiny_model_directory, made)
    settings = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "x"}}))
    with pytest.raises(ConfigError, match="quantized already"):
        exported(made, tmp_path / "out", "f16")
