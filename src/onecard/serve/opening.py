"""How a model is opened for serving: on which device, in which numbers, and what computes its steps.

In: a model directory and a precision. Out: an engine that answers with it. On a CPU the compiled step
of `native` is taken where it knows the model, after it was seen to give the same logits as the model's own modules.
It does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from onecard.serve.eager import EagerModel
    from onecard.serve.engine import Engine
    from onecard.serve.native import IntegerWeight, NativeModel

# The order of sums moves fp32 logits by less, as a share of their spread; a wrong model moves them by more than 1.
_SAME = 1e-3
_PROOF_TOKENS = 24

DecoderOf = Callable[[int, int], "EagerModel | NativeModel"]


def open_engine(
    path: Path,
    *,
    max_concurrent: int,
    max_length: int | str = "auto",
    max_queue: int = 64,
    precision: str = "auto",
    prefix_bytes: int = 0,
) -> tuple[Engine, PreTrainedTokenizerFast]:
    """Load a model directory onto the best device here and start an engine; ArtifactError or ConfigError otherwise."""
    from onecard.model.load import check_tokenizer_fits, load_tokenizer, model_directory
    from onecard.serve.engine import Engine

    model_directory(path)  # says what is missing before anything is read
    tokenizer = load_tokenizer(path)
    model, decoder_of = open_model(path, precision)
    check_tokenizer_fits(tokenizer, model, path)
    length = context_length(model.config, max_length)
    decoder = decoder_of(max_concurrent, length)
    return (
        Engine(model, tokenizer, max_concurrent, length, max_queue, decoder=decoder, prefix_bytes=prefix_bytes),
        tokenizer,
    )


def context_length(architecture: Any, wanted: int | str) -> int:
    """The longest context in tokens: what a model of this configuration was made for, or less if `wanted`.

    ConfigError if it cannot.
    """
    limit = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    if isinstance(wanted, int):
        if limit is not None and wanted > limit:
            raise ConfigError(
                f"max_length is {wanted}, but the model knows positions up to {limit}.",
                f"Give at most {limit}, or leave it out.",
            )
        return wanted
    return int(limit or 2048)


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
    stored = integer_weights(model_directory(path))
    integers = {name: native.IntegerWeight(*parts) for name, parts in stored.items()}
    if stored:
        _check_stored(path, integers, precision)
    elif precision in ("bf16", "int8", "int4"):
        integers = native.round_weights(model, precision)
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


def _check_stored(path: Path, integers: dict[str, IntegerWeight], precision: str) -> None:
    """Integers that a directory holds are served as they are: rounding them once more would only lose."""
    bits = sorted({weight.scheme.bits for weight in integers.values()})
    held = " and ".join(f"int{number}" for number in bits)
    if precision in ("int8", "int4") and precision != held:
        raise ConfigError(
            f"The weights in {path} are {held} already; precision = {precision} would round them a second time.",
            f"Leave precision out, or give the model that was quantized with precision = {precision}.",
        )
    if precision == "bf16":
        console.note(f"  the weights are {held}, and are served as they are")


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
