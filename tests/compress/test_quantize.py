"""Quantized model directories: what others read, what onecard reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onecard import artifact
from onecard.compress.calibration import Moments, sample_rows, watching
from onecard.compress.gptq import output_error
from onecard.compress.quantize import quantize, trained_for
from onecard.config import FinetuneConfig, QuantizeConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.integer_weights import Scheme, rounded, scales
from onecard.model.load import load_model, load_tokenizer
from onecard.model.lora import linear_layers
from onecard.model.quantization_aware import make_aware
from onecard.train.finetune import finetune

IDS = torch.arange(40)[None]


def quantized(model: Path, output: Path, **settings: Any) -> dict[str, Any]:
    made = {"model": model, "output": output, "question_count": 3, "max_new_tokens": 4, **settings}
    return quantize(QuantizeConfig.model_validate(made))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def theirs(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(("form", "scheme"), [("int8", Scheme(8)), ("int4", Scheme(4, 64))])
def test_transformers_reads_what_rounding_to_nearest_means(
    tiny_model_directory: Path, tmp_path: Path, form: str, scheme: Scheme
) -> None:
    found = quantized(tiny_model_directory, tmp_path / "q", format=form, kept_precision="fp32")
    by_hand: Any = load_model(tiny_model_directory)
    with torch.no_grad():
        for name in linear_layers(by_hand):
            layer = by_hand.get_submodule(name)
            layer.weight.copy_(rounded(layer.weight, scheme))
    ours = load_model(tmp_path / "q")
    assert torch.equal(logits(ours), logits(by_hand))
    assert torch.allclose(logits(theirs(tmp_path / "q")), logits(by_hand), atol=1e-6)
    assert (found["layers"], found["method"], found["group_size"]) == (14, "nearest", scheme.group)
    # 4 heads of 16 with 2 of keys and values: 64 x (64 + 32 + 32 + 64), and 3 x 64 x 128, twice.
    assert found["quantized_weights"] == 2 * (64 * 192 + 3 * 64 * 128)
    assert found["read_back_deviation"] < 1e-5
    assert artifact.verify(tmp_path / "q").kind == "model"
    settings = json.loads((tmp_path / "q" / "config.json").read_text())
    assert settings["quantization_config"]["format"] == "pack-quantized"
    assert settings["quantization_config"]["ignore"] == ["lm_head"]
    assert load_tokenizer(tmp_path / "q").chat_template == load_tokenizer(tiny_model_directory).chat_template


def test_bits_on_disk(tiny_model_directory: Path, tmp_path: Path) -> None:
    quantized(tiny_model_directory, tmp_path / "q", format="int4", group_size=32)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    down = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if "layers.0.mlp.down_proj" in name}
    assert down["weight_packed"].shape == (64, 128 // 8)
    assert down["weight_packed"].dtype == torch.int32
    assert (down["weight_scale"].shape, down["weight_scale"].dtype) == ((64, 4), torch.bfloat16)
    assert down["weight_shape"].tolist() == [64, 128]
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert "lm_head.weight" not in stored


def test_calibrated_codes_are_read_back_and_move_products_less(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    for method in ("nearest", "gptq"):
        found = quantized(
            tiny_model_directory,
            tmp_path / method,
            format="int4",
            corpus=tiny_corpus,
            method=method,
            kept_precision="fp32",
            calibration_rows=8,
            calibration_tokens=64,
        )
        assert found["method"] == method
        assert found["read_back_deviation"] < 1e-5
        assert set(found["made"]["bits_per_byte"]) == {"en", "zh", "all"}
    original: Any = load_model(tiny_model_directory)
    rows = sample_rows(tiny_corpus, load_tokenizer(tiny_model_directory), 8, 64)
    # The last layer's inputs too, which earlier layers' rounding has moved: the order of work is right.
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        layer = original.get_submodule(name)
        with watching({name: layer}, Moments) as moments, torch.no_grad():
            for row in rows:
                original(input_ids=row)
        off = {}
        for method in ("nearest", "gptq"):
            made: Any = load_model(tmp_path / method).get_submodule(name)  # type: ignore[no-redef]
            off[method] = output_error(layer.weight.detach(), made.weight.detach(), moments[name].sum)
        assert off["gptq"] < 0.8 * off["nearest"], name


def test_auto_calibrates_four_bits_where_there_is_text(
    tiny_model_directory: Path, tiny_corpus: Path, tmp_path: Path
) -> None:
    found = quantized(tiny_model_directory, tmp_path / "q", format="int4", corpus=tiny_corpus, calibration_tokens=32)
    assert found["method"] == "gptq"


def test_a_tied_head_is_stored_beside_the_embedding(tiny_model_directory: Path, tmp_path: Path) -> None:
    found = quantized(tiny_model_directory, tmp_path / "q", head=True)
    assert (found["untied_head"], found["layers"]) == (True, 15)
    original, made = load_model(tiny_model_directory), load_model(tmp_path / "q")
    head: Any = made.get_output_embeddings()
    embedding: Any = made.get_input_embeddings()
    assert torch.equal(head.weight, rounded(original.get_output_embeddings().weight, Scheme(8)))  # type: ignore[union-attr]
    meant: Any = original.get_input_embeddings()
    assert torch.equal(embedding.weight, meant.weight.to(torch.bfloat16).float())
    assert torch.allclose(logits(theirs(tmp_path / "q")), logits(made), atol=1e-5)


def test_float8(tiny_model_directory: Path, tmp_path: Path) -> None:
    found = quantized(tiny_model_directory, tmp_path / "q", format="float8")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    assert stored[f"{name}.weight"].dtype == torch.float8_e4m3fn
    original: Any = load_model(tiny_model_directory).get_submodule(name)
    made: Any = load_model(tmp_path / "q").get_submodule(name)
    # Three bits after the first: at most a sixteenth of itself, or half the smallest step of its row.
    allowed = original.weight.abs() / 16 + stored[f"{name}.weight_scale"].float() * 2**-10
    assert ((made.weight - original.weight).abs() <= allowed * 1.001).all()
    assert found["read_back_deviation"] < 1e-5


def test_nf4(tiny_model_directory: Path, tmp_path: Path) -> None:
    found = quantized(tiny_model_directory, tmp_path / "q", format="nf4")
    assert 0.05 < found["read_back_deviation"] < 0.15
    assert found["layers"] == 14
    assert found["made"]["parameters"] == found["original"]["parameters"]
    assert found["made"]["weight_bytes"] < 0.5 * found["original"]["weight_bytes"]
    assert torch.isfinite(logits(load_model(tmp_path / "q"))).all()


def test_corner_rows_in_half_precision(tiny_model_directory: Path, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(tiny_model_directory, source)
    stored = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    name = "model.layers.0.mlp.up_proj"
    weight = stored[f"{name}.weight"]
    weight[0], weight[1], weight[2] = 0, 6e-8, 1e-6
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    for form, scheme in (("int8", Scheme(8)), ("int4", Scheme(4, 64))):
        quantized(source, tmp_path / form, format=form)
        made: Any = load_model(tmp_path / form)
        found = made.get_submodule(name).weight.detach()
        steps = scales(weight, scheme)
        wide = steps.repeat_interleave(scheme.group or 64, dim=1)
        assert torch.isfinite(logits(made)).all()
        assert (found[0] == 0).all()
        assert ((found - weight.float()).abs() <= wide / 2 * (1 + 1e-6)).all()
        assert (found[2] > 0).all()


def test_odd_widths_are_refused_before_anything_is_written(tiny_tokenizer_directory: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=40, intermediate_size=72, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError) as fault:
        quantized(tmp_path / "model", tmp_path / "q", format="int4")
    assert "model.layers.0.self_attn.q_proj has 40 inputs, which groups of 32 do not divide" in fault.value.what
    assert not (tmp_path / "q").exists()
    # A scale for each row needs no group: words are filled up.
    assert quantized(tmp_path / "model", tmp_path / "q", format="int8")["read_back_deviation"] < 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "gptq", "format": "int4"}, "needs text"),
        ({"head": True, "format": "nf4"}, "leaves the head"),
        ({"model": "quantized"}, "quantized already"),
    ],
)
def test_what_does_not_go_together(
    tiny_model_directory: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    if settings.pop("model", ""):
        quantized(tiny_model_directory, tmp_path / "first")
        settings["model"] = tmp_path / "first"
    with pytest.raises(ConfigError, match=said):
        quantized(**{"model": tiny_model_directory, "output": tmp_path / "q", **settings})
    assert not (tmp_path / "q").exists()


def test_weights_that_are_not_finite_are_named(tiny_model_directory: Path, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(tiny_model_directory, source)
    stored = load_file(source / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.weight"][3, 4] = float("inf")
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj has weights that are not finite"):
        quantized(source, tmp_path / "q")


def test_another_layout_is_refused(tiny_model_directory: Path, tmp_path: Path) -> None:
    quantized(tiny_model_directory, tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 6
    path.write_text(json.dumps(settings))
    with pytest.raises(ArtifactError, match="not read here"):
        load_model(tmp_path / "q")


def test_what_was_trained_for_few_bits_answers_as_trained(tiny_model_directory: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) + "\n" for i in range(9))
    )
    run: dict[str, Any] = {"model": tiny_model_directory, "sources": [str(rows)], "output": tmp_path / "run"}
    run |= {"max_steps": 2, "max_length": 32, "batch_size": 4, "compile": False, "held_out": 0.0}
    finetune(FinetuneConfig.model_validate({**run, "quantization_aware": "int4"}))
    assert trained_for(tmp_path / "run") == trained_for(tmp_path / "run" / "model") == "int4"
    found = quantized(tmp_path / "run", tmp_path / "q", format="int4", kept_precision="fp32")
    assert found["method"] == "nearest"
    trained = load_model(tmp_path / "run")
    before = logits(trained)
    make_aware(trained, "int4")
    assert torch.equal(logits(load_model(tmp_path / "q")), logits(trained))
    assert not torch.equal(before, logits(trained))
    with pytest.raises(ConfigError, match="lora_rank would train other ones"):
        finetune(FinetuneConfig.model_validate({**run, "quantization_aware": "int4", "lora_rank": 2}))
