"""Log-probabilities a chunk at a time, beside those of whole logits in fp64."""

from __future__ import annotations

import pytest
import torch

from onecard.model import loss
from onecard.model.log_probabilities import log_probabilities
from onecard.model.loss import Head

K, D, V = 37, 8, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 16 * 4 * V)  # 16 positions at a time: two chunks and a rest


def whole(hidden: torch.Tensor, head: Head, tokens: torch.Tensor) -> torch.Tensor:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.multiplier
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize(("bias", "softcap", "multiplier"), [(False, None, 1.0), (True, 3.0, 0.5)])
def test_values_and_gradients_are_those_of_whole_logits(bias: bool, softcap: float | None, multiplier: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(K, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    made_bias = torch.randn(V, dtype=torch.float64, requires_grad=True) if bias else None
    tokens, slope = torch.randint(V, (K,)), torch.randn(K, dtype=torch.float64)
    head = Head(weight, made_bias, softcap, multiplier)
    leaves = [tensor for tensor in (hidden, weight, made_bias) if tensor is not None]
    meant = whole(hidden, head, tokens)
    made = log_probabilities(hidden, head, tokens)
    assert torch.allclose(made, meant, rtol=0, atol=1e-12)
    meant_gradients = torch.autograd.grad(meant, leaves, slope)
    made_gradients = torch.autograd.grad(made, leaves, slope)
    for one, other in zip(made_gradients, meant_gradients):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_no_token_gives_none() -> None:
    hidden = torch.randn(3, D, requires_grad=True)
    head = Head(torch.randn(V, D))
    log_probabilities(hidden, head, torch.tensor([1, 2, 3])).sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    assert log_probabilities(hidden[:0], head, torch.tensor([], dtype=torch.int64)).shape == (0,)
