"""Log-probabilities of given tokens straight from hidden states, a chunk of positions at a time.

The logits never exist as a whole: the backward pass makes those of a chunk once more. What a preference is learned
from is a function of these few numbers, so their gradient is known only after all of them, unlike that of `loss.py`.

Shapes: K positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.model.loss import Head, add_product, chunk_positions, shape_logits


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        tokens_K: Tensor,
        softcap: float | None,
        multiplier: float,
    ) -> Tensor:
        device = hidden_KD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_KD.dtype
        ctx.save_for_backward(hidden_KD, head_VD, bias_V, tokens_K)
        ctx.made = dtype, softcap, multiplier
        found_K = torch.zeros(
            len(tokens_K), dtype=torch.promote_types(hidden_KD.dtype, torch.float32), device=hidden_KD.device
        )
        head = head_VD.to(dtype)
        size = chunk_positions(head.shape[0], device)
        with torch.autocast(device, enabled=False):
            for at in range(0, len(tokens_K), size):
                part = slice(at, at + size)
                logits_CV, _ = _logits(hidden_KD[part].to(dtype), head, bias_V, softcap, multiplier, found_K.dtype)
                meant_C = logits_CV.gather(1, tokens_K[part, None]).squeeze(1)
                found_K[part] = meant_C - logits_CV.logsumexp(1)
        return found_K

    @staticmethod
    def backward(ctx: Any, slope_K: Tensor) -> tuple[Tensor | None, ...]:
        hidden_KD, head_VD, bias_V, tokens_K = ctx.saved_tensors
        dtype, softcap, multiplier = ctx.made
        exact = slope_K.dtype
        grad_hidden, grad_head, grad_bias = (
            torch.zeros_like(tensor, dtype=kind) if needed and tensor is not None else None
            for tensor, kind, needed in zip(
                (hidden_KD, head_VD, bias_V), (hidden_KD.dtype, exact, exact), ctx.needs_input_grad
            )
        )
        head, size = head_VD.to(dtype), chunk_positions(head_VD.shape[0], hidden_KD.device.type)
        with torch.autocast(hidden_KD.device.type, enabled=False):
            for at in range(0, len(tokens_K), size):
                part = slice(at, at + size)
                rows_CD, tokens_C1 = hidden_KD[part].to(dtype), tokens_K[part, None]
                logits_CV, cap_CV = _logits(rows_CD, head, bias_V, softcap, multiplier, exact)
                # The log-probability of a token grows by one-hot - softmax.
                grad_CV = logits_CV.softmax(1).neg_()
                grad_CV.scatter_add_(1, tokens_C1, torch.ones_like(tokens_C1, dtype=exact))
                grad_CV.mul_(slope_K[part, None] * multiplier)
                if cap_CV is not None:
                    grad_CV.mul_(cap_CV)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
                product_CV = grad_CV.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (product_CV @ head).to(grad_hidden.dtype)
                if grad_head is not None:
                    add_product(grad_head, product_CV, rows_CD)
        if grad_head is not None:
            grad_head = grad_head.to(head_VD.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_head, grad_bias, None, None, None


def _logits(
    rows_CD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    softcap: float | None,
    multiplier: float,
    exact: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Logits of a chunk, and the derivative of their cap (None without one)."""
    logits_CV = (rows_CD @ head_VD.T).to(exact)
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV, shape_logits(logits_CV, softcap, multiplier)


def log_probabilities(hidden_KD: Tensor, head: Head, tokens_K: Tensor) -> Tensor:
    """K natural logarithms (fp32 at least) of the probability of `tokens_K` (ids) after each of the hidden states.

    Under autocast products run in its dtype. Differentiable with respect to hidden states, head and bias.
    """
    found: Tensor = _ChunkedLogProbabilities.apply(  # type: ignore[no-untyped-call]
        hidden_KD, head.weight, head.bias, tokens_K, head.softcap, head.multiplier
    )
    return found
