"""GGUF files of the tests: a small Llama and its tokenizer as llama.cpp's own converter would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(directory: Path, path: Path, *, quantized: bool = False, architecture: str = "llama") -> Path:
    """A model directory (a Llama with tied embeddings) as one file, in fp32 or with its matrices in Q8_0."""
    from onecard.model.load import load_model, load_tokenizer

    model: Any = load_model(directory)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, load_tokenizer(directory), directory)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        array = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                array = _pairs_side_by_side(array, heads)
        if quantized and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{_NAMES[rest]}.weight"
    return f"{_NAMES[stem]}.weight"


def _pairs_side_by_side(array: Any, heads: int) -> Any:
    """Rotary dimensions i and i + half, which Hugging Face keeps apart, next to each other as llama.cpp wants them."""
    half = array.shape[0] // heads // 2
    return np.ascontiguousarray(array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape))


def _add_tokenizer(writer: Any, tokenizer: Any, directory: Path) -> None:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = range(max(by_id) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id[index] for index in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if index in added else gguf.TokenType.NORMAL for index in ids])
    merges = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, index in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("pad", tokenizer.pad_token_id),
    ):
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(tokenizer("").input_ids == [tokenizer.bos_token_id])
    writer.add_chat_template(tokenizer.chat_template)
