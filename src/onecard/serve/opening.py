"""How a model is opened for serving: on which device, in which numbers, and what computes its steps.

In: a model directory and a precision. Out: the model, and a function that makes its decoder. On a CPU the compiled step
of `native` is taken where it knows the model, after it was seen to give the same logits as the model's own modules.
It does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.errors import ConfigError

if TYPE_CHECKING:
    from onecard.serve.eager import EagerModel
    from onecard.serve.native import NativeModel

# The order of sums moves fp32 logits by less, as a share of their spread; a wrong model moves them by more than 1.
_SAME = 1e-3
_PROOF_TOKENS = 24

DecoderOf = Callable[[int, int], "EagerModel | NativeModel"]


def open_model(path: Path, precision: str) -> tuple[Any, DecoderOf]:
    """The model of a directory on the best device here, and what makes its decoder of slots and longest context.

    `auto` is bf16 on a CUDA card and fp32 on a CPU. `bf16`, `int8` and `int4` round the weights; integers are for CPUs.
    """
    import torch

    from onecard.model.load import load_model
    from onecard.serve.eager import EagerModel

    if torch.cuda.is_available():
        if precision in ("int8", "int4"):
            raise ConfigError(
                f"precision = {precision} while serving is for CPUs.",
                "Write such a model with `onecard quantize`, and serve it with vLLM.",
            )
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        model: Any = load_model(path, dtype=dtype, device="cuda")
        return model, lambda slots, length: EagerModel(model, slots, length)
    model = load_model(path)
    native = _native(model, path, precision)
    if native is not None:
        return model, native
    if precision in ("int8", "int4"):
        raise ConfigError(
            f"precision = {precision} needs compiled code, which is not there for this model on this machine.",
            "Install a C++ compiler (g++), or leave precision out.",
        )
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    return model, lambda slots, length: EagerModel(model, slots, length)


def _native(model: Any, path: Path, precision: str) -> DecoderOf | None:
    """What makes a compiled decoder, if it computes what the model does."""
    from onecard.model.compressed_files import integer_weights
    from onecard.model.load import model_directory
    from onecard.serve import native

    if not native.supports(model) or native.library() is None:
        return None
    if precision in ("bf16", "int8", "int4"):
        integers = native.round_weights(model, precision)
    else:
        stored = integer_weights(model_directory(path))
        integers = {name: native.IntegerWeight(*parts) for name, parts in stored.items()}
    tokens, wanted = _proof(model)

    def make(slots: int, length: int) -> EagerModel | NativeModel:
        made = native.NativeModel(model, slots, length, integers)
        found = made.step(tokens, [0] * len(tokens), range(len(tokens)), range(len(tokens)))
        off = float((found - wanted).abs().max() / wanted.std())
        if not off < _SAME:
            from onecard.model.load import load_model
            from onecard.serve.eager import EagerModel

            console.warn(f"the compiled step gives other logits than the model (by {off:.2g}): it is not used.")
            return EagerModel(load_model(path), slots, length)
        made.forget()
        return made

    return make


def _proof(model: Any) -> tuple[list[int], Any]:
    """Some tokens, and the logits after each as the model's own modules compute them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(
        0, rows, (min(_PROOF_TOKENS, model.config.max_position_embeddings - 1),), generator=generator
    )
    with torch.inference_mode():
        return tokens.tolist(), model(tokens[None]).logits[0].float()
