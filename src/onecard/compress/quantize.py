"""The verb `quantize`: a model directory in, one with weights of 4 or 8 bits out, compared with the original.

Linear layers inside the repeated layers are quantized; embeddings, norms and (unless asked) the head stay in 16 bits.
Integers and float8 are written in the layout of compressed-tensors, NF4 in that of bitsandbytes; vLLM and transformers
load both. A directory is put in place only after transformers has read it with that library and found the same logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress import comparison
from onecard.compress.directories import (
    check_room,
    check_same,
    copy_companions,
    read_by_others,
    stored_tensors,
    write_model,
    written_settings,
)
from onecard.config import QuantizeConfig
from onecard.errors import ConfigError, MissingExtra
from onecard.model.load import load_model, load_tokenizer, model_directory

if TYPE_CHECKING:
    from torch import Tensor

    from onecard.model.integer_weights import Scheme

# The largest number of float8 e4m3.
_FLOAT8_MOST = 448.0
# Rounding to NF4 moves weights that are spread like a bell by a tenth of their length.
NEAR = 0.2


def quantize(config: QuantizeConfig) -> dict[str, Any]:
    """Quantize, write, read back, compare. ConfigError before any work for layers that a format cannot hold."""
    directory = model_directory(config.model)
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.model])
    _check_libraries(config.format)
    _check_settings(config, directory)
    tokenizer = load_tokenizer(directory)
    material = comparison.gather(config, directory)
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.model]) as folder:
        if config.format == "nf4":
            facts = _write_nf4(config, directory, folder)
        else:
            facts = _write_compressed(config, directory, tokenizer, folder)
        copy_companions(directory, folder)
        facts["read_back_deviation"] = _read_back(directory, folder, config.format)
        name = {"int8": "8-bit", "int4": "4-bit", "nf4": "NF4", "float8": "float8"}[config.format]
        compared = comparison.compare(directory, folder, material, config, f"The {name} form")
        result = {"format": config.format, **facts, **compared.result()}
        compared.write(folder, f"Quantized to {config.format}", _notes(config, facts))
        parents = [config.model, *([config.corpus] if config.corpus else [])]
        artifact.write_manifest(folder, "model", settings=config.plain(), parents=parents, result=result)
    compared.show(f"Quantized to {config.format}: {config.output}")
    for note in _notes(config, facts):
        console.result(note)
    return {**result, "output": str(config.output)}


def _check_libraries(form: str) -> None:
    if form == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "format = nf4", install="onecard[qlora]")
    if form != "nf4" and importlib.util.find_spec("compressed_tensors") is None:
        raise MissingExtra("compressed-tensors", f"format = {form}", install="onecard[quantize]")


def _check_settings(config: QuantizeConfig, directory: Path) -> None:
    if "quantization_config" in written_settings(directory):
        raise ConfigError(f"The model in {config.model} is quantized already.", "Give the model that it was made of.")
    if config.method == "gptq" and config.corpus is None:
        raise ConfigError("method = gptq needs text to calibrate with.", "Give a --corpus (from clean).")
    if config.method == "gptq" and config.format not in ("int8", "int4"):
        raise ConfigError(f"method = gptq is for int8 and int4, not for {config.format}.", "Set method = nearest.")
    if config.head and config.format == "nf4":
        raise ConfigError("format = nf4 leaves the head as it is.", "Set head = false, or format = int8.")


def _notes(config: QuantizeConfig, facts: dict[str, Any]) -> list[str]:
    how = {"gptq": "errors made up for on calibration text (GPTQ)", "nearest": "rounded to nearest"}[facts["method"]]
    group = f"groups of {facts['group_size']}" if facts.get("group_size") else "a scale for each row"
    notes = [f"{facts['quantized_weights']:,} weights in {facts['layers']} layers: {how}, {group}."]
    if trained_for(config.model) == config.format and facts["method"] == "nearest":
        notes.append("The original was trained for these weights: this form is what it was trained to be.")
    if facts.get("untied_head"):
        notes.append("The head was the embedding; quantized, it is stored beside it.")
    return notes


# --- integers and float8: compressed-tensors ----------------------------------------------------------------------


def _write_compressed(config: QuantizeConfig, directory: Path, tokenizer: Any, folder: Path) -> dict[str, Any]:
    import torch

    from onecard.model.integer_weights import scheme_for

    model: Any = load_model(directory)
    names = _layers(model, directory, head=config.head)
    shapes = [(name, int(model.get_submodule(name).in_features)) for name in names]
    scheme = None if config.format == "float8" else scheme_for(config.format, config.group_size, shapes)
    method = _method(config)
    count = sum(model.get_submodule(name).weight.numel() for name in names)
    total = sum(parameter.numel() for parameter in model.parameters())
    check_room(config.output, int(count * (0.6 if config.format == "int4" else 1.1) + 4 * (total - count)))
    chosen = _chosen_by_calibration(config, model, tokenizer, scheme) if method == "gptq" and scheme else {}
    settings = written_settings(directory)
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[_kept(config, settings)]
    tied = bool(settings.get("tie_word_embeddings"))
    tensors: dict[str, Tensor] = {}
    originals = stored_tensors(directory)
    for name, tensor in originals.items():
        stem = name.removesuffix(".weight")
        if stem not in names:
            tensors[name] = tensor.to(kept)
    if config.head and tied:
        originals["lm_head.weight"] = model.get_output_embeddings().weight.detach()
        settings["tie_word_embeddings"] = False
    for name in names:
        tensors |= _stored(name, originals[f"{name}.weight"], scheme, chosen.get(name))
    settings["dtype"] = settings["torch_dtype"] = str(kept).removeprefix("torch.")
    settings["quantization_config"] = _described(scheme, model, names)
    write_model(folder, tensors, settings)
    return {
        "method": method,
        "group_size": scheme.group if scheme else 0,
        "layers": len(names),
        "quantized_weights": count,
        "kept_precision": _kept(config, settings),
        "untied_head": bool(config.head and tied),
    }


def _method(config: QuantizeConfig) -> str:
    if config.method != "auto":
        return config.method
    calibrated = config.format == "int4" and config.corpus is not None and trained_for(config.model) != config.format
    return "gptq" if calibrated else "nearest"


def trained_for(model: Path) -> str:
    """The format that a run trained its weights for (quantization_aware); "none" for any other model."""
    for place in (model, model.resolve().parent):
        if (place / artifact.MANIFEST).is_file() and (manifest := artifact.read_manifest(place)).kind == "run":
            return str(manifest.settings.get("asked", {}).get("quantization_aware", "none"))
    return "none"


def _kept(config: QuantizeConfig, settings: dict[str, Any]) -> str:
    if config.kept_precision != "auto":
        return config.kept_precision
    return "fp16" if (settings.get("dtype") or settings.get("torch_dtype")) == "float16" else "bf16"


def _layers(model: Any, directory: Path, *, head: bool) -> list[str]:
    """Names of the linear layers to quantize; ConfigError for a model whose layers cannot be stored so."""
    import torch

    from onecard.model.lora import linear_layers

    names = linear_layers(model)
    odd = [name for name in names if not isinstance(model.get_submodule(name), torch.nn.Linear)]
    if odd or not names:
        raise ConfigError(
            f"The model in {directory} has {'transposed' if odd else 'no'} linear layers: not for this layout.",
            "Use --format nf4.",
        )
    if head:
        names.append(next(n for n, m in model.named_modules() if m is model.get_output_embeddings()))
    return names


def _stored(
    name: str, weight: Tensor, scheme: Scheme | None, chosen: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """The tensors of one layer in the file. ConfigError for weights that are not finite."""
    import torch

    from onecard.model.integer_weights import codes, pack, scales

    if not torch.isfinite(weight).all():
        raise ConfigError(f"The layer {name} has weights that are not finite.", "Train again, or take a checkpoint.")
    if scheme is None:
        largest = weight.float().abs().amax(dim=1, keepdim=True)
        step = (largest / _FLOAT8_MOST).clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        step = torch.where(largest == 0, torch.ones_like(step), step)
        ratio = (weight.float() / step.float()).clamp(-_FLOAT8_MOST, _FLOAT8_MOST)
        return {f"{name}.weight": ratio.to(torch.float8_e4m3fn), f"{name}.weight_scale": step}
    steps, made = chosen if chosen is not None else (scales(weight, scheme), None)
    found = codes(weight, steps, scheme) if made is None else made
    return {
        f"{name}.weight_packed": pack(found, scheme),
        f"{name}.weight_scale": steps.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _described(scheme: Scheme | None, model: Any, names: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` as vLLM and transformers read it."""
    import torch

    quantized = set(names)
    plain = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in quantized]
    weights: dict[str, Any] = {
        "num_bits": scheme.bits if scheme else 8,
        "type": "int" if scheme else "float",
        "symmetric": True,
        "strategy": "group" if scheme and scheme.group else "channel",
        "group_size": scheme.group if scheme and scheme.group else None,
        "dynamic": False,
        "observer": "minmax",
    }
    form = "pack-quantized" if scheme else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": form}},
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _chosen_by_calibration(
    config: QuantizeConfig, model: Any, tokenizer: Any, scheme: Scheme
) -> dict[str, tuple[Tensor, Tensor]]:
    """Steps and codes of each layer by GPTQ, layer after layer; the model's weights become what the codes stand for."""
    from onecard.compress.calibration import Moments, layer_after_layer, sample_rows
    from onecard.compress.gptq import compensated_codes
    from onecard.model.integer_weights import restored, scales

    assert config.corpus is not None
    row_tokens = min(config.calibration_tokens, int(getattr(model.config, "max_position_embeddings", 1 << 20)))
    rows = sample_rows(config.corpus, tokenizer, config.calibration_rows, row_tokens)
    console.note(f"  {len(rows)} rows of {row_tokens} tokens to calibrate with")
    made: dict[str, tuple[Tensor, Tensor]] = {}

    def change(layers: dict[str, Any], moments: dict[str, Moments]) -> None:
        for name, layer in layers.items():
            steps = scales(layer.weight, scheme)
            found = compensated_codes(layer.weight, steps, scheme, moments[name].sum)
            layer.weight.copy_(restored(found, steps, scheme))
            made[name] = (steps, found)

    layer_after_layer(model, rows, change)
    return made


# --- NF4: bitsandbytes --------------------------------------------------------------------------------------------


def _write_nf4(config: QuantizeConfig, directory: Path, folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from onecard.model.lora import quiet
    from onecard.model.quantized import is_quantized

    settings = written_settings(directory)
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[_kept(config, settings)]
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=kept,
            local_files_only=True,
            quantization_config=BitsAndBytesConfig(  # type: ignore[no-untyped-call]
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=kept,
            ),
        )
        found = [module for module in model.modules() if is_quantized(module)]
        with artifact.disk_faults(folder):
            model.save_pretrained(str(folder))
    return {
        "method": "nearest",
        "group_size": 64,
        "layers": len(found),
        "quantized_weights": sum(int(module.in_features) * int(module.out_features) for module in found),
        "kept_precision": _kept(config, settings),
    }


# --- reading back -------------------------------------------------------------------------------------------------


def _read_back(directory: Path, folder: Path, form: str) -> float:
    """How far what transformers reads is from what was meant, as a share; NotTheSame if that cannot be rounding.

    Integers and float8: the logits beside those of the model as onecard opens it, over their spread. NF4, whose codes
    only its library knows: the largest distance of a layer's weight from the original, over its length.
    """
    from onecard.model.lora import deviation

    theirs = read_by_others(folder)
    if form == "nf4":
        return check_same(_distance(theirs, directory), NEAR)
    return check_same(deviation(theirs, load_model(folder)))


def _distance(quantized: Any, directory: Path) -> float:
    from onecard.model.quantized import dequantized, is_quantized

    original: Any = load_model(directory)
    found = []
    for name, module in quantized.named_modules():
        if is_quantized(module):
            weight = original.get_submodule(name).weight.detach().float()
            made = dequantized(module).float().reshape(module.out_features, module.in_features)
            made = made if made.shape == weight.shape else made.T
            found.append(float((made - weight).norm() / weight.norm().clamp(min=1e-30)))
    return max(found, default=float("nan"))
