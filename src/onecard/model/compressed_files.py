"""Model directories with quantized weights in the layout of the library compressed-tensors: what they hold.

Such a directory is opened here as a dense model, its weights being what the codes stand for: so every verb reads it, a
CPU multiplies with it at full speed, and nothing needs that library. vLLM and transformers keep the codes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.errors import ArtifactError
from onecard.model.integer_weights import Scheme, restored, unpack

METHOD = "compressed-tensors"
PACKED, FLOAT = "pack-quantized", "float-quantized"


def quantization_of(directory: Path) -> dict[str, Any] | None:
    """What config.json says of quantized weights in this layout; None for any other directory."""
    path = directory / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") if path.is_file() else None
    return found if isinstance(found, dict) and found.get("quant_method") == METHOD else None


def dense_weights(directory: Path, written: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the directory, quantized ones as fp32; `written` is what `quantization_of` found.

    ArtifactError for formats other than integers of 4 and 8 bits and float8, with symmetric scales.
    """
    stored = _stored(directory)
    groups = list(written.get("config_groups", {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    form = written.get("format")
    readable = form == FLOAT or (form == PACKED and weights.get("num_bits") in (4, 8))
    if not readable or not weights.get("symmetric", True):
        raise ArtifactError(
            f"The weights in {directory} are quantized in a way that is not read here ({form}).",
            "Serve it with vLLM, or give the model that it was made of.",
        )
    made: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        stem, _, end = name.rpartition(".")
        if end in ("weight_scale", "weight_shape"):
            continue
        scale = stored.get(f"{stem}.weight_scale")
        if end == "weight_packed" and scale is not None:
            made[f"{stem}.weight"] = restored(*_codes(stored, stem, weights))
        elif end == "weight" and scale is not None:
            made[name] = tensor.float() * scale.float()
        else:
            made[name] = tensor
    return made


def _stored(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _codes(stored: dict[str, Tensor], stem: str, weights: dict[str, Any]) -> tuple[Tensor, Tensor, Scheme]:
    scheme = Scheme(int(weights["num_bits"]), int(weights.get("group_size") or 0))
    width = int(stored[f"{stem}.weight_shape"][1])
    return unpack(stored[f"{stem}.weight_packed"], width, scheme), stored[f"{stem}.weight_scale"].float(), scheme


def integer_weights(directory: Path) -> dict[str, tuple[Tensor, Tensor, Scheme]]:
    """Codes, steps and scheme of each integer weight by module name; none for a directory without such."""
    written = quantization_of(directory)
    if written is None or written.get("format") != PACKED:
        return {}
    stored, (group,) = _stored(directory), written["config_groups"].values()
    stems = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    return {stem: _codes(stored, stem, group["weights"]) for stem in stems}


def opening(directory: Path, dtype: torch.dtype) -> tuple[Any, str | None, dict[str, Any]]:
    """What opens a directory: the class to ask `from_pretrained` of, its first argument, and further ones by name.

    Quantized directories of this layout are opened as dense models; others as they are.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    written = quantization_of(directory)
    if written is None:
        return AutoModelForCausalLM, str(directory), {"trust_remote_code": False}
    config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    state = {name: tensor.to(dtype) for name, tensor in dense_weights(directory, written).items()}
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None, {"config": config, "state_dict": state}
