"""Causal attention over packed documents: each token sees its own document and nothing else.

A micro-batch is one flat row of tokens; `cu_seq_lens_q` marks where documents begin and end. The function is registered
with transformers under the name PACKED, so any of its architectures that take an attention interface can use it.
On a CPU the documents are attended one after another by PyTorch's fused kernel (no mask, no wasted products); on CUDA
in 16 bits by its variable-length flash attention; otherwise, and with dropout, which those two do not have, by
scaled_dot_product_attention, document by document.

It does not know of soft-capped logits (Gemma 2), attention sinks, or layers that mix tokens in another way than by
attention: `switch` proves on two short documents that a model computes the same as without packing, and refuses others.
The CUDA path is the same interface and has not been run on a card yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onecard.errors import ConfigError

PACKED = "onecard_packed"


def _boundaries(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return [(begin, end) for begin, end in zip(ends, ends[1:]) if end > begin]


def _logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("onecard::document_attention", mutates_args=())
def document_attention(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """CPU: causal attention inside each document of one flat row (B = 1, equal numbers of heads).

    Returns the output (B, T, H, D, contiguous, viewed as B, H, T, D) and the log-sum-exp (B, H, T) for the backward.
    An operator of its own so that a compiled layer treats it as one node whatever the document lengths.
    """
    batch, heads, tokens, width = query_BHTD.shape
    output_BTHD = query_BHTD.new_empty(batch, tokens, heads, width)
    logsumexp_BHT = torch.empty(batch, heads, tokens, dtype=_logsumexp_dtype(query_BHTD.dtype))
    for begin, end in _boundaries(cu_seqlens):
        piece, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHTD[:, :, begin:end],
            key_BHTD[:, :, begin:end],
            value_BHTD[:, :, begin:end],
            0.0,
            True,
            scale=scale,
        )
        output_BTHD[:, begin:end] = piece.transpose(1, 2)
        logsumexp_BHT[:, :, begin:end] = lse
    return output_BTHD.transpose(1, 2), logsumexp_BHT


@document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, width = query.shape
    return (
        query.new_empty(batch, tokens, heads, width).transpose(1, 2),
        query.new_empty(batch, heads, tokens, dtype=_logsumexp_dtype(query.dtype)),
    )


@torch.library.custom_op("onecard::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    output_BHTD: Tensor,
    logsumexp_BHT: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `document_attention` with respect to query, key and value (each B, H, T, D)."""
    batch, heads, tokens, width = query_BHTD.shape
    made = [query_BHTD.new_zeros(batch, tokens, heads, width).transpose(1, 2) for _ in range(3)]
    for begin, end in _boundaries(cu_seqlens):
        rows = slice(begin, end)
        pieces = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHTD[:, :, rows],
            query_BHTD[:, :, rows],
            key_BHTD[:, :, rows],
            value_BHTD[:, :, rows],
            output_BHTD[:, :, rows],
            logsumexp_BHT[:, :, rows].contiguous(),
            0.0,
            True,
            scale=scale,
        )
        for whole, piece in zip(made, pieces):
            whole[:, :, rows] = piece
    return made[0], made[1], made[2]


@document_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, width = query.shape
    made = [query.new_empty(batch, tokens, heads, width).transpose(1, 2) for _ in range(3)]
    return made[0], made[1], made[2]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, output, logsumexp, cu_seqlens = ctx.saved_tensors
    grads = document_attention_backward(grad, query, key, value, output, logsumexp, cu_seqlens, ctx.scale)
    return (*grads, None, None)


document_attention.register_autograd(_backward, setup_context=_keep_for_backward)


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

    `cu_seq_lens_q` (int32, on the CPU for CPU tensors) holds 0 and the running ends of the documents. A sliding window
    is allowed only where no document is longer than it, for then it changes nothing.
    """
    assert cu_seq_lens_q is not None, "the loop passes document boundaries to every forward"
    assert attention_mask is None, "boundaries replace masks"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if sliding_window is not None and max_length_q is not None and max_length_q > sliding_window:
        raise ConfigError(
            f"Documents of {max_length_q} tokens are longer than the model's sliding window of {sliding_window}.",
            f"Set max_length to at most {sliding_window}.",
        )
    if softcap or s_aux is not None:
        raise ConfigError(
            f"The model {'caps its attention logits' if softcap else 'has attention sinks'}, which packed attention "
            "does not do yet.",
            "Use a Llama, Qwen or Mistral kind of model.",
        )
    groups = query.shape[1] // key.shape[1]
    # Under autocast rotary embeddings leave fp32 queries and keys beside 16-bit values; the kernel wants one format.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.is_cuda and not dropout and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        flat = [tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value)]
        if groups > 1:
            flat[1], flat[2] = (tensor.repeat_interleave(groups, dim=1) for tensor in flat[1:])
        # The third positional pair is the causal window: everything before, nothing after.
        made = _varlen(varlen_attn, flat, cu_seq_lens_q, int(max_length_q or query.shape[2]), scale)
        return made.unsqueeze(0), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if query.device.type == "cpu" and not dropout:
        output, _ = document_attention(query, key, value, cu_seq_lens_q, scale)
        return output.transpose(1, 2), None
    pieces = [
        F.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            None,
            dropout,
            is_causal=True,
            scale=scale,
        )
        for begin, end in _boundaries(cu_seq_lens_q)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _varlen(function: Any, flat: list[Tensor], cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    """torch's variable-length attention, causal, in the spelling of the installed release (2.11 to 2.13)."""
    import inspect

    causal = {"is_causal": True} if "is_causal" in inspect.signature(function).parameters else {"window_size": (-1, 0)}
    made: Tensor = function(*flat, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **causal)
    return made


def register() -> None:
    """Make PACKED known to transformers (idempotent)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


@torch.no_grad()
def switch(model: Any) -> None:
    """Let `model` (fp32) attend packed documents, after a proof on two short ones that it computes the same.

    ConfigError where it would not: layers that carry state from one document into the next, attention of another kind,
    or logits that are not just the product of the last hidden state and the head (which is what training computes).
    """
    register()
    was_training = model.training
    model.eval()
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    ids_12 = torch.arange(12, device=device).remainder(vocabulary).unsqueeze(0)
    before, alone = ids_12[:, :5], ids_12[:, 5:]
    refusal = ConfigError(
        f"A {model.config.model_type} model computes something else when documents are packed into one row.",
        "Use a Llama, Qwen or Mistral kind of model.",
    )
    try:
        plain = model(alone, use_cache=False)
        hidden_17D = model.get_decoder()(alone, use_cache=False).last_hidden_state
        model.set_attn_implementation(PACKED)
        packed_17D = model.get_decoder()(
            input_ids=torch.cat([before, alone], dim=1),
            position_ids=torch.cat([torch.arange(5), torch.arange(7)]).to(device).unsqueeze(0),
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32, device=device),
            max_length_q=7,
        ).last_hidden_state[:, 5:]
    except (TypeError, ValueError, AssertionError, NotImplementedError, AttributeError) as fault:
        raise refusal from fault
    finally:
        model.train(was_training)
    logits = hidden_17D @ model.get_output_embeddings().weight.T
    tolerance = 1e-3 if device.type == "cpu" else 5e-3  # a card multiplies fp32 with the mantissa of TF32
    for made, meant in ((packed_17D, hidden_17D), (logits, plain.logits)):
        if not float((made - meant).abs().max()) <= tolerance * float(meant.abs().max()):
            raise refusal
