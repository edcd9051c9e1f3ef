"""Causal attention over packed documents: each token sees its own document and nothing else.

A micro-batch is one flat row of tokens; `cu_seq_lens_q` marks where documents begin and end. The function is registered
with transformers under the name PACKED, so any of its architectures that take an attention interface can use it, with
grouped heads, sliding windows and capped logits. On a CPU it is `document_attention`; on CUDA in 16 bits PyTorch's
variable-length flash attention (capped logits: `document_attention`); otherwise, and with dropout, which those two do
not have, document by document with what PyTorch has for one.

It does not know of attention sinks, chunked attention, or layers that mix tokens in another way than by attention:
`switch` proves on two short documents that a model computes the same as without packing, and leaves others as they are.
Rotary embeddings that change with the longest position of a batch (dynamic, longrope) change so here as in any batch.
The CUDA path is the same interface and has not been run on a card yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onecard.model.document_attention import blocks, document_attention, exact_dtype
from onecard.model.loss import agree, plain_logits_agree

PACKED = "onecard_packed"
# The proof is run with windows as short as this, so that two short documents show whether a model's are honoured.
PROOF_WINDOW = 3
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, H, T, D), key and value (1, H_kv, T, D) -> output (1, T, H, D).

    `cu_seq_lens_q` (int32, on the CPU for CPU tensors) holds 0 and the running ends of the documents, of which none is
    longer than `max_length_q`. A sliding window counts the token itself.
    """
    assert cu_seq_lens_q is not None, "the loop passes document boundaries to every forward"
    assert attention_mask is None, "boundaries replace masks"
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    longest = int(max_length_q or query.shape[2])
    window, cap = (sliding_window if sliding_window and sliding_window < longest else 0), softcap or 0.0
    # Under autocast rotary embeddings leave fp32 queries and keys beside 16-bit values; the kernel wants one format.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not dropout and (cap or query.device.type == "cpu"):
        output, _ = document_attention(query, key, value, cu_seq_lens_q, scale, window, cap)
        return output.transpose(1, 2), None
    if not dropout and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        made = _variable_length(query, key, value, cu_seq_lens_q, longest, scale, window)
        if made is not None:
            return made, None
    return _by_document(query, key, value, cu_seq_lens_q, scale, window, cap, dropout), None


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> Tensor | None:
    """torch's variable-length attention as the installed release (2.11 to 2.13) spells it; None if it has no window."""
    from torch.nn.attention.varlen import varlen_attn

    function: Any = varlen_attn
    known = inspect.signature(function).parameters
    if "window_size" in known:
        # So many keys before the token itself, and none after it.
        settings: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0)}
    elif window:
        return None
    else:
        settings = {"is_causal": True}
    flat = [tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value)]
    if "enable_gqa" in known:
        settings["enable_gqa"] = query.shape[1] > key.shape[1]
    else:
        flat[1:] = [tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in flat[1:]]
    made: Tensor = function(*flat, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **settings)
    return made.unsqueeze(0)


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    dropout: float,
) -> Tensor:
    """One document (or block of its queries) after another, with dropout, differentiated by autograd."""
    groups, pieces = query.shape[1] // key.shape[1], []
    for rows, reach, visible_QR in blocks(cu_seqlens, window):
        q, k, v = (
            query[:, :, rows],
            *(t[:, :, reach].repeat_interleave(groups, 1) if groups > 1 else t[:, :, reach] for t in (key, value)),
        )
        if softcap:
            scores_QR = (q @ k.transpose(-1, -2)).to(exact_dtype(q.dtype)) * (scale / softcap)
            if visible_QR is None:
                visible_QR = torch.ones(scores_QR.shape[-2:], dtype=torch.bool, device=q.device).tril()
            weights_QR = (scores_QR.tanh() * softcap).masked_fill(~visible_QR, -torch.inf).softmax(-1).to(v.dtype)
            pieces.append(F.dropout(weights_QR, dropout) @ v)
        else:
            causal = visible_QR is None
            pieces.append(F.scaled_dot_product_attention(q, k, v, visible_QR, dropout, is_causal=causal, scale=scale))
    return torch.cat(pieces, dim=2).transpose(1, 2)


def register() -> None:
    """Make PACKED known to transformers (idempotent)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


def use_own(model: Any) -> None:
    """Let `model` attend in its own way again, as what reads it later expects: by the fused kernel where it can."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # Gemma 2: capped logits
        model.set_attn_implementation("eager")


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """`use_own` for a while (generation between updates); afterwards it attends as before."""
    before = model.config._attn_implementation
    use_own(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# --- the proof ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def switch(model: Any, *, writes: bool = True) -> bool:
    """Let `model` attend packed documents, after a proof on two short ones that it computes the same.

    `writes` False: one without a head over the vocabulary.

    False, with the model as it was, where it would not: layers that carry state from one document into the next,
    attention of another kind, or logits that training cannot compute from the last hidden state (see `loss.head_of`).
    Call it before weights are quantized or layers compiled.
    """
    register()
    own, was_training = model.config._attn_implementation, model.training
    model.eval()
    try:
        with _short_windows(model):
            proven = (not writes or plain_logits_agree(model)) and _documents_agree(
                model, model.get_decoder() if writes else model.base_model
            )
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AssertionError, NotImplementedError, AttributeError, KeyError, RuntimeError):
        # Each is a way in which an architecture shows that it has no place for document boundaries.
        proven = False
    finally:
        model.train(was_training)
    if not proven:
        model.set_attn_implementation(own)
    return proven


def _documents_agree(model: Any, decoder: Any) -> bool:
    """Whether the second of two packed documents has the hidden states that it has alone. Sets PACKED."""
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    lengths = (5, 9)
    ids_1T = (7 * torch.arange(sum(lengths), device=device) + 1).remainder(vocabulary).unsqueeze(0)
    alone_1TD = decoder(input_ids=ids_1T[:, lengths[0] :], use_cache=False).last_hidden_state
    model.set_attn_implementation(PACKED)
    if model.config._attn_implementation != PACKED:
        return False
    packed_1TD = decoder(
        input_ids=ids_1T,
        position_ids=torch.cat([torch.arange(length) for length in lengths]).to(device).unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device),
        max_length_q=max(lengths),
    ).last_hidden_state
    return agree(packed_1TD[:, lengths[0] :], alone_1TD)


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Shorten every sliding window and attention chunk to PROOF_WINDOW for a while."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            if owner is not None:
                owners[id(owner)] = owner
    before: list[tuple[Any, str, int]] = []
    for owner in owners.values():
        for name in _WINDOW_SETTINGS:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > PROOF_WINDOW:
                before.append((owner, name, value))
    try:
        for owner, name, _ in before:
            setattr(owner, name, PROOF_WINDOW)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
