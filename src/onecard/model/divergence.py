"""What a model is told by another one, token by token, straight from the hidden states of both.

In: hidden states and heads of a student and a teacher at the same positions. Out: the divergence of their predictions,
mixed with the cross-entropy of the token that stands there (Hinton et al. 2015), and its gradient for the student. The
logits of neither exist as a whole. Both count the same tokens; rows that only one of them has stand for none.

Shapes: N positions, C positions of a chunk, D width of the student, E of the teacher, V rows of the student's head, M
those that the teacher's has too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onecard.model.loss import IGNORED, Head, chunk_positions, chunked_loss, shape_logits


@dataclass(frozen=True)
class Mixture:
    """How two losses are mixed: `weight` of the divergence at a temperature, the rest cross-entropy."""

    weight: float = 0.5
    temperature: float = 1.0


@dataclass(frozen=True)
class Parts:
    """Sums over the labelled positions, in nats, at temperature as it stands: divergence and cross-entropy."""

    divergence: Tensor
    cross_entropy: Tensor


def chunked_distillation(
    hidden_ND: Tensor,
    head: Head,
    guide_NE: Tensor,
    guide_head: Head,
    labels_N: Tensor,
    mixture: Mixture,
    scale: float = 1.0,
) -> tuple[Tensor, Parts]:
    """`scale` times the sum over labelled positions of w T^2 KL(teacher || student) + (1 - w) x cross-entropy, in nats.

    Both distributions of the divergence are those at temperature T; its square keeps gradients as large as those of the
    cross-entropy. The teacher's is over the rows that both heads have. The loss may be backpropagated once, to hidden
    states and head of the student; the parts have no gradient.
    """
    kept_K = (labels_N != IGNORED).nonzero().squeeze(1)
    rows, device = head.weight.shape[0], hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else guide_NE.dtype
    exact = torch.promote_types(torch.promote_types(hidden_ND.dtype, guide_NE.dtype), torch.float32)
    teacher_ME = guide_head.weight[:rows].detach().to(dtype)
    bias_M = None if guide_head.bias is None else guide_head.bias[:rows].detach()
    divergence = torch.zeros((), dtype=exact, device=hidden_ND.device)
    cross_entropy = torch.zeros_like(divergence)

    def of_logits(logits_CV: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        guide_CM = (guide_NE[positions].detach().to(dtype) @ teacher_ME.T).to(logits_CV.dtype)
        if bias_M is not None:
            guide_CM += bias_M
        shape_logits(guide_CM, guide_head.softcap, guide_head.multiplier)
        part, told, learned, grad_CV = _mixed(logits_CV, guide_CM, labels_N[positions].unsqueeze(1), mixture)
        divergence.add_(told)
        cross_entropy.add_(learned)
        return part, grad_CV

    # Logits of both stand side by side.
    chunk = chunk_positions(rows + teacher_ME.shape[0], device)
    loss = chunked_loss(hidden_ND, head, kept_K, of_logits, chunk, scale)
    return loss, Parts(divergence, cross_entropy)


def _mixed(
    logits_CV: Tensor, guide_CM: Tensor, labels_C1: Tensor, mixture: Mixture
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of a chunk, its divergence, its cross-entropy, and the gradient with respect to the student's logits."""
    weight, temperature = mixture.weight, mixture.temperature
    shared = guide_CM.shape[1]
    plain_CV = logits_CV.log_softmax(1)
    cross_entropy = -plain_CV.gather(1, labels_C1).sum()
    student_CV = plain_CV if temperature == 1 else (logits_CV / temperature).log_softmax(1)
    teacher_CM = guide_CM.div_(temperature).log_softmax(1)
    meant_CM = teacher_CM.exp()
    divergence = (meant_CM * teacher_CM.sub_(student_CV[:, :shared])).sum()
    # Of w T^2 KL: w T (student - teacher); of the cross-entropy: softmax - one-hot.
    grad_CV = torch.exp(student_CV, out=logits_CV)
    grad_CV[:, :shared] -= meant_CM
    grad_CV.mul_(weight * temperature)
    if weight < 1:
        grad_CV.add_(plain_CV.exp_(), alpha=1 - weight)
        grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, weight - 1, dtype=grad_CV.dtype))
    loss = weight * temperature**2 * divergence + (1 - weight) * cross_entropy
    return loss, divergence, cross_entropy, grad_CV
