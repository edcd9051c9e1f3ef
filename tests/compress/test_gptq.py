"""Codes chosen with regard to inputs."""

from __future__ import annotations

import pytest
import torch

from onecard.compress.gptq import compensated_codes, output_error
from onecard.model.integer_weights import Scheme, codes, restored, scales


def test_independent_inputs_are_rounded_to_nearest() -> None:
    torch.manual_seed(0)
    weight, scheme = torch.randn(6, 96), Scheme(4, 32)
    steps = scales(weight, scheme)
    # Nothing can make up for an error if no input is like another.
    moments = torch.diag(torch.rand(96, dtype=torch.float64) + 0.1)
    assert torch.equal(compensated_codes(weight, steps, scheme, moments), codes(weight, steps, scheme))


def test_two_equal_inputs_make_up_for_each_other() -> None:
    # Steps of 1 (7.5 is the largest). 0.4 + 0.4 is rounded to nearest as 0 + 0; their sum is nearer to 1 = 0 + 1.
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([7.5, 0.4, 0.4])
    scheme = Scheme(4, 32)
    steps = scales(weight, scheme)
    inputs = torch.zeros(100, 32)
    inputs[:, 1] = inputs[:, 2] = torch.randn(100)
    inputs[:, 0] = torch.randn(100)
    moments = (inputs.T @ inputs).double()
    found = compensated_codes(weight, steps, scheme, moments)
    assert codes(weight, steps, scheme)[0, 1:3].tolist() == [0, 0]
    assert sorted(found[0, 1:3].tolist()) == [0, 1]


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8)])
def test_products_are_nearer_than_those_of_the_nearest_codes(scheme: Scheme) -> None:
    torch.manual_seed(1)
    weight = torch.randn(24, 160)
    inputs = torch.randn(600, 20) @ torch.randn(20, 160) + 0.3 * torch.randn(600, 160)
    inputs[:, 5] = 0  # an input that never occurs
    moments = (inputs.T @ inputs).double()
    steps = scales(weight, scheme)
    nearest = restored(codes(weight, steps, scheme), steps, scheme)
    chosen = compensated_codes(weight, steps, scheme, moments)
    made = restored(chosen, steps, scheme)
    assert output_error(weight, made, moments) < 0.5 * output_error(weight, nearest, moments)
    assert torch.equal(chosen[:, 5], codes(weight, steps, scheme)[:, 5])


def test_the_error_is_that_of_the_products() -> None:
    inputs = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    moments = (inputs.T @ inputs).double()
    # Differences [1, -1] and [0, 2]: products 1 - 2 and -1, then 4 and 2.
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    other = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert output_error(weight, other, moments) == pytest.approx(1 + 1 + 16 + 4)
