"""Losses straight from hidden states, a chunk of positions at a time: the logits never exist as a whole.

Forward computes the loss and, in the same pass, the gradients with respect to hidden states and head, so that nothing
of size positions x vocabulary is kept for the backward. Positions without a label are dropped before any product; what
needs no gradient (a frozen head) gets no room for one.

`head_of` says how a model makes logits of hidden states, by its configuration; `plain_logits_agree` proves it.

Shapes: N positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
# Logits of one chunk stay near so many bytes: large enough for full matrix-product speed, small beside a model. A card
# is so fast at the products that summing the head's gradient in memory, once a chunk, would take longer in small ones.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}


class Head(NamedTuple):
    """logits = cap((hidden @ weight.T + bias) x multiplier), where cap(x) = softcap x tanh(x / softcap)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    multiplier: float = 1.0


def head_of(model: Any) -> Head | None:
    """How `model` makes logits, as far as its configuration says; None if its output layer is not a plain matrix.

    Gemma 2 caps them, Granite divides and Cohere and Falcon-H1 multiply them by a number.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        return None
    config, multiplier = model.config.get_text_config(), 1.0
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        multiplier *= getattr(config, name, None) or 1.0
    multiplier /= getattr(config, "logits_scaling", None) or 1.0
    return Head(layer.weight, layer.bias, softcap, multiplier)


def agree(made: Tensor, meant: Tensor) -> bool:
    """Whether two computations of the same numbers differ by no more than rounding does."""
    if meant.dtype in (torch.float16, torch.bfloat16):
        tolerance = 5e-2
    else:
        tolerance = 1e-4 if meant.device.type == "cpu" else 5e-3  # a card multiplies with the mantissa of TF32
    return bool((made - meant).abs().max() <= tolerance * meant.abs().max())


@torch.no_grad()
def plain_logits_agree(model: Any) -> bool:
    """Whether `head_of` gives the logits of `model`, tried on a short document (nothing random is drawn in eval mode).

    The model must attend in its own way, without document boundaries.
    """
    head = head_of(model)
    if head is None:
        return False
    kept: list[Any] = []
    handle = model.get_decoder().register_forward_hook(lambda *call: kept.append(call[-1]))
    try:
        rows = model.get_input_embeddings().weight.shape[0]
        ids_1T = (7 * torch.arange(6, device=model.device) + 1).remainder(rows).unsqueeze(0)
        logits_1TV = model(input_ids=ids_1T, use_cache=False).logits
    finally:
        handle.remove()
    hidden_1TD = getattr(kept[-1], "last_hidden_state", None) if kept else None
    if hidden_1TD is None:
        return False
    made_1TV = F.linear(hidden_1TD.to(head.weight.dtype), head.weight, head.bias) * head.multiplier
    if head.softcap is not None:
        made_1TV = head.softcap * torch.tanh(made_1TV / head.softcap)
    return made_1TV.shape == logits_1TV.shape and agree(made_1TV, logits_1TV)


def chunk_positions(vocabulary: int, device_type: str) -> int:
    return max(16, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // (4 * vocabulary))


# Of the logits of a chunk, which it may write over, and its positions: the sum of the losses, and their gradient.
OfLogits = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        kept_K: Tensor,
        of_logits: OfLogits,
        chunk: int,
        scale: float,
        softcap: float | None,
        multiplier: float,
    ) -> Tensor:
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        # Sums are fp32 at least (fp64 for fp64 input).
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        head = head_VD.to(dtype)
        grad_hidden, grad_head, grad_bias = (
            torch.zeros_like(tensor, dtype=kind) if needed and tensor is not None else None
            for tensor, kind, needed in zip(
                (hidden_ND, head_VD, bias_V), (hidden_ND.dtype, exact, exact), ctx.needs_input_grad
            )
        )
        learn = grad_hidden is not None or grad_head is not None or grad_bias is not None
        loss = torch.zeros((), dtype=exact, device=hidden_ND.device)
        with torch.autocast(device, enabled=False):
            for positions in torch.split(kept_K, chunk):
                rows_CD = hidden_ND[positions].to(dtype)
                logits_CV = (rows_CD @ head.T).to(exact)
                if bias_V is not None:
                    logits_CV += bias_V
                slope_CV = shape_logits(logits_CV, softcap, multiplier)
                part, grad_CV = of_logits(logits_CV, positions)
                loss += part
                if not learn:
                    continue
                grad_CV.mul_(scale * multiplier)
                if slope_CV is not None:
                    grad_CV.mul_(slope_CV)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
                product_CV = grad_CV.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[positions] = (product_CV @ head).to(grad_hidden.dtype)
                if grad_head is not None:
                    add_product(grad_head, product_CV, rows_CD)
        # Not by save_for_backward: these are gradients, which hooks that compress activations must not touch; and
        # without another owner the engine takes them as they are, where it would make a copy.
        ctx.gradients = [grad_hidden, grad_head, grad_bias]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_ND, head_VD, bias_V)]
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        assert gradients, "this loss may be backpropagated once"
        ctx.gradients = []
        # A card would have to be waited for to know.
        is_one = grad.device.type == "cpu" and grad.item() == 1
        for at, (part, dtype) in enumerate(zip(gradients, ctx.dtypes)):
            if part is not None:
                gradients[at] = (part if is_one else part.mul_(grad)).to(dtype)
        return (*gradients, None, None, None, None, None, None)


def shape_logits(logits_CV: Tensor, softcap: float | None, multiplier: float) -> Tensor | None:
    """Multiply and cap in place; returns the derivative of the cap, None without one."""
    if multiplier != 1.0:
        logits_CV.mul_(multiplier)
    if not softcap:
        return None
    logits_CV.div_(softcap).tanh_()
    slope_CV = 1 - logits_CV.square()
    logits_CV.mul_(softcap)
    return slope_CV


def _softmax_loss(logits_CV: Tensor, labels_C1: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies; and softmax - one-hot, its gradient, in place of the logits."""
    # Each logit is raised to a power once, in place: half the time of log-sum-exp and softmax one after the other.
    logits_CV.sub_(logits_CV.amax(dim=1, keepdim=True))
    meant_C1 = logits_CV.gather(1, labels_C1)
    sums_C1 = logits_CV.exp_().sum(dim=1, keepdim=True)
    loss = (sums_C1.log() - meant_C1).sum()
    grad_CV = logits_CV.mul_(sums_C1.reciprocal_())
    return loss, grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1, dtype=grad_CV.dtype))


def add_product(total_VD: Tensor, left_CV: Tensor, right_CD: Tensor) -> None:
    """total += left.T @ right, without room for a second V x D where the product has fewer bits than the total."""
    if left_CV.dtype == total_VD.dtype:
        total_VD.addmm_(left_CV.T, right_CD)
        return
    for rows_VD, columns_CV in zip(torch.split(total_VD, 16384), torch.split(left_CV, 16384, dim=1)):
        rows_VD += columns_CV.T @ right_CD


def chunked_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    labels_N: Tensor,
    scale: float = 1.0,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """`scale` times the sum over labelled positions of the cross-entropy (nats) of the logits against `labels`.

    hidden_ND: positions x width; head_VD: vocabulary x width; labels_N: ids, or -100 for a position without a label;
    `bias`, `softcap` and `multiplier` as in `Head`.
    Pass `scale = 1 / labelled positions of the whole update` for token-mean gradients under any accumulation.
    Under autocast the products run in its dtype; log-sum-exp and sums are fp32. May be backpropagated once.
    """
    kept_K = (labels_N != IGNORED).nonzero().squeeze(1)

    def of_logits(logits_CV: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _softmax_loss(logits_CV, labels_N[positions].unsqueeze(1))

    chunk = chunk_positions(head_VD.shape[0], hidden_ND.device.type)
    return chunked_loss(hidden_ND, Head(head_VD, bias, softcap, multiplier), kept_K, of_logits, chunk, scale)


def chunked_loss(
    hidden_ND: Tensor, head: Head, kept_K: Tensor, of_logits: OfLogits, chunk: int, scale: float = 1.0
) -> Tensor:
    """`scale` times the sum of a loss of the logits at the positions `kept_K`, so many at a time as `chunk` says.

    `of_logits` gives the sum over a chunk and the gradient with respect to its logits (as the head makes them).
    May be backpropagated once.
    """
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head.weight, head.bias, kept_K, of_logits, chunk, scale, head.softcap, head.multiplier
    )
    return loss
