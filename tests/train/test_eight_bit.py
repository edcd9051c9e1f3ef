from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onecard.train import eight_bit
from onecard.train.eight_bit import AdamW8bit, decode, encode


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_signed_codes_by_hand() -> None:
    """Codes are 127 sqrt(x / largest): 1 of 16 is code 32 of 127, which reads back as 16 (32 / 127)^2."""
    codes, scales = encode(torch.tensor([[16.0, -16.0, 1.0, -4.0, 0.0]]), signed=True)
    assert codes.tolist() == [[127, -127, 32, -64, 0]]
    assert scales.tolist() == [16.0]
    meant = [16.0, -16.0, 16 * (32 / 127) ** 2, -16 * (64 / 127) ** 2, 0.0]
    torch.testing.assert_close(decode(codes, scales), torch.tensor([meant]))


def test_unsigned_codes_by_hand() -> None:
    """Codes are 255 (x / largest)^(1/4): 1 of 16 is half of 255, rounded to the even 128."""
    codes, scales = encode(torch.tensor([[16.0, 1.0, 0.0]]), signed=False)
    assert codes.tolist() == [[255, 128, 0]]
    torch.testing.assert_close(decode(codes, scales), torch.tensor([[16.0, 16 * (128 / 255) ** 4, 0.0]]))


def test_what_is_not_0_is_never_kept_as_0_where_it_is_divided_by() -> None:
    codes, scales = encode(torch.tensor([[1.0, 1e-30, 0.0]]), signed=False)
    assert codes.tolist() == [[255, 1, 0]]
    assert decode(codes, scales)[0, 1] > 0


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_have_scales_of_their_own_and_zeros_stay_zeros(signed: bool) -> None:
    blocks = torch.stack([torch.full((256,), 1e-20), torch.zeros(256), torch.full((256,), 1e20)])
    codes, scales = encode(blocks, signed=signed)
    torch.testing.assert_close(decode(codes, scales), blocks, rtol=1e-6, atol=0)
    assert torch.equal(scales, blocks[:, 0])


@pytest.mark.parametrize(("signed", "power", "steps"), [(True, 2, 127), (False, 4, 255)])
def test_every_number_is_off_by_at_most_half_a_step_of_its_root(signed: bool, power: int, steps: int) -> None:
    values = random(64, 256) if signed else random(64, 256).square()
    codes, scales = encode(values, signed=signed)
    read = decode(codes, scales)
    root = (values.abs() / scales[:, None]) ** (1 / power)
    read_root = (read.abs() / scales[:, None]) ** (1 / power)
    assert (root - read_root).abs().max() <= 0.5 / steps + 1e-5
    assert torch.equal(read[read != 0].sign(), values[read != 0].sign())


def stepped(kind: Any, shape: tuple[int, ...], *, steps: int, **settings: Any) -> Tensor:
    weight = nn.Parameter(random(*shape))
    made = kind([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **settings)
    for step in range(steps):
        weight.grad = random(*shape, seed=step + 1)
        made.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(64, 64), (65, 67), (4097,), (5, 7)])
def test_the_first_step_is_that_of_adamw(shape: tuple[int, ...]) -> None:
    """States begin at 0 and are rounded only after they have been used."""
    made, meant = stepped(AdamW8bit, shape, steps=1), stepped(torch.optim.AdamW, shape, steps=1)
    torch.testing.assert_close(made, meant, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(64, 64), (65, 67)])
def test_many_steps_stay_close_to_those_of_adamw(shape: tuple[int, ...]) -> None:
    made, meant = stepped(AdamW8bit, shape, steps=30), stepped(torch.optim.AdamW, shape, steps=30)
    moved = (meant - random(*shape)).norm()
    assert (made - meant).norm() < 0.03 * moved
    assert not torch.equal(made, meant)


def test_small_tensors_keep_exact_states() -> None:
    made, meant = stepped(AdamW8bit, (4095,), steps=10), stepped(torch.optim.AdamW, (4095,), steps=10)
    torch.testing.assert_close(made, meant, rtol=1e-5, atol=1e-6)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stepped(AdamW8bit, (65, 67), steps=3)
    monkeypatch.setitem(eight_bit.CHUNK, "cpu", 512)
    assert torch.equal(stepped(AdamW8bit, (65, 67), steps=3), whole)


def test_ranges_cover_everything_in_whole_blocks() -> None:
    made = list(eight_bit.ranges(1000, 512))
    assert [(at.start, at.stop) for at in made] == [(0, 512), (512, 768), (768, 1000)]
    assert list(eight_bit.ranges(512, 512)) == [slice(0, 512)]
    assert list(eight_bit.ranges(7, 512)) == [slice(0, 7)]


def test_a_gradient_that_is_not_contiguous_is_taken_by_its_place() -> None:
    plain, turned = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(64, 128))
    plain.grad, turned.grad = random(64, 128), random(64, 128).T.contiguous().T
    assert not turned.grad.is_contiguous()
    for weight in (plain, turned):
        AdamW8bit([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-8).step()
    assert torch.equal(plain, turned)
