"""A model directory written as one GGUF file, for llama.cpp and what is built on it.

In: a directory in Hugging Face layout (Llama, Mistral, Qwen2 and Qwen3 kinds, byte-level BPE) and a number format. Out:
a file with the weights in llama.cpp's order, the tokenizer with its split by name, control tokens and chat template.
What llama.cpp would read otherwise than it was trained is refused before anything is written. Tensors pass one by one,
so memory holds one of them.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecard.errors import ConfigError, MissingExtra
from onecard.tokenizer.special import PRE_TOKENIZERS, WHOLE_PIECES_FIRST

# The name of each kind in llama.cpp, and whether its rotary dimensions stand next to each other there.
ARCHITECTURES = {
    "llama": ("LLAMA", True),
    "mistral": ("LLAMA", True),
    "qwen2": ("QWEN2", False),
    "qwen3": ("QWEN3", False),
}
FORMATS = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
# A format of few bits rounds the tables at both ends of a model too much: they get this one.
_ENDS = "q8_0"


@dataclass(frozen=True)
class Plan:
    """What a file will hold: the library's name of each tensor, its name in the directory, its shape and format."""

    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]
    bytes: int


class Writer:
    """Plans and writes the file of one model directory."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.gguf = _library()
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.file: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        kind = self.config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ConfigError(
                f"A {kind} model cannot be written as GGUF yet.", f"Kinds that can: {', '.join(ARCHITECTURES)}."
            )
        name, self._side_by_side = ARCHITECTURES[kind]
        self.architecture = self.gguf.MODEL_ARCH[name]
        self.layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.key_value_heads = int(self.config.get("num_key_value_heads") or self.heads)
        self.split_rule = split_rule(self.file)
        if self.config.get("sliding_window") and self.config.get("use_sliding_window", kind == "mistral"):
            raise ConfigError(
                "Layers that see a sliding window only would see everything in llama.cpp.", "Serve it with vLLM."
            )
        self.rope = rope_settings(self.config)
        self._rope = _rope(self.config)

    # --- tensors --------------------------------------------------------------------------------------------------

    def plan(self, number_format: str) -> Plan:
        """Every tensor with its format; ConfigError for one that llama.cpp has no name for."""
        names = self.gguf.get_tensor_name_map(self.architecture, self.layers)
        found, total = [], 0
        for name, shape in self._shapes():
            if name == "lm_head.weight" and self.config.get("tie_word_embeddings"):
                continue
            stem, dot, end = name.rpartition(".")
            known = names.get_name(stem) if dot else None
            if known is None:
                raise ConfigError(f"llama.cpp has no place for {name}.", "Export a plain model of a known kind.")
            chosen = self._format_of(known, shape, number_format)
            found.append((f"{known}.{end}", name, shape, chosen))
            total += _bytes_of(self.gguf, shape, chosen)
        return Plan(tuple(found), total)

    def _format_of(self, known: str, shape: tuple[int, ...], wanted: str) -> str:
        if len(shape) < 2:
            return "f32"
        chosen = _ENDS if wanted.startswith("q") and known in ("token_embd", "output") else wanted
        # Blocks of 32 weights in a row share a scale.
        return "f16" if chosen.startswith("q") and shape[-1] % 32 else chosen

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        from safetensors import safe_open

        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as opened:
                for name in sorted(opened.keys()):
                    yield name, tuple(opened.get_slice(name).get_shape())

    def _tensor(self, name: str) -> NDArray[np.float32]:
        from safetensors import safe_open

        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as opened:
                if name in set(opened.keys()):
                    array: NDArray[np.float32] = opened.get_tensor(name).float().numpy()
                    for part, heads in (("q_proj", self.heads), ("k_proj", self.key_value_heads)):
                        if self._side_by_side and f".{part}." in name:
                            array = side_by_side(array, heads)
                    return np.ascontiguousarray(array)
        raise AssertionError(name)

    # --- the file -------------------------------------------------------------------------------------------------

    def write(self, path: Path, plan: Plan, number_format: str, name: str) -> None:
        """Write `path`; the caller puts it in place."""
        writer = self.gguf.GGUFWriter(str(path), self.gguf.MODEL_ARCH_NAMES[self.architecture])
        self._describe(writer, number_format, name)
        self._add_tokenizer(writer)
        kinds = self.gguf.GGMLQuantizationType
        tensors = [(known, own, shape, kinds[chosen.upper()]) for known, own, shape, chosen in plan.tensors]
        if self._rope is not None:
            writer.add_tensor_info("rope_freqs.weight", self._rope.shape, self._rope.dtype, self._rope.nbytes)
        for known, _, shape, kind in tensors:
            size = _bytes_of(self.gguf, shape, kind.name.lower())
            writer.add_tensor_info(known, shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if self._rope is not None:
            writer.write_tensor_data(self._rope)
        for _, own, _, kind in tensors:
            writer.write_tensor_data(self.gguf.quants.quantize(self._tensor(own), kind))
        writer.close()

    def _describe(self, writer: Any, number_format: str, name: str) -> None:
        config = self.config
        head_size = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        writer.add_name(name)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.key_value_heads)
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(float(rope_settings(config)["rope_theta"]))
        writer.add_rope_dimension_count(head_size)
        writer.add_vocab_size(config["vocab_size"])
        types = self.gguf.LlamaFileType
        writer.add_file_type(types.ALL_F32 if number_format == "f32" else types[f"MOSTLY_{number_format.upper()}"])

    def _add_tokenizer(self, writer: Any) -> None:
        tokens, types = self._tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split_rule)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        merges = self.file["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
        tokenizer = self.tokenizer
        for role in ("bos", "eos", "pad", "unk"):
            index = getattr(tokenizer, f"{role}_token_id")
            if index is not None:
                getattr(writer, f"add_{role}_token_id")(index)
        writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
        writer.add_add_eos_token(False)
        if tokenizer.chat_template:
            writer.add_chat_template(plain_template(tokenizer.chat_template))

    def _tokens(self) -> tuple[list[str], list[int]]:
        """The entries by id, as many as the model has rows: those without a token are never written by a server."""
        kinds = self.gguf.TokenType
        by_id = {index: token for token, index in self.tokenizer.get_vocab().items()}
        added = self.tokenizer.added_tokens_decoder
        tokens, types = [], []
        for index in range(int(self.config["vocab_size"])):
            tokens.append(by_id.get(index, f"[PAD{index}]"))
            if index not in by_id:
                types.append(kinds.UNUSED)
            elif index in added:
                types.append(kinds.CONTROL if added[index].special else kinds.USER_DEFINED)
            else:
                types.append(kinds.NORMAL)
        return tokens, types


def split_rule(file: dict[str, Any]) -> str:
    """llama.cpp's name of the way in which a tokenizer.json splits text; ConfigError if it has none for it."""
    model = file["model"]
    if model["type"] != "BPE" or file.get("normalizer") is not None or model.get("byte_fallback"):
        raise ConfigError(
            "Only byte-level BPE tokenizers without a normalizer can be written as GGUF.",
            "Train one with `onecard tokenizer train`, or serve the model's directory.",
        )
    steps = file["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    expressions: list[str] = []
    for step in steps:
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            expressions.append(step["pattern"].get("Regex", ""))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            expressions.append(r"\p{N}")
        elif step.get("type") == "ByteLevel":
            if step.get("use_regex", True):
                expressions += PRE_TOKENIZERS["gpt-2"]
        elif step.get("type") != "FixedLength":
            expressions.append(step.get("type", ""))
    for name, known in PRE_TOKENIZERS.items():
        if tuple(expressions) == known:
            if bool(model.get("ignore_merges")) != (name in WHOLE_PIECES_FIRST):
                break
            return name
    raise ConfigError(
        "llama.cpp knows no split like that of this tokenizer: it would read other tokens than were trained.",
        f"Splits that it knows: {', '.join(PRE_TOKENIZERS)}.",
    )


def plain_template(template: str) -> str:
    """A chat template without the marks that tell transformers which tokens are the model's own."""
    opened = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", opened)


def side_by_side(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection: rotary dimensions i and i + half of a head, put next to each other."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """In the form of transformers 5 (`rope_parameters`), also from that of 4."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.pop("type", "default"))
    return found


def _rope(config: dict[str, Any]) -> NDArray[np.float32] | None:
    """By what llama.cpp divides the frequencies of positions (Llama 3); ConfigError for another way of stretching."""
    settings = rope_settings(config)
    if settings["rope_type"] == "default":
        return None
    if settings["rope_type"] != "llama3":
        raise ConfigError(
            f"Positions stretched by {settings['rope_type']} cannot be written as GGUF yet.", "Serve its directory."
        )
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    frequencies = 1.0 / settings["rope_theta"] ** (np.arange(0, size, 2) / size)
    waves = 2 * math.pi / frequencies
    factor, low, high = (float(settings[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(settings["original_max_position_embeddings"])
    smooth = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    found: NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return found


def _bytes_of(gguf: Any, shape: tuple[int, ...], chosen: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[chosen.upper()]]
    return int(math.prod(shape) // block * size)


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise MissingExtra("gguf", "Writing GGUF", install='"onecard[gguf]"') from None
