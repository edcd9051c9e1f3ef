"""The chunked loss is the whole loss: value and both gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from onecard.model import loss

POSITIONS, WIDTH, VOCABULARY = 70, 8, 33


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=dtype, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (POSITIONS,))
    labels[::3] = loss.IGNORED
    return hidden, head, labels


@pytest.mark.parametrize("chunk_bytes", [16 * 4 * VOCABULARY, 1 << 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_value_and_gradients_equal_the_full_computation(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", chunk_bytes)  # 16 positions a chunk: three chunks; or all at once
    hidden, head, labels = inputs(dtype)
    exact_hidden, exact_head = (t.detach().double().requires_grad_() for t in (hidden, head))
    meant = 0.25 * F.cross_entropy(exact_hidden @ exact_head.T, labels, ignore_index=loss.IGNORED, reduction="sum")
    (3 * meant).backward()
    made = loss.chunked_cross_entropy(hidden, head, labels, 0.25)
    (3 * made).backward()
    assert made.item() == pytest.approx(meant.item(), rel=tolerance)
    for tensor, exact in ((hidden, exact_hidden), (head, exact_head)):
        assert tensor.grad is not None and exact.grad is not None
        torch.testing.assert_close(tensor.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_a_tied_head_gets_both_of_its_gradients() -> None:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, VOCABULARY, (POSITIONS,)), torch.randint(0, VOCABULARY, (POSITIONS,))
    made, meant = (
        torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)
    )
    loss.chunked_cross_entropy(made[ids], made, labels).backward()
    F.cross_entropy(meant[ids] @ meant.T, labels, reduction="sum").backward()
    assert made.grad is not None and meant.grad is not None
    torch.testing.assert_close(made.grad, meant.grad, rtol=1e-5, atol=1e-5)


def test_without_a_label_loss_and_gradients_are_zero() -> None:
    hidden, head, labels = inputs(torch.float32)
    made = loss.chunked_cross_entropy(hidden, head, torch.full_like(labels, loss.IGNORED))
    made.backward()
    assert made.item() == 0
    assert hidden.grad is not None and head.grad is not None
    assert not hidden.grad.any() and not head.grad.any()


def test_hand_computed_value() -> None:
    """Logits (0, ln 3): the second has a probability of 3/4, the first of 1/4."""
    hidden, head = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[0.0], [torch.tensor(3.0).log()]])
    made = loss.chunked_cross_entropy(hidden, head, torch.tensor([0, 1, loss.IGNORED]))
    assert made.item() == pytest.approx(1.3862944 + 0.2876821, abs=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, labels = inputs(torch.float32)
    loss.chunked_cross_entropy(hidden, head.detach(), labels).backward()
    assert hidden.grad is not None and head.grad is None


def test_under_autocast_products_are_16_bit_and_gradients_keep_their_form() -> None:
    hidden, head, labels = inputs(torch.float32)
    plain = loss.chunked_cross_entropy(hidden, head, labels).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = loss.chunked_cross_entropy(hidden, head, labels)
    made.backward()
    assert made.dtype == torch.float32
    assert made.item() == pytest.approx(plain, rel=0.02)
    assert made.item() != plain
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    assert head.grad is not None and head.grad.dtype == torch.float32
