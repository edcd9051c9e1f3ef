"""Adapter directories of PEFT: read, put beside a model's layers under names of their own, added up exactly.

In: directories as `lora.save` or PEFT writes them. Out: a model with all of them beside its layers, and of each adapted
layer the weight that each adapter alone would make of it, in fp64 and one layer at a time. LoRA, rsLoRA and DoRA are
read; what else is stored beside adapters (other layers learned whole, biases) is refused, because it cannot be added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard import artifact
from onecard.errors import ArtifactError, ConfigError
from onecard.model import lora

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What begins with a part of the weights changes these when it is loaded, unless it was written for the whole ones.
_CHANGED_AT_START = ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter directory and what is known of it; `base_weights` is the hash of the weights that it was made for."""

    path: Path
    settings: dict[str, Any]
    base_weights: str | None
    quantization: str

    @property
    def decomposed(self) -> bool:
        """DoRA: what it makes of a weight is not linear in its matrices."""
        return bool(self.settings.get("use_dora"))


def is_adapter(path: Path) -> bool:
    """Whether a directory holds adapters of PEFT."""
    return (path / SETTINGS).is_file()


def open_adapter(path: Path) -> AdapterFile:
    """Read what an adapter directory says of itself. ConfigError for what cannot be added to weights."""
    try:
        settings: dict[str, Any] = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ArtifactError(f"{path / SETTINGS} is damaged ({fault}).", "Copy the adapter again.") from fault
    if not (path / WEIGHTS).is_file():
        raise ArtifactError(f"{path} has no {WEIGHTS}.", "Copy the adapter again; only safetensors are read.")
    kind = settings.get("peft_type")
    start = settings.get("init_lora_weights")
    refused = None
    if kind != "LORA":
        refused = f"is of the kind {kind}; LoRA, rsLoRA and DoRA can be added"
    elif settings.get("modules_to_save") or settings.get("trainable_token_indices"):
        refused = "brings layers or tokens that were learned whole"
    elif settings.get("target_parameters") or settings.get("alora_invocation_tokens"):
        refused = "changes stacked experts, or only what follows some tokens"
    elif settings.get("bias", "none") != "none" or settings.get("lora_bias"):
        refused = "brings biases"
    elif isinstance(start, str) and start.lower().startswith(_CHANGED_AT_START):
        refused = f"began with a part of the weights ({start}) and was not written for the whole ones"
    if refused is not None:
        raise ConfigError(f"The adapter in {path} {refused}.", "Give the merged model of that training instead.")
    known = artifact.read_manifest(path).result if (path / artifact.MANIFEST).is_file() else {}
    return AdapterFile(path, settings, known.get("base_weights"), str(known.get("quantization", "none")))


def put_beside(model: Any, adapter: AdapterFile, name: str) -> None:
    """Put an adapter beside the layers of `model` under a name, not a number.

    ConfigError if it was made for another one.
    """
    from safetensors.torch import load_file

    with lora.quiet():
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

        settings = LoraConfig.from_pretrained(str(adapter.path))
        stored = {key.removeprefix(_PREFIX): tensor for key, tensor in load_file(adapter.path / WEIGHTS).items()}
        try:
            inject_adapter_in_model(settings, model, adapter_name=name)
            found: Any = set_peft_model_state_dict(model, stored, adapter_name=name)
        except (ValueError, RuntimeError) as fault:
            raise ConfigError(
                f"The adapter in {adapter.path} does not fit this base: {str(fault).strip().splitlines()[0]}.",
                "Give the base that it was trained beside.",
            ) from fault
    absent = [key for key in found.missing_keys if lora.is_adapter(key) and name in key.split(".")]
    if found.unexpected_keys or absent:
        odd = (list(found.unexpected_keys) + absent)[0]
        raise ConfigError(
            f"The adapter in {adapter.path} and this base do not have the same layers, such as {odd}.",
            "Give the base that it was trained beside.",
        )
    embedding = model.get_input_embeddings()
    for place, module in lora.adapted_layers(model):
        layer = module.get_base_layer()
        if layer is embedding or module is embedding or layer.weight is model.get_input_embeddings().weight:
            raise ConfigError(
                f"The adapter in {adapter.path} changes {place}, an embedding or a head that is tied to one.",
                "Give the merged model of that training instead.",
            )
    for key, parameter in model.named_parameters():
        if lora.is_adapter(key):
            parameter.data = parameter.data.float()


def merged_weights(model: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Of each adapted layer: its name, its weight, and the weight that each of `names` alone makes of it; all fp64.

    The layer is of no use afterwards.
    """
    for place, module in lora.adapted_layers(model):
        module.double()
        layer = module.get_base_layer()
        before = layer.weight.detach().clone()
        found: dict[str, Tensor] = {}
        for name in names:
            if name in module.lora_A:
                module.merge(adapter_names=[name])
                found[name] = layer.weight.detach().clone()
                layer.weight.data = before.clone()
                module.merged_adapters.clear()
        yield place, before, found
        layer.weight.data = torch.empty(0)


@contextmanager
def weighed(model: Any, weights: dict[str, float]) -> Iterator[None]:
    """While it is open, adapted layers give W x + the weighted sum of what each adapter alone adds to it."""
    layers = [module for _, module in lora.adapted_layers(model)]

    def summed(module: Any) -> Any:
        alone = module.forward

        def forward(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
            plain: Tensor = module.get_base_layer()(x, *arguments, **named)
            total = plain
            for name, weight in weights.items():
                if name in module.lora_A:
                    module.set_adapter([name])
                    total = total + weight * (alone(x, *arguments, **named) - plain)
            return total

        return forward

    for module in layers:
        module.forward = summed(module)
    try:
        yield
    finally:
        for module in layers:
            del module.forward
