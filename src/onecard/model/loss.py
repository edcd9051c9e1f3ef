"""Cross-entropy straight from hidden states, a chunk of positions at a time: the logits never exist as a whole.

Forward computes the loss and, in the same pass, the gradients with respect to hidden states and head, so that nothing
of size positions x vocabulary is kept for the backward. Positions without a label are dropped before any product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
# Logits of one chunk stay near this many bytes: large enough for full matrix-product speed, small beside a model.
CHUNK_BYTES = 64 << 20


def _chunk_rows(vocabulary: int) -> int:
    return max(16, CHUNK_BYTES // (4 * vocabulary))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, scale: float) -> Tensor:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        compute = torch.get_autocast_dtype(hidden_ND.device.type)
        autocast = torch.is_autocast_enabled(hidden_ND.device.type)
        dtype = compute if autocast else hidden_ND.dtype
        # Sums are fp32 at least (fp64 for fp64 input).
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        head = head_VD.to(dtype)
        grad_hidden = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=exact) if needs_head else None
        kept_N = (labels_N != IGNORED).nonzero().squeeze(1)
        loss = torch.zeros((), dtype=exact, device=hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for positions in torch.split(kept_N, _chunk_rows(head.shape[0])):
                rows_CD = hidden_ND[positions].to(dtype)
                labels_C = labels_N[positions].unsqueeze(1)
                logits_CV = (rows_CD @ head.T).to(exact)
                logsumexp_C1 = torch.logsumexp(logits_CV, dim=1, keepdim=True)
                loss += (logsumexp_C1 - logits_CV.gather(1, labels_C)).sum()
                if not (needs_hidden or needs_head):
                    continue
                # d loss / d logits = softmax - one-hot, in place of the logits.
                grad_CV = logits_CV.sub_(logsumexp_C1).exp_()
                grad_CV.scatter_add_(1, labels_C, torch.full_like(labels_C, -1, dtype=grad_CV.dtype))
                grad_CV = grad_CV.mul_(scale).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[positions] = (grad_CV @ head).to(grad_hidden.dtype)
                if grad_head is not None:
                    grad_head += (grad_CV.T @ rows_CD).to(exact)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head_VD.dtype
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        made_hidden = None if grad_hidden is None else grad_hidden.mul_(grad)
        made_head = None if grad_head is None else grad_head.mul_(grad).to(ctx.head_dtype)
        return made_hidden, made_head, None, None


def chunked_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` times the sum over labelled positions of the cross-entropy (nats) of `hidden @ head.T` against `labels`.

    hidden_ND: positions x width; head_VD: vocabulary x width; labels_N: ids, or -100 for a position without a label.
    Pass `scale = 1 / labelled positions of the whole update` for token-mean gradients under any accumulation.
    Under autocast the products run in its dtype; log-sum-exp and sums are fp32. May be backpropagated once.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, head_VD, labels_N, scale)  # type: ignore[no-untyped-call]
    return loss
