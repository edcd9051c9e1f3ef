"""The operator under packed attention: causal attention inside each document of one flat row, forward and backward.

In: queries (1, H, T, D), keys and values (1, H_kv, T, D), and where the documents end. A document is attended by
PyTorch's fused CPU kernel, without a mask. Where a sliding window is shorter than a document, its queries are taken in
blocks, each against the keys in its reach; where logits are capped, which no kernel does, a block is computed plainly.
Either way nothing of size T x T exists, and what is kept for the backward is the output and its log-sum-exp.

Heads that share a key-value head are laid along the batch dimension over views of it, so shared keys are never copied.
It does not know of dropout or attention sinks, nor which attention a model wants (see `attention`).

Shapes: H heads, K key-value heads, G = H / K of them for each, T tokens of the row, D width of a head, Q queries of a
block, R keys in its reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Queries of a block: enough for full speed of the products, and a mask or scores that stay small.
BLOCK_QUERIES = 256


class Block(NamedTuple):
    """Queries and the keys in their reach, as slices of the row; the mask is None where it is just causal."""

    queries: slice
    keys: slice
    visible_QR: Tensor | None


def blocks(cu_seqlens: Tensor, window: int, *, most: int | None = None) -> Iterator[Block]:
    """The blocks of all documents. `window`: keys that a query sees, itself included (0: all before it).

    Documents are split into blocks of `most` queries; without it only those that are longer than the window are.
    """
    ends, masks = cu_seqlens.tolist(), dict[tuple[int, int], Tensor | None]()
    for begin, end in zip(ends, ends[1:]):
        size = most or end - begin
        if window and not most and end - begin > window:
            size = min(BLOCK_QUERIES, max(16, window // 2))
        for first in range(begin, end, max(1, size)):
            last = min(first + size, end)
            reach = max(begin, first - window + 1) if window else begin
            shape = (last - first, last - reach)
            if shape not in masks:
                masks[shape] = _visible(*shape, window, cu_seqlens.device)
            yield Block(slice(first, last), slice(reach, last), masks[shape])


def _visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor | None:
    """Which keys each query sees, the last query being beside the last key; None for a plain triangle."""
    if queries == keys and not (window and keys > window):
        return None
    back_QR = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (back_QR >= 0) & (back_QR < window) if window else back_QR >= 0


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over tensors of `dtype`: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


# --- shapes that the operator and its description for the compiler share -----------------------------------------


def _new_output(query_1HTD: Tensor) -> tuple[Tensor, Tensor]:
    """Output (laid out as 1, T, H, D, which is how the projection after it reads) and log-sum-exp (1, H, T)."""
    _, heads, tokens, width = query_1HTD.shape
    output_1HTD = query_1HTD.new_empty(1, tokens, heads, width).transpose(1, 2)
    return output_1HTD, query_1HTD.new_empty(1, heads, tokens, dtype=exact_dtype(query_1HTD.dtype))


def _new_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = [tensor.new_zeros(tensor.transpose(1, 2).shape).transpose(1, 2) for tensor in (query, key, value)]
    return made[0], made[1], made[2]


def _by_group(tensor_1HT: Tensor, key_heads: int) -> Tensor:
    """1, H, T(, D) -> G, K, T(, D): a view. Head h uses key-value head h // G."""
    return tensor_1HT.view(key_heads, -1, *tensor_1HT.shape[2:]).transpose(0, 1)


# --- forward ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("onecard::document_attention", mutates_args=())
def document_attention(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: output (1, H, T, D) and log-sum-exp (1, H, T) for the backward.

    cu_seqlens: int32, 0 and the running ends of the documents. `window` and `softcap`: 0 for none. On a CPU; with
    `softcap` on any device. An operator of its own, so a compiled layer has one node for it whatever the lengths.
    """
    key_heads = key_1KTD.shape[1]
    output_1HTD, logsumexp_1HT = _new_output(query_1HTD)
    query, output, logsumexp = (_by_group(tensor, key_heads) for tensor in (query_1HTD, output_1HTD, logsumexp_1HT))
    key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key_1KTD, value_1KTD))
    for rows, reach, visible_QR in blocks(cu_seqlens, window, most=BLOCK_QUERIES if softcap else None):
        pieces = query[:, :, rows], key[:, :, reach], value[:, :, reach]
        if softcap:
            made, lse = _capped_forward(*pieces, visible_QR, scale, softcap)
        else:
            made, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *pieces, 0.0, visible_QR is None, attn_mask=_additive(visible_QR, query.dtype), scale=scale
            )
        output[:, :, rows], logsumexp[:, :, rows] = made, lse
    return output_1HTD, logsumexp_1HT


@document_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return _new_output(query)


def _additive(visible_QR: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if visible_QR is None:
        return None
    return torch.zeros(visible_QR.shape, dtype=dtype).masked_fill_(~visible_QR, -torch.inf)


def _capped_scores(
    query_GKQD: Tensor, key_GKRD: Tensor, visible_QR: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """softcap x tanh(scores / softcap), masked; and the tanh alone, of which the derivative is made."""
    scores_GKQR = (query_GKQD @ key_GKRD.transpose(-1, -2)).to(exact_dtype(query_GKQD.dtype))
    tanh_GKQR = scores_GKQR.mul_(scale / softcap).tanh_()
    if visible_QR is None:
        visible_QR = torch.ones(scores_GKQR.shape[-2:], dtype=torch.bool, device=scores_GKQR.device).tril()
    return (tanh_GKQR * softcap).masked_fill_(~visible_QR, -torch.inf), tanh_GKQR


def _capped_forward(
    query: Tensor, key: Tensor, value: Tensor, visible_QR: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    scores_GKQR, _ = _capped_scores(query, key, visible_QR, scale, softcap)
    logsumexp_GKQ1 = scores_GKQR.logsumexp(-1, keepdim=True)
    weights_GKQR = scores_GKQR.sub_(logsumexp_GKQ1).exp_().to(value.dtype)
    return weights_GKQR @ value, logsumexp_GKQ1.squeeze(-1)


# --- backward -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("onecard::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_1HTD: Tensor,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    output_1HTD: Tensor,
    logsumexp_1HT: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `document_attention` with respect to query, key and value, each in the shape of its tensor."""
    key_heads = key_1KTD.shape[1]
    by_head = (grad_1HTD, query_1HTD, output_1HTD, logsumexp_1HT)
    grad, query, output, logsumexp = (_by_group(tensor, key_heads) for tensor in by_head)
    key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key_1KTD, value_1KTD))
    made = _new_gradients(query_1HTD, key_1KTD, value_1KTD)
    grad_query = _by_group(made[0], key_heads)
    # Keys in reach of several blocks sum over them: in fp32, that sums of 16-bit pieces do not lose digits.
    grad_key, grad_value = (tensor.to(exact_dtype(tensor.dtype)) for tensor in made[1:])
    for rows, reach, visible_QR in blocks(cu_seqlens, window, most=BLOCK_QUERIES if softcap else None):
        pieces = query[:, :, rows], key[:, :, reach], value[:, :, reach], output[:, :, rows], logsumexp[:, :, rows]
        if softcap:
            found = _capped_backward(grad[:, :, rows], *pieces, visible_QR, scale, softcap)
        else:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, rows],
                *pieces[:4],
                pieces[4].contiguous(),
                0.0,
                visible_QR is None,
                attn_mask=_additive(visible_QR, query.dtype),
                scale=scale,
            )
        grad_query[:, :, rows] = found[0]
        grad_key[0, :, reach] += found[1].sum(0)
        grad_value[0, :, reach] += found[2].sum(0)
    return made[0], made[1].copy_(grad_key), made[2].copy_(grad_value)


@document_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_gradients(query, key, value)


def _capped_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    visible_QR: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one block, its weights computed again from the log-sum-exp."""
    scores_GKQR, tanh_GKQR = _capped_scores(query, key, visible_QR, scale, softcap)
    exact, dtype = scores_GKQR.dtype, query.dtype
    weights_GKQR = scores_GKQR.sub_(logsumexp.unsqueeze(-1)).exp_()
    grad_value = weights_GKQR.to(dtype).transpose(-1, -2) @ grad
    through_GKQ1 = (grad.to(exact) * output.to(exact)).sum(-1, keepdim=True)
    grad_scores = (grad @ value.transpose(-1, -2)).to(exact).sub_(through_GKQ1).mul_(weights_GKQR)
    grad_scores = grad_scores.mul_(1 - tanh_GKQR.square_()).mul_(scale).to(dtype)
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, grad_value


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, *settings = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.settings = settings


def _backward(ctx: Any, grad: Tensor, _grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    grads = document_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*grads, None, None, None, None)


document_attention.register_autograd(_backward, setup_context=_keep_for_backward)
