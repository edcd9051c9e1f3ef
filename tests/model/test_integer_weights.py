"""Weights as integers: rounding, its corners, and the layout that others read."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from onecard.errors import ConfigError
from onecard.model.integer_weights import Scheme, codes, pack, restored, rounded, scales, scheme_for, unpack

SCHEMES = [Scheme(8), Scheme(4, 32), Scheme(4, 64)]


def test_a_row_by_hand() -> None:
    # 7.5 steps reach to the largest: a step of 2. 15 / 2 = 7.5 rounds to 8, which 4 bits do not have.
    weight = torch.tensor([[15.0, -15.0, 2.0, 2.9, 3.1, 0.0, -1.1, 1.0]])
    scheme = Scheme(4)
    assert scales(weight, scheme).tolist() == [[2.0]]
    assert codes(weight, scales(weight, scheme), scheme).tolist() == [[7, -8, 1, 1, 2, 0, -1, 0]]
    assert rounded(weight, scheme).tolist() == [[14.0, -16.0, 2.0, 2.0, 4.0, 0.0, -2.0, 0.0]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_corners(scheme: Scheme) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 128)
    weight[0] = 0
    weight[1] = 1e-39  # no normal number of fp32
    weight[2] = torch.full((128,), 1e-6).half().float()
    weight[3] *= 1e30
    weight[4, :64] = 0
    steps = scales(weight, scheme)
    made = restored(codes(weight, steps, scheme), steps, scheme)
    assert torch.isfinite(made).all()
    assert (made[weight == 0] == 0).all()
    wide = steps.repeat_interleave(scheme.group or 128, dim=1)
    assert ((made - weight).abs() <= wide / 2 * (1 + 1e-6)).all()
    # A step is never more than 0.8 % (8 bits of a bfloat16) larger than it must be.
    largest = weight.reshape(7, -1, scheme.group or 128).abs().amax(-1)
    ordinary = largest > 1e-30
    must = largest / (7.5 if scheme.bits == 4 else 127.5)
    assert (steps[ordinary] <= must[ordinary] * 1.008).all()
    assert torch.equal(steps.to(torch.bfloat16).float(), steps)


def test_weights_that_are_not_finite_are_no_weights() -> None:
    with pytest.raises(ValueError, match="not finite"):
        scales(torch.tensor([[1.0, float("nan")]]), Scheme(8))


@pytest.mark.parametrize(("bits", "width"), [(4, 64), (4, 40), (4, 44), (8, 64), (8, 33)])
def test_the_layout_is_the_librarys(bits: int, width: int) -> None:
    torch.manual_seed(0)
    least = -(1 << (bits - 1))
    values = torch.randint(least, -least, (5, width), dtype=torch.int8)
    words = pack(values, Scheme(bits))
    assert torch.equal(words, pack_to_int32(values, bits))
    assert torch.equal(unpack(words, width, Scheme(bits)), values)
    assert torch.equal(unpack_from_int32(words, bits, torch.Size([5, width])), values)


def test_the_group_is_the_largest_that_divides_every_width() -> None:
    assert scheme_for("int8", "auto", [("a", 7)]) == Scheme(8)
    assert scheme_for("int4", "auto", [("a", 256), ("b", 640)]) == Scheme(4, 128)
    assert scheme_for("int4", "auto", [("a", 256), ("b", 576)]) == Scheme(4, 64)
    assert scheme_for("int4", 32, [("a", 256)]) == Scheme(4, 32)


def test_odd_widths_are_refused_with_the_layer() -> None:
    with pytest.raises(ConfigError) as fault:
        scheme_for("int4", 128, [("model.layers.0.mlp.up_proj", 576)])
    assert "model.layers.0.mlp.up_proj has 576 inputs, which groups of 128 do not divide" in fault.value.what
    assert fault.value.remedy == "Set group_size = 64."
    with pytest.raises(ConfigError) as fault:
        scheme_for("int4", "auto", [("a", 256), ("b", 100)])
    assert "b has 100 inputs" in fault.value.what
    assert "int8" in fault.value.remedy
    with pytest.raises(ConfigError, match="group_size = 48"):
        scheme_for("int4", 48, [("a", 96)])
