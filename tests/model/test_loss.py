"""The chunked loss is the whole loss: value and both gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def full_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """All logits at once."""
    logits = F.linear(hidden, head, bias) * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=loss.IGNORED, reduction="sum")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_bias_cap_and_multiplier(
    monkeypatch: pytest.MonkeyPatch, with_bias: bool, softcap: float | None, multiplier: float
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 16 * 4 * VOCABULARY)
    hidden, head, labels = inputs(torch.float64)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True) if with_bias else None
    learned = [tensor for tensor in (hidden, head, bias) if tensor is not None]
    settings = {"bias": bias, "softcap": softcap, "multiplier": multiplier}
    made = loss.chunked_cross_entropy(hidden, head, labels, 0.5, **settings)  # type: ignore[arg-type]
    meant = 0.5 * full_loss(hidden, head, labels, **settings)  # type: ignore[arg-type]
    assert made.item() == pytest.approx(meant.item(), rel=1e-12)
    for mine, exact in zip(torch.autograd.grad(3 * made, learned), torch.autograd.grad(3 * meant, learned)):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_vocabulary_of_151936(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    """fp32 against fp64 to 1e-5 of the largest entry, in three chunks, a third of the positions without a label."""
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 16 * 4 * 151_936)
    torch.manual_seed(0)
    hidden, head, bias = torch.randn(60, 16), torch.randn(151_936, 16), torch.randn(151_936)
    labels = torch.randint(0, 151_936, (60,))
    labels[::3] = loss.IGNORED
    exact = [tensor.double().requires_grad_() for tensor in (hidden, head, bias)]
    mine = [tensor.requires_grad_() for tensor in (hidden, head, bias)]
    meant = full_loss(exact[0], exact[1], labels, bias=exact[2], softcap=softcap) / 40
    made = loss.chunked_cross_entropy(mine[0], mine[1], labels, 1 / 40, bias=mine[2], softcap=softcap)
    assert made.item() == pytest.approx(meant.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(made, mine), torch.autograd.grad(meant, exact)):
        assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max()


class _Peak(TorchDispatchMode):
    """Bytes of the storages that operators make under it, alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in given | self.known:
                key, storage = self._key(tensor), tensor.untyped_storage()
                self.known.add(key)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return made

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def peak_bytes(positions: int, vocabulary: int, *, frozen: bool = False, dtype: torch.dtype | None = None) -> int:
    """The most that loss and backward hold beside their inputs, positions of width 4."""
    hidden = torch.randn(positions, 4, requires_grad=True)
    head = torch.randn(vocabulary, 4, requires_grad=not frozen)
    labels = torch.randint(0, vocabulary, (positions,))
    with _Peak() as peak:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            made = loss.chunked_cross_entropy(hidden, head, labels)
        made.backward()
    return peak.peak


def test_the_peak_is_measured() -> None:
    """All logits at once, as a check of the instrument: logits, their log-softmax and their gradient of 1.2 MB each."""
    hidden, head = torch.randn(300, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with _Peak() as peak:
        full_loss(hidden, head, torch.randint(0, 1000, (300,))).backward()
    assert 2 * 1_200_000 <= peak.peak <= 3.2 * 1_200_000
    assert peak.alive < 50_000


def test_the_peak_does_not_grow_with_positions_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as many positions: their own 16 bytes a few times more, but no logits (80 kB a position)."""
    chunk = 32 * 4 * 20_000
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", chunk)
    few, many = peak_bytes(128, 20_000), peak_bytes(1024, 20_000)
    assert many - few <= (1024 - 128) * 16 * 4
    assert many <= 3 * chunk + 2 * 20_000 * 16


def test_a_frozen_head_needs_no_room_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 16 * 4 * 20_000)
    assert peak_bytes(64, 20_000) - peak_bytes(64, 20_000, frozen=True) == 20_000 * 4 * 4


def test_the_gradient_of_the_head_is_made_once_and_not_copied() -> None:
    """The buffer that forward filled is the `.grad` itself."""
    hidden, head, labels = inputs(torch.float32)
    made = loss.chunked_cross_entropy(hidden, head, labels)
    assert made.grad_fn is not None
    filled = made.grad_fn.gradients[1].data_ptr()  # type: ignore[attr-defined]
    made.backward()
    assert head.grad is not None and head.grad.data_ptr() == filled


def test_hooks_that_change_what_is_saved_leave_the_gradients_alone() -> None:
    """Activations may be kept in 8 bits; the gradients that forward made are no activations."""
    hidden, head, labels = inputs(torch.float32)
    meant = torch.autograd.grad(loss.chunked_cross_entropy(hidden, head, labels), (hidden, head))
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 0, lambda kept: kept):
        made = loss.chunked_cross_entropy(hidden, head, labels)
    for mine, exact in zip(torch.autograd.grad(made, (hidden, head)), meant):
        assert torch.equal(mine, exact)


def test_a_second_backward_is_an_error() -> None:
    hidden, head, labels = inputs(torch.float32)
    made = loss.chunked_cross_entropy(hidden, head, labels)
    made.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        made.backward()


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
