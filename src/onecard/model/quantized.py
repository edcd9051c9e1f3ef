"""Frozen weights in 4 bits (NF4 with double quantization; Dettmers et al. 2023), by the library bitsandbytes.

In: a model in full precision. Out: the same model, in place, whose linear layers inside the repeated layers hold 4.127
bits a weight: 4 of a code, and a scale for each 64 weights that is itself kept in 8 bits. Head, embeddings and norms
stay as they are. Products are made in `compute_dtype`. Such layers are not learned; adapters stand beside them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecard.errors import MissingExtra
from onecard.model.lora import linear_layers, quiet


def quantize(model: nn.Module, compute_dtype: torch.dtype, device: str) -> int:
    """Put every linear layer inside the repeated layers into NF4 on `device`; returns how many weights that are.

    One after the other, so that the device never holds more than one of them in full.
    """
    with quiet():
        kinds = _library()
    count = 0
    for name in linear_layers(model):
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):  # transposed, as GPT-2 has them
            layer = _as_linear(layer)
        made = kinds.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        made.weight = kinds.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=made
        )
        made.bias = layer.bias
        # On a CPU too it is this call that quantizes.
        made.to(device)
        count += layer.weight.numel()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    multiply_in(model, compute_dtype)
    return count


def multiply_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the products of quantized layers in this format, whatever that of their input is."""
    for module in model.modules():
        if is_quantized(module):
            layer: Any = module
            layer.compute_dtype = dtype
            # Else the first input decides, which is fp32 behind a norm under autocast.
            layer.compute_type_is_set = True
            # On CPUs with bf16 units an evaluation would repack the weights for a kernel that has no gradient, and
            # leave them so: updates after it would learn from wrong gradients.
            layer.support_avx512bf16_for_cpu = False


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer holds its weight in 4 bits."""
    return type(module).__name__ == "Linear4bit" and hasattr(getattr(module, "weight", None), "quant_state")


def dequantized(layer: Any) -> Tensor:
    """The weight (outputs x inputs) that a quantized layer multiplies with."""
    found: Tensor = _library().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found


def _as_linear(layer: Any) -> nn.Linear:
    inputs, outputs = layer.weight.shape
    made = nn.Linear(inputs, outputs, bias=layer.bias is not None, device=layer.weight.device)
    made.weight = nn.Parameter(layer.weight.data.T.contiguous(), requires_grad=False)
    made.bias = layer.bias
    return made


def _library() -> Any:
    try:
        import bitsandbytes
        import bitsandbytes.functional
    except ImportError:
        raise MissingExtra("bitsandbytes", "quantization = nf4", install="onecard[qlora]") from None
    return bitsandbytes
