"""What vLLM is told of a model: number format, context, requests at once, and how much memory it takes.

In: the settings of `serve`, a model directory and what is free on the device. Out: `Choice`, and from it the command
and the environment. It starts nothing. What vLLM takes besides weights, keys and values is an estimate that no card has
seen yet; the margins are meant to be wide.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onecard import console
from onecard.config import ServeConfig
from onecard.errors import ArtifactError, ConfigError, DoesNotFit, MachineError
from onecard.plan.allocator import CONTEXT_UNCERTAINTY_BYTES, context_bytes
from onecard.plan.candidates import HOST_SHARE

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = {"F64", "F32", "F16", "BF16"}
# On a card, for the forward pass that vLLM tries at its start, its graphs and what torch keeps.
WORKSPACE_BYTES = 3 * GIB // 2
# On a CPU: three processes with torch and vLLM loaded, and the code that is compiled for the model. 3.4 GiB were seen
# beside the weights of SmolLM2-135M (vLLM 0.32), with the keys and values of short conversations.
PROCESSES_BYTES = 4 * GIB
# A longest context that had to be shortened is a multiple of this.
_ROUND_TOKENS = 256
# Settings of the embedded engine that vLLM has nothing for.
_MEANINGLESS = {
    "max_queue": "vLLM lets any number of requests wait",
    "time_limit_seconds": "vLLM has no such limit",
    "prefix_megabytes": "vLLM keeps what was read before among its keys and values",
}


@dataclass(frozen=True)
class Device:
    """Where vLLM computes, and what is free there. `capability` is a card's; None on a CPU."""

    name: str
    free_bytes: int
    total_bytes: int
    capability: tuple[int, int] | None = None

    @property
    def is_card(self) -> bool:
        """Whether it is a CUDA card."""
        return self.capability is not None

    @property
    def usable_bytes(self) -> int:
        """What weights, keys and values and vLLM's own work may take together."""
        if not self.is_card:
            return int(self.free_bytes * HOST_SHARE)
        # vLLM looks at what is free after the driver and the libraries have taken theirs.
        return self.free_bytes - context_bytes(self.capability) - CONTEXT_UNCERTAINTY_BYTES

    @property
    def overhead_bytes(self) -> int:
        """What vLLM takes besides weights, keys and values."""
        return WORKSPACE_BYTES if self.is_card else PROCESSES_BYTES


@dataclass(frozen=True)
class Needs:
    """What a model takes in a number format: its weights, and keys and values of each token of each conversation."""

    weight_bytes: int
    token_bytes: int
    longest_tokens: int


@dataclass(frozen=True)
class Choice:
    """What vLLM is told. `cache_bytes` is for keys and values; `card_share` its part of a card's memory, all in all."""

    dtype: str
    max_length: int
    max_concurrent: int
    weight_bytes: int
    cache_bytes: int
    cache_tokens: int
    card_share: float | None


def check_settings(config: ServeConfig) -> None:
    """ConfigError for what the embedded engine does and vLLM does not: nothing is passed over in silence."""
    for name, reason in _MEANINGLESS.items():
        if name not in config.model_fields_set or getattr(config, name) is None:
            continue
        if name == "prefix_megabytes" and config.prefix_megabytes == 0:
            continue  # off is what vLLM can do too
        raise ConfigError(f"{name} means nothing with engine = vllm: {reason}.", f"Leave {name} out.")
    if config.precision in ("int8", "int4"):
        raise ConfigError(
            f"precision = {config.precision} is for the embedded engine: vLLM rounds no weights on the way.",
            f"Write the model with `onecard quantize --format {config.precision}`, and serve that directory.",
        )


def number_format(precision: Literal["auto", "fp32", "bf16", "int8", "int4"], device: Device) -> str:
    """vLLM's dtype: as asked; auto is what the embedded engine takes, and float16 on cards that have no bf16."""
    asked = {"fp32": "float32", "bf16": "bfloat16"}.get(precision)
    old = device.capability is not None and device.capability < (8, 0)
    if asked == "bfloat16" and old:
        raise MachineError(f"{device.name} has no bf16.", "Leave precision out (then it is fp16), or give fp32.")
    return asked or ("float32" if not device.is_card else "float16" if old else "bfloat16")


def needs_of(directory: Path, architecture: Any, dtype: str, longest_tokens: int) -> Needs:
    """What the model of a directory takes in `dtype`; ArtifactError if it is no language model that writes.

    Integers and 8-bit floats stay as they are stored.
    """
    from safetensors import safe_open

    from onecard.plan.shape import shape_of

    shape = shape_of(architecture)
    if not shape.causal or shape.head is None:
        raise ArtifactError(f"{directory} holds no language model that writes.", "Serve one from pretrain or finetune.")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{directory} has no *.safetensors file with the weights.", "Copy or make it again.")
    weight_bytes = 0
    for file in files:
        with safe_open(str(file), framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                part = opened.get_slice(name)
                size = _BYTES[dtype] if part.get_dtype() in _FLOATS else _stored_bytes(part.get_dtype())
                weight_bytes += math.prod(part.get_shape()) * size
    return Needs(weight_bytes, shape.layers * shape.key_value_width * _BYTES[dtype], longest_tokens)


def _stored_bytes(kind: str) -> int:
    """I8, U8, F8_E4M3, I32, BOOL: the bits are in the name."""
    bits = "".join(letter for letter in kind.split("_")[0] if letter.isdigit())
    return int(bits) // 8 if bits else 1


def choose(config: ServeConfig, needs: Needs, device: Device) -> Choice:
    """Room for `max_concurrent` conversations of the longest context, or as much of it as the device has.

    With max_length = auto the context is shortened to what fits, and that is said; DoesNotFit where none does.
    """
    dtype = number_format(config.precision, device)
    asked = isinstance(config.max_length, int)
    length = needs.longest_tokens
    most = device.usable_bytes - device.overhead_bytes - needs.weight_bytes
    tokens = max(0, most // needs.token_bytes)
    if tokens < length:
        shorter = tokens // _ROUND_TOKENS * _ROUND_TOKENS
        if asked or shorter == 0:
            said = console.format_bytes
            raise DoesNotFit(
                f"{device.name} has {said(device.usable_bytes)} to give; weights take {said(needs.weight_bytes)}, vLLM "
                f"itself {said(device.overhead_bytes)} and one conversation of {length:,} tokens "
                f"{said(length * needs.token_bytes)}.",
                f"Give --max-length {shorter}."
                if shorter
                else "Serve a smaller model, or one from `onecard quantize`.",
            )
        console.warn(
            f"the model knows contexts of {length:,} tokens; keys and values of {shorter:,} fit: no conversation is "
            "longer."
        )
        length = shorter
    wanted = config.max_concurrent * length * needs.token_bytes
    cache = min(wanted, most)
    share = None
    if device.is_card:
        taken = needs.weight_bytes + device.overhead_bytes + cache
        # Up to the next thousandth, unless that is more than there is.
        share = (
            min(math.ceil(1000 * taken / device.total_bytes), 1000 * device.usable_bytes // device.total_bytes) / 1000
        )
    return Choice(dtype, length, config.max_concurrent, needs.weight_bytes, cache, cache // needs.token_bytes, share)


def generation_overrides(directory: Path) -> dict[str, Any]:
    """What vLLM would read otherwise in generation_config.json: it knows no `do_sample`, greedy is temperature 0."""
    file = directory / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as fault:
        raise ArtifactError(f"{file} is no JSON: {fault}.", "Mend it, or take it away.") from fault
    if found.get("do_sample") is not False:
        return {}
    # Who asks for another temperature samples from everything, as with the embedded engine.
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {"temperature": 0.0} | {name: value for name, value in off.items() if found.get(name) is not None}


def command_line(
    executable: Path, directory: Path, config: ServeConfig, choice: Choice, *, name: str, port: int
) -> list[str]:
    """What is started. Nothing secret stands in it: everybody on the machine can read it."""
    words: list[str] = [str(executable), "serve", str(directory)]
    words += ["--host", config.host, "--port", str(port), "--served-model-name", name]
    words += ["--dtype", choice.dtype, "--max-model-len", str(choice.max_length)]
    words += ["--max-num-seqs", str(choice.max_concurrent)]
    if choice.card_share is not None:
        words += ["--gpu-memory-utilization", f"{choice.card_share:.3f}"]
    words += ["--generation-config", "auto"]
    overrides = generation_overrides(directory)
    if overrides:
        words += ["--override-generation-config", json.dumps(overrides)]
    if config.prefix_megabytes == 0:
        words += ["--no-enable-prefix-caching"]
    # As in the embedded server: no pages that load scripts from the net, and no web page of another origin may ask.
    return [*words, "--disable-fastapi-docs", "--allowed-origins", "[]"]


def environment(choice: Choice, executable: Path, key: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the process sees beside what this one was given: offline, nothing reported, the key."""
    from onecard.serve.access import KEY_VARIABLE

    made = {name: value for name, value in inherited.items() if name != KEY_VARIABLE}
    # Compilers and ninja of its own environment are found there.
    made["PATH"] = os.pathsep.join([str(executable.parent), inherited.get("PATH", os.defpath)])
    return made | settings_in_environment(choice) | ({"VLLM_API_KEY": key} if key else {})


def settings_in_environment(choice: Choice) -> dict[str, str]:
    """Those settings of vLLM that are variables, as they are shown to the user; the key is not among them."""
    made = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if choice.card_share is None:
        made["VLLM_TARGET_DEVICE"] = "cpu"  # some builds cannot tell themselves
        made["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(choice.cache_bytes / GIB)))
    return made


def shown(variables: Mapping[str, str], words: Sequence[str], *, with_key: bool) -> str:
    """The command as one would type it, without the key."""
    import shlex

    named = [f"{name}={value}" for name, value in variables.items()] + (["VLLM_API_KEY=..."] if with_key else [])
    return " ".join([*named, shlex.join(words)])
