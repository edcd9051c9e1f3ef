"""Number formats of training: which one this machine should take and why, and what it does to a model.

fp32: everything in it (TF32 products on CUDA). bf16, fp16: products in it by autocast, over fp32 weights; fp16 with a
scaled loss. pure_bf16: matrices are kept in bf16 too, and every step of the optimizer is rounded stochastically.
float8: the products of the layers' linear maps in 8 bits (torchao), the rest as in bf16.
Knows no optimizer and no loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from onecard import console
from onecard.errors import ConfigError, MissingExtra
from onecard.machine.calibrate import WORTHWHILE, default_device, matrix_rate
from onecard.machine.rates import known
from onecard.model.load import silence_transformers
from onecard.model.quantized import is_quantized, multiply_in

Capability = tuple[int, int]
_PRODUCTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "pure_bf16": torch.bfloat16,
    "float8": torch.bfloat16,
}
# What cards can do from which capability on.
_BF16_FROM: Capability = (8, 0)
_FP16_FROM: Capability = (7, 0)
_FLOAT8_FROM: Capability = (8, 9)


@dataclass(frozen=True)
class Precision:
    """The chosen format, the device, and the measured rate of its matrix products in FLOP a second."""

    name: str
    device: str
    flops_per_second: float

    @property
    def dtype(self) -> torch.dtype:
        """Format of the products (float8: of all but the layers' linear maps)."""
        return _PRODUCTS[self.name]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Format in which matrices are kept between updates."""
        return torch.bfloat16 if self.name == "pure_bf16" else torch.float32

    @property
    def loss_scaling(self) -> bool:
        """Whether the loss must be scaled."""
        return self.name == "fp16"

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward passes."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)


def pick(device: str, capability: Capability | None, rates: dict[str, float]) -> tuple[str, str]:
    """What `auto` takes on a machine, and why.

    `capability` is that of a CUDA card; `rates` are measured FLOP a second of "fp32" and "bf16" (used on a CPU only).
    pure_bf16 and float8 are for whoever asks for them.
    """
    if capability is not None:
        version = f"capability {capability[0]}.{capability[1]}"
        if capability >= _BF16_FROM:
            return "bf16", f"this card multiplies bf16 in hardware ({version})"
        if capability >= _FP16_FROM:
            return "fp16", f"this card multiplies fp16 in hardware, and not bf16 ({version})"
        return "fp32", f"this card is fast in neither bf16 nor fp16 ({version})"
    name = "bf16" if rates["bf16"] >= WORTHWHILE * rates["fp32"] else "fp32"
    measured = f"{rates['fp32'] / 1e9:,.0f} GFLOP/s in fp32 and {rates['bf16'] / 1e9:,.0f} in bf16"
    return name, f"products at {measured} on this {device}"


def unfit(name: str, capability: Capability | None) -> str | None:
    """Why a format cannot be had on a machine; None if it can."""
    if name != "float8" or (capability is not None and capability >= _FLOAT8_FROM):
        return None
    here = "there is no CUDA card here" if capability is None else f"this one has {capability[0]}.{capability[1]}"
    return f"precision = float8 needs a CUDA card of capability 8.9 or more, and {here}."


def choose(setting: str) -> Precision:
    """Resolve `precision`, say why, and let CUDA multiply fp32 as TF32. ConfigError where a format cannot be had."""
    device = default_device()
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    if capability is not None:
        # The one switch that neither warns nor upsets the compiler, in every version of torch from 2.11 on.
        torch.set_float32_matmul_precision("high")
    if (fault := unfit(setting, capability)) is not None:
        raise ConfigError(fault, "Set precision = auto, which takes what is fast here.")
    rates = _Rates(device)
    if setting == "auto":
        compared = ("fp32", "bf16") if capability is None else ()
        setting, reason = pick(device, capability, rates.compared(compared))
        console.note(f"  precision {setting}: {reason}")
        return Precision(setting, device, rates.of(setting))
    rate = rates.of(setting)
    if setting != "fp32" and (plain := rates.of("fp32")) > rate:
        console.warn(
            f"{setting} products run at {rate / 1e9:,.0f} GFLOP/s here, fp32 at {plain / 1e9:,.0f}: "
            "precision = fp32 is faster."
        )
    return Precision(setting, device, rate)


class _Rates:
    """FLOP a second of products in each format: as `onecard doctor --calibrate` kept them, else measured when asked."""

    def __init__(self, device: str) -> None:
        self._device = device
        kept = known()
        self._found = {
            dtype: kept[f"{name}_flops_per_second"]
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
            if f"{name}_flops_per_second" in kept
        }

    def of(self, name: str) -> float:
        """That of one format of training."""
        dtype = _PRODUCTS[name]
        if dtype not in self._found:
            self._found[dtype] = matrix_rate(dtype, self._device)
        return self._found[dtype]

    def compared(self, names: tuple[str, ...]) -> dict[str, float]:
        """Those of formats between which the choice is, by name."""
        missing = [_PRODUCTS[name] for name in names if _PRODUCTS[name] not in self._found]
        # Twice, in turn: another program that takes the processor for a moment must not decide the format.
        for dtype in (*missing, *missing):
            self._found[dtype] = max(self._found.get(dtype, 0.0), matrix_rate(dtype, self._device))
        return {name: self._found[_PRODUCTS[name]] for name in names}


def convert(model: nn.Module, precision: Precision, *, emulate: bool = False) -> None:
    """Put a model into its format, in place: matrices into `weight_dtype`, the layers' linear maps into float8.

    Norms and biases stay in fp32, as under autocast: they weigh nothing, and their steps are small beside 1. Buffers
    (such as the frequencies of positions) are never touched. `emulate` computes float8 in software, for tests.
    """
    in_four_bits = any(is_quantized(module) for module in model.modules())
    # Beside weights in 4 bits, embeddings and head of 32 would be most of the model.
    weight_dtype = precision.dtype if in_four_bits else precision.weight_dtype
    multiply_in(model, precision.dtype)
    if weight_dtype != torch.float32:
        beside_frozen = any(not parameter.requires_grad for parameter in model.parameters())
        for parameter in model.parameters():
            # Adapters stay as they are too: they are small, and so are their steps.
            kept = (beside_frozen and parameter.requires_grad) or not parameter.is_floating_point()
            if parameter.ndim >= 2 and not kept:
                parameter.data = parameter.data.to(weight_dtype)
    if precision.name == "float8":
        _to_float8(model, emulate=emulate)


def _to_float8(model: nn.Module, *, emulate: bool) -> None:
    silence_transformers()  # and torchao
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise MissingExtra("torchao", "precision = float8", install="onecard[float8]") from None
    from onecard.train.compilation import decoder_layers

    def fits(module: nn.Module, name: str) -> bool:
        # The kernels take multiples of 16 only; adapters are narrow and stay as they are.
        return (
            isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape) and "lora" not in name
        )

    for layer in decoder_layers(model):
        convert_to_float8_training(
            layer, module_filter_fn=fits, config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
        )
