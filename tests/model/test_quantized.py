"""Weights in 4 bits: what they hold, what they give, and what stands beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onecard.model import lora
from onecard.model.load import load_model
from onecard.model.quantized import dequantized, is_quantized, multiply_in, quantize


class Layers(nn.Module):
    """Two repeated layers and a head."""

    def __init__(self, inputs: int = 512, outputs: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, outputs, bias=True), nn.Linear(outputs, inputs, bias=False)])
        self.head = nn.Linear(inputs, 8)


def test_repeated_layers_take_4_127_bits_a_weight_and_the_head_stays() -> None:
    torch.manual_seed(0)
    model = Layers()
    assert quantize(model, torch.float32, "cpu") == 2 * 512 * 256
    assert [is_quantized(layer) for layer in model.layers] == [True, True]
    assert not is_quantized(model.head)
    layer: Any = model.layers[0]
    state = layer.weight.quant_state
    tensors = [layer.weight.data, state.absmax, state.state2.absmax]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 8 * held / (512 * 256) == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-3)


def test_a_product_is_that_of_the_weights_it_holds_and_reaches_the_input() -> None:
    torch.manual_seed(0)
    model = Layers()
    before = model.layers[0].weight.detach().clone()
    quantize(model, torch.float32, "cpu")
    layer: Any = model.layers[0]
    held = dequantized(layer)
    # Codes of NF4 lie at most 0.16 of a block's largest weight from what they stand for.
    largest = before.view(-1, 64).abs().max(1, keepdim=True).values
    assert ((held - before).view(-1, 64).abs() <= 0.16 * largest).all()
    inputs = torch.randn(5, 512, requires_grad=True)
    made = layer(inputs)
    assert torch.allclose(made, inputs @ held.T + layer.bias, atol=1e-5)
    made.sum().backward()
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, held.sum(0).expand(5, -1), atol=1e-4)


def test_zero_and_tiny_weights_stay_finite_and_zero() -> None:
    model = Layers()
    with torch.no_grad():
        model.layers[0].weight[:10] = 0
        model.layers[0].weight[10:20] = 1e-38
        model.layers[0].weight[20:30] = 1e-6
    quantize(model, torch.float32, "cpu")
    held = dequantized(model.layers[0])
    assert torch.isfinite(held).all()
    assert (held[:10] == 0).all()
    # Scales are kept in 8 bits, so weights far below those of other blocks are known to a hundredth of the largest.
    assert held[20:30].abs().max() <= 0.01 * held.abs().max()


def test_the_format_of_products_does_not_follow_the_input() -> None:
    model = Layers()
    quantize(model, torch.float32, "cpu")
    multiply_in(model, torch.bfloat16)
    layer: Any = model.layers[0]
    layer(torch.randn(2, 512))
    assert layer.compute_dtype == torch.bfloat16


def test_adapters_stand_beside_and_every_one_learns(tiny_model_directory: Path) -> None:
    model = load_model(tiny_model_directory)
    quantize(model, torch.float32, "cpu")
    names = lora.add(model, 4, 8.0)
    assert len(names) == 2 * 7
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == lora.is_adapter(name)
        if ".lora_B." in name:
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("decomposed", [False, True])
def test_merged_into_full_weights_it_is_base_and_adapter(tiny_model_directory: Path, decomposed: bool) -> None:
    """The reference has the same adapters beside the same full weights, unmerged."""
    model = load_model(tiny_model_directory)
    quantize(model, torch.float32, "cpu")
    lora.add(model, 4, 8.0, decomposed=decomposed)
    reference = load_model(tiny_model_directory)
    lora.add(reference, 4, 8.0, decomposed=decomposed)
    torch.manual_seed(1)
    other = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.05)
                other[name].copy_(parameter)
            elif "magnitude" in name:
                parameter.mul_(1.1)
                other[name].copy_(parameter)
    merged = load_model(tiny_model_directory)
    lora.merge_into(merged, model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, reference.eval()(input_ids=ids).logits, atol=1e-5)
    assert not any(lora.is_adapter(name) for name, _ in merged.named_parameters())
    off = lora.deviation(model, merged)
    assert 0 < off < 0.5
    assert lora.deviation(merged, copy.deepcopy(merged)) == 0


def test_the_scale_of_adapters(tiny_model_directory: Path) -> None:
    for stabilised, rank, alpha, scale in ((True, 16, 16.0, 4.0), (False, 8, 16.0, 2.0)):
        model = load_model(tiny_model_directory)
        (name, *_) = lora.add(model, rank, alpha, rank_stabilised=stabilised)
        layer: Any = model.get_submodule(name)
        assert layer.scaling["default"] == scale


def test_an_evaluation_in_between_changes_no_gradient(tiny_model_directory: Path) -> None:
    """On a CPU with bf16 units the library repacks weights while it evaluates, for a kernel without a gradient."""
    made = load_model(tiny_model_directory)
    quantize(made, torch.float32, "cpu")
    lora.add(made, 4, 8.0)
    assert not any(module.support_avx512bf16_for_cpu for module in made.modules() if is_quantized(module))
    ids = torch.arange(10, 30)[None]

    def gradients() -> list[torch.Tensor]:
        made.train()
        made.zero_grad()
        made(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in made.parameters() if p.requires_grad and p.grad is not None]

    before = gradients()
    made.eval()
    with torch.no_grad():
        made(input_ids=ids)
    after = gradients()
    assert len(before) > 0
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
