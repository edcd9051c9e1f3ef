"""Tiny models of the architectures that people train, with weights so large that a leak between documents shows."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
PAD = 0
# Shorter than most documents of the tests, so that windows matter.
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    # The lower layer attends to everything, the upper one in a window.
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "tie_word_embeddings": False}),
    # Caps low enough to bend the logits of such small models.
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", {"n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


def make_family(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The tiny model of a family, the same for every call, with random biases and norms where it has any."""
    kind, special = FAMILIES[name]
    config_name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    model_name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    common = dict(_COMMON)
    if kind == "GPT2":
        common = {key: common[key] for key in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
        common |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}
    torch.manual_seed(1)
    model: Any = getattr(transformers, model_name)(getattr(transformers, config_name)(**common | special | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.to(dtype).train()


# Architectures that carry state from token to token: no boundary between documents stops it.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 4, "time_step_rank": 4}),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "recurrent gemma": (
        "RecurrentGemma",
        {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
}


def make_stateful(name: str, **changes: Any) -> Any:
    """The tiny model of a kind that carries state, the same for every call."""
    kind, special = STATEFUL[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**_COMMON | special | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()
