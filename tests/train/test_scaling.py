from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import make_loop, make_rows
from torch import Tensor, nn

from onecard.train.objectives import Objective
from onecard.train.precision import Precision
from onecard.train.scaling import GOOD_UPDATES, LossScale, clip_


def test_the_scale_halves_on_overflow_and_doubles_after_many_good_updates() -> None:
    scale = LossScale()
    assert scale.value == 65536.0
    scale.update(overflow=True)
    assert scale.value == 32768.0
    for _ in range(GOOD_UPDATES - 1):
        scale.update(overflow=False)
    assert scale.value == 32768.0
    scale.update(overflow=False)
    assert scale.value == 65536.0
    scale.update(overflow=False)  # counted from 0 again
    assert scale.value == 65536.0


def test_an_overflow_begins_the_count_of_good_updates_anew() -> None:
    scale = LossScale()
    for _ in range(GOOD_UPDATES - 1):
        scale.update(overflow=False)
    scale.update(overflow=True)
    scale.update(overflow=False)
    assert scale.value == 32768.0


def test_the_scale_stays_at_least_1() -> None:
    scale = LossScale()
    for _ in range(20):
        scale.update(overflow=True)
    assert scale.value == 1.0


def test_a_scale_that_is_not_enabled_is_1_whatever_happens() -> None:
    scale = LossScale(enabled=False)
    for _ in range(GOOD_UPDATES):
        scale.update(overflow=False)
    scale.load({"value": 8.0, "good": 3.0})
    assert scale.value == 1.0
    gradients = [torch.tensor([3.0])]
    scale.unscale_(gradients)
    assert gradients[0] == 3.0


def test_state_goes_out_and_in() -> None:
    scale, again = LossScale(), LossScale()
    scale.update(overflow=True)
    for _ in range(GOOD_UPDATES - 1):
        scale.update(overflow=False)
    again.load(scale.state())
    again.update(overflow=False)
    assert again.value == 65536.0


def test_clipping_sees_unscaled_gradients() -> None:
    """Scale 65536, true norm 0.5, clip 1.0: 0.5 is reported and applied."""
    scale = LossScale()
    true = [torch.tensor([0.3, 0.0]), torch.tensor([[0.0, -0.4]])]
    gradients = [gradient * scale.value for gradient in true]
    scale.unscale_(gradients)
    assert clip_(gradients, 1.0) == pytest.approx(0.5, abs=1e-7)
    assert all(torch.equal(made, meant) for made, meant in zip(gradients, true))


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (5.0, 1.0), (0.0, 1.0)])
def test_gradients_are_clipped_to_the_limit_and_their_norm_before_is_told(limit: float, factor: float) -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)]
    assert clip_(gradients, limit) == 5.0
    torch.testing.assert_close(gradients[0], torch.tensor([3.0 * factor]))
    torch.testing.assert_close(gradients[1], torch.tensor([4.0 * factor], dtype=torch.bfloat16))


def test_gradients_that_are_not_finite_are_left_as_they_are() -> None:
    gradients = [torch.tensor([math.inf, 1.0])]
    assert clip_(gradients, 1.0) == math.inf
    assert gradients[0].tolist() == [math.inf, 1.0]


def test_the_norm_of_bf16_gradients_is_added_up_in_fp32() -> None:
    gradients = [torch.full((1000,), 1.0 + 1 / 128, dtype=torch.bfloat16)]
    assert clip_(gradients, 0.0) == pytest.approx((1 + 1 / 128) * 1000**0.5, rel=1e-6)


class _Half(torch.autograd.Function):
    """Passes values on; gradients go through fp16, as the products of an fp16 backward do."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.half().float()


class _Sum(Objective):
    """The loss is `size` times the sum of all weights: every gradient is `size`."""

    def __init__(self, size: float) -> None:
        self.size = size

    def loss(self, model: nn.Module, batch: Any, *, scale: float, **_: Any) -> Tensor:
        sums = [_Half.apply(parameter).sum() for parameter in model.parameters()]  # type: ignore[no-untyped-call]
        made: Tensor = scale * batch.labelled * self.size * torch.stack(sums).sum()
        return made


def _loop(folder: Path, *, size: float) -> Any:
    made = make_loop(folder, make_rows(folder, [8] * 8), model=nn.Linear(4, 4, bias=False), objective=_Sum(size))
    made.precision = Precision("fp16", "cpu", 1.0)
    made.loss_scale = LossScale()
    return made


def _counts(loop: Any) -> list[float]:
    return [float(value) for name, value in loop.optimizers.state_tensors().items() if name.endswith("/step")]


def test_an_overflow_tries_the_same_update_again_and_advances_nothing(tmp_path: Path) -> None:
    """Gradients of 0.125 (norm 0.5) in four micro-batches fit into fp16 up to a scale of 2^20; it begins at 2^22."""
    loop = _loop(tmp_path, size=0.125)
    loop.loss_scale.load({"value": 2.0**22, "good": 5.0})
    result = loop.update(0)
    assert not result.skipped
    assert result.grad_norm == pytest.approx(0.5, rel=1e-6)
    assert loop.loss_scale.state() == {"value": 2.0**20, "good": 1.0}
    assert _counts(loop) == [1.0]
    (group,) = loop.optimizers.parts[0].param_groups
    assert group["lr"] == pytest.approx(0.01 * loop.schedule.factor(0))


def test_rows_that_overflow_without_a_scale_too_are_skipped_and_the_schedule_waits(tmp_path: Path) -> None:
    loop = _loop(tmp_path, size=1e6)
    before = loop.model.weight.detach().clone()
    assert loop.update(0).skipped
    assert torch.equal(loop.model.weight, before)
    assert _counts(loop) == []
    assert loop.loss_scale.value == 65536.0
    loop.step, loop.skipped = 1, 1  # as the run counts them
    loop.objective.size = 0.125
    assert not loop.update(1).skipped
    (group,) = loop.optimizers.parts[0].param_groups
    assert group["lr"] == pytest.approx(0.01 * loop.schedule.factor(0))
