"""The chunked divergence against the whole one, written out in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from onecard.model import loss as losses
from onecard.model.divergence import Mixture, chunked_distillation
from onecard.model.loss import IGNORED, Head


def whole(
    hidden: torch.Tensor, head: Head, guide: torch.Tensor, guide_head: Head, labels: torch.Tensor, mixture: Mixture
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, divergence and cross-entropy from all logits at once."""

    def logits(states: torch.Tensor, by: Head) -> torch.Tensor:
        made = F.linear(states, by.weight, by.bias) * by.multiplier
        return made if by.softcap is None else by.softcap * torch.tanh(made / by.softcap)

    kept = labels != IGNORED
    student, teacher = logits(hidden, head)[kept], logits(guide, guide_head)[kept]
    shared = min(student.shape[1], teacher.shape[1])
    t = mixture.temperature
    q, p = (teacher[:, :shared] / t).softmax(1), (student / t).softmax(1)
    divergence = (q * (q / p[:, :shared]).log()).sum()
    cross_entropy = F.cross_entropy(student, labels[kept], reduction="sum")
    return mixture.weight * t**2 * divergence + (1 - mixture.weight) * cross_entropy, divergence, cross_entropy


@pytest.mark.parametrize(
    "mixture", [Mixture(0.5, 1.0), Mixture(1.0, 2.0), Mixture(0.3, 3.0), Mixture(0.0, 1.0)], ids=str
)
@pytest.mark.parametrize(("student_rows", "teacher_rows"), [(11, 11), (11, 14), (14, 11)])
def test_value_and_gradients_are_those_of_the_whole_computation(
    monkeypatch: pytest.MonkeyPatch, mixture: Mixture, student_rows: int, teacher_rows: int
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", {"cpu": 1, "cuda": 1})  # 16 positions a chunk: the 40 take three
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = (drawn(*shape).requires_grad_() for shape in ((40, 6), (student_rows, 6), (student_rows,)))
    head = Head(weight, bias, softcap=5.0, multiplier=0.7)
    guide, guide_head = drawn(40, 9), Head(drawn(teacher_rows, 9), drawn(teacher_rows), multiplier=1.3)
    labels = torch.randint(0, 11, (40,), generator=generator)
    labels[::7] = IGNORED
    wanted, divergence, cross_entropy = whole(hidden, head, guide, guide_head, labels, mixture)
    wanted_gradients = torch.autograd.grad(0.25 * wanted, (hidden, weight, bias))
    found, parts = chunked_distillation(hidden, head, guide, guide_head, labels, mixture, 0.25)
    assert found.item() == pytest.approx(0.25 * wanted.item(), rel=1e-12)
    assert parts.divergence.item() == pytest.approx(divergence.item(), rel=1e-12)
    assert parts.cross_entropy.item() == pytest.approx(cross_entropy.item(), rel=1e-12)
    for made, meant in zip(torch.autograd.grad(found, (hidden, weight, bias)), wanted_gradients):
        torch.testing.assert_close(made, meant, rtol=1e-10, atol=1e-12)


def test_a_student_that_says_the_same_is_told_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator).requires_grad_()
    head = Head(torch.randn(7, 4, generator=generator))
    loss, parts = chunked_distillation(hidden, head, hidden.detach(), head, torch.arange(5), Mixture(1.0, 2.0))
    loss.backward()
    assert abs(parts.divergence.item()) < 1e-6
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-6
