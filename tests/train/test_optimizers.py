from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from onecard.train import muon, optimizers


class RMSNorm(nn.Module):
    """A norm that no list of known norms has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 2.0))


class Model(nn.Module):
    """A tied head, a biased layer, two kinds of norm, a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.own_norm = RMSNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def build(model: nn.Module, optimizer: str, **changes: Any) -> optimizers.Optimizers:
    settings: dict[str, Any] = {"learning_rate": 0.01, "muon_learning_rate": 0.01, "weight_decay": 0.1}
    return optimizers.build(model, optimizer, **settings | changes)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_touches_matrices_only(optimizer: str) -> None:
    """Zero gradients, learning rate 0.01, decay 0.1: matrices x 0.999, everything else as it was."""
    model = Model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    made = build(model, optimizer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    made.step()
    for name, parameter in model.named_parameters():
        factor = 0.999 if name in ("embedding.weight", "layer.weight") else 1.0
        torch.testing.assert_close(parameter, before[name] * factor, rtol=1e-7, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_parameter_is_in_one_group_once(optimizer: str) -> None:
    model = Model()
    made = build(model, optimizer)
    counted = Counter(id(p) for part in made.parts for group in part.param_groups for p in group["params"])
    assert counted == Counter({id(p): 1 for p in model.parameters() if p.requires_grad})
    kinds = {kind: [name for name, _ in found] for kind, found in optimizers.parameter_kinds(model).items()}
    assert kinds == {
        "matrices": ["layer.weight"],
        "embeddings": ["embedding.weight"],
        "vectors": ["layer.bias", "norm.weight", "norm.bias", "own_norm.scale"],
    }
    if optimizer == "muon":
        assert [p.shape for p in made.parts[0].param_groups[0]["params"]] == [(6, 4)]


def test_adamw_is_that_of_torch() -> None:
    made_model, meant_model = Model(), Model()
    meant_model.load_state_dict(made_model.state_dict())
    made = build(made_model, "adamw", learning_rate=0.003)
    names = ("embedding.weight", "layer.weight")
    groups = [
        {"params": [p for n, p in meant_model.named_parameters() if n in names], "weight_decay": 0.1},
        {
            "params": [p for n, p in meant_model.named_parameters() if n not in names and p.requires_grad],
            "weight_decay": 0.0,
        },
    ]
    meant = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(made_model.parameters(), meant_model.parameters()):
            if a.requires_grad:
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
        made.step()
        meant.step()
    for a, b in zip(made_model.parameters(), meant_model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 96, 32), (2, 32, 96), (1, 1, 8)])
def test_orthogonalised_matrices_keep_their_directions_with_singular_values_near_1(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = muon.orthogonalise(matrices)
    values = torch.linalg.svdvals(made)
    # A random square matrix has a few values too small for five steps; its mean stays near 1.
    small = shape[-1] == shape[-2]
    assert values.max() < 1.3
    assert values.quantile(0.05 if small else 0.0) > 0.6
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    between = u.mT @ made @ v.mT
    off_diagonal = between - torch.diag_embed(between.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-4


def test_one_step_of_muon_by_hand() -> None:
    """A gradient with equal singular values: the step is its direction x learning rate x 0.2 sqrt(8)."""
    weight = nn.Parameter(torch.ones(4, 8))
    direction = torch.eye(4, 8)
    weight.grad = 3 * direction
    muon.Muon([weight], lr=0.5, weight_decay=0.1).step()
    value = float(muon.orthogonalise(direction[None])[0, 0, 0])
    assert 0.6 < value < 1.3
    torch.testing.assert_close(weight.detach(), torch.full((4, 8), 0.95) - 0.5 * 0.2 * 8**0.5 * value * direction)


def test_the_factor_scales_every_group() -> None:
    made = build(Model(), "muon", learning_rate=0.4, muon_learning_rate=0.2)
    made.set_factor(0.5)
    assert [group["lr"] for part in made.parts for group in part.param_groups] == [0.1, 0.2, 0.2]
    made.set_factor(1.0)
    assert [group["lr"] for part in made.parts for group in part.param_groups] == [0.2, 0.4, 0.4]
    assert made.peak_learning_rate == 0.2


@pytest.mark.parametrize("tied", [True, False])
def test_both_embeddings_of_a_model_are_adamw_s(tied: bool) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )
    found = [name for name, _ in optimizers.parameter_kinds(model)["embeddings"]]
    assert found == ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])


def test_state_is_kept_by_name() -> None:
    model = Model()
    made = build(model, "muon")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    made.step()
    state = {name: value.clone() for name, value in made.state_tensors().items()}
    assert set(state) == {"layer.weight/momentum_buffer"} | {
        f"{name}/{key}"
        for name in ("embedding.weight", "layer.bias", "norm.weight", "norm.bias", "own_norm.scale")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    again = build(model, "muon")
    again.load_state_tensors(state)
    assert all(torch.equal(value, again.state_tensors()[name]) for name, value in state.items())


def test_the_output_matrices_of_adapters_go_faster(tiny_model_directory: Path) -> None:
    from onecard.model import lora
    from onecard.model.load import load_model

    for optimizer in ("adamw", "muon"):
        model: Any = load_model(tiny_model_directory)
        lora.add(model, 2, 4.0)
        made = optimizers.build(
            model,
            optimizer,
            learning_rate=1e-3,
            muon_learning_rate=1e-2,
            weight_decay=0.0,
            lora_plus_ratio=16,
        )
        rate, name = (1e-3, "learning_rate") if optimizer == "adamw" else (1e-2, "muon_learning_rate")
        assert made.peaks()[name] == pytest.approx(rate)
        for factor, change in ((0.5, None), (1.0, 2 * rate)):
            if change is not None:
                made.change(name, change)
            made.set_factor(factor)
            seen = {
                id(parameter): group["lr"]
                for part in made.parts
                for group in part.param_groups
                for parameter in group["params"]
            }
            wanted = factor * (change or rate)
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    assert seen[id(parameter)] == pytest.approx(wanted * (16 if ".lora_B." in key else 1)), key
        assert made.peaks()[name] == pytest.approx(2 * rate)
