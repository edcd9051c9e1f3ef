"""What holds for every optimizer, kind of state, format of weights and gradients, and time of the step."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizers import Model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from onecard.config import PretrainConfig
from onecard.errors import ConfigError
from onecard.train import checkpoint, optimizers
from onecard.train.optimizers import Optimizers, check
from onecard.train.precision import Precision, convert

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "adamw 8bit": {"optimizer": "adamw", "states": "8bit"},
    "adamw host": {"optimizer": "adamw", "states": "host"},
    "adamw bf16 gradients": {"optimizer": "adamw", "gradients": "bf16"},
    "adamw 8bit bf16 gradients": {"optimizer": "adamw", "states": "8bit", "gradients": "bf16"},
    "adamw in backward": {"optimizer": "adamw", "in_backward": True},
    "adamw 8bit in backward": {"optimizer": "adamw", "states": "8bit", "in_backward": True},
    "adamw host in backward": {"optimizer": "adamw", "states": "host", "in_backward": True},
    "muon": {"optimizer": "muon"},
    "muon 8bit": {"optimizer": "muon", "states": "8bit"},
    "muon host": {"optimizer": "muon", "states": "host"},
    "muon bf16 gradients": {"optimizer": "muon", "gradients": "bf16"},
    "muon in backward": {"optimizer": "muon", "in_backward": True},
    "muon 8bit in backward": {"optimizer": "muon", "states": "8bit", "in_backward": True},
    "adafactor": {"optimizer": "adafactor"},
    "adafactor bf16 gradients": {"optimizer": "adafactor", "gradients": "bf16"},
    "adafactor in backward": {"optimizer": "adafactor", "in_backward": True},
}
IN_BACKWARD = [name for name in KINDS if name.endswith("in backward")]


@pytest.fixture(autouse=True)
def states_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU `host` would mean nothing: here it copies states from and to the host as on a card."""
    monkeypatch.setattr(optimizers, "_host_already", lambda parameters: False)


def build(model: nn.Module, kind: str, **changes: Any) -> Optimizers:
    settings: dict[str, Any] = {"learning_rate": 0.01, "muon_learning_rate": 0.01, "weight_decay": 0.1}
    return optimizers.build(model, **settings | KINDS[kind] | changes)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


def backward(model: Any, seed: int) -> None:
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()


def train(model: Any, made: Optimizers, steps: range) -> None:
    for step in steps:
        made.set_factor(1 / (1 + step))
        backward(model, step)
        made.step()
        made.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- what is decayed, and that nothing is stepped twice ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decay_touches_matrices_only(kind: str) -> None:
    """Zero gradients, learning rate 0.01, decay 0.1: matrices x 0.999, everything else as it was."""
    model = Model()
    before = weights(model)
    made = build(model, kind)
    torch.stack([0 * p.sum() for p in model.parameters() if p.requires_grad]).sum().backward()
    made.step()
    for name, parameter in model.named_parameters():
        factor = 0.999 if name in ("embedding.weight", "layer.weight") else 1.0
        torch.testing.assert_close(parameter, before[name] * factor, rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainable_parameter_is_stepped_once(kind: str) -> None:
    model = Model()
    made = build(model, kind)
    counted = Counter(id(parameter) for unit in made.units for parameter in unit.parameters)
    assert counted == Counter({id(p): 1 for p in model.parameters() if p.requires_grad})
    targets = [id(p) for part in made.parts for group in part.param_groups for p in group["params"]]
    assert len(targets) == len(set(targets)) == len(counted)


# --- inside backward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_steps_inside_backward_are_those_after_it(kind: str) -> None:
    inside, after = llama(), llama()
    made = build(inside, kind)
    plain = build(after, kind, in_backward=False)
    train(inside, made, range(4))
    train(after, plain, range(4))
    # Muon orthogonalises matrices of one shape together, and here one by one: another order of the same sums.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "muon" in kind else {"rtol": 0.0, "atol": 0.0}
    for made_weight, meant in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(made_weight, meant, **tolerance)
    assert set(made.state_tensors()) == set(plain.state_tensors())


@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_no_gradient_is_kept_inside_backward_and_its_norm_is_told(kind: str) -> None:
    model, other = llama(), llama()
    made = build(model, kind)
    backward(model, 0)
    backward(other, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
    assert made.taken_norm() == pytest.approx(norm.item(), rel=1e-5)
    assert made.taken_norm() == 0.0


def test_from_a_gradient_on_that_is_not_finite_nothing_is_stepped() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    before = weights(model)
    made = build(model, "adamw in backward")
    model[1].weight.register_hook(lambda gradient: gradient * float("nan"))
    model(torch.ones(1, 4)).sum().backward()
    assert not torch.equal(model[2].weight, before["2.weight"])  # its gradient came first
    assert torch.equal(model[1].weight, before["1.weight"])
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.tensor(made.taken_norm()).isfinite()
    model[1].weight._backward_hooks.clear()
    model(torch.ones(1, 4)).sum().backward()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_optimizers_that_nobody_holds_step_no_more() -> None:
    """Such as those of updates that were only timed."""
    model = llama()
    build(model, "adamw in backward")
    gc.collect()
    before = weights(model)
    backward(model, 0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    made = build(model, "adamw in backward")
    made.close()
    backward(model, 0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# --- other formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_states_on_the_host_change_nothing(optimizer: str, in_backward: bool) -> None:
    model, other = llama(), llama()
    # One by one, as they come and go.
    train(model, build(model, optimizer, states="host", in_backward=in_backward), range(4))
    train(other, build(other, optimizer, in_backward=True), range(4))
    for made, meant in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(made, meant)


def test_states_are_on_the_host_between_steps_and_nowhere_else() -> None:
    model = llama()
    made = build(model, "adamw host")
    train(model, made, range(2))
    kept = [value for part in made.parts for state in part.state.values() for value in state.values()]
    assert all(value.ndim == 0 for value in kept)
    assert {name.rsplit("/", 1)[1] for name in made.state_tensors()} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("kind", ["adamw", "adamw 8bit", "muon", "adafactor"])
def test_gradients_in_bf16_are_those_in_fp32_rounded(kind: str) -> None:
    # Untied: of a matrix that is used twice, both gradients are rounded before they are added.
    model, other = llama(tie_word_embeddings=False), llama(tie_word_embeddings=False)
    made, plain = build(model, kind, gradients="bf16"), build(other, kind)
    backward(model, 0)
    backward(other, 0)
    for parameter, meant in zip(model.parameters(), other.parameters(), strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, meant.grad.bfloat16())
        meant.grad = meant.grad.bfloat16().float()
    made.step()
    plain.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if kind == "muon" else {"rtol": 0.0, "atol": 0.0}
    for parameter, meant in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, meant, **tolerance)
    assert {t.dtype for t in made.state_tensors().values()} == {t.dtype for t in plain.state_tensors().values()}


def test_sums_of_gradients_in_bf16_are_off_by_less_than_a_hundredth() -> None:
    """Over 16 micro-batches: what rounding each sum to 8 bits costs."""
    model, other = llama(), llama()
    build(model, "adamw bf16 gradients")
    for micro_batch in range(16):
        backward(model, micro_batch)
        backward(other, micro_batch)
    made = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    meant = torch.cat([parameter.grad.flatten() for parameter in other.parameters()])
    assert 0 < (made - meant).norm() / meant.norm() < 0.01


class One(nn.Module):
    """100 x 100 weights of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100, 100))


@pytest.mark.parametrize(
    ("kind", "learning_rate"), [("adamw", 6e-4), ("adamw 8bit", 6e-4), ("adamw in backward", 6e-4), ("adafactor", 6e-4)]
)
@pytest.mark.parametrize("name", ["fp32", "pure_bf16"])
def test_steps_too_small_for_bf16_add_up(kind: str, learning_rate: float, name: str) -> None:
    """A weight of 1 and 100 updates of 0.0006 (0.6 of a thousandth of it): about 0.94, where plain bf16 stays at 1."""
    torch.manual_seed(0)
    model = One()
    convert(model, Precision(name, "cpu", 1.0))
    made = build(model, kind, learning_rate=learning_rate, weight_decay=0.0)
    for _ in range(100):
        model.weight.sum().backward()
        made.step()
        made.zero_grad()
    assert model.weight.dtype == (torch.bfloat16 if name == "pure_bf16" else torch.float32)
    assert model.weight.float().mean().item() == pytest.approx(0.94, abs=2e-3)


def test_muon_s_steps_too_small_for_bf16_add_up() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    nn.init.ones_(other.weight)
    nn.init.ones_(model.weight)
    convert(model, Precision("pure_bf16", "cpu", 1.0))
    gradient = torch.randn(64, 64)
    made, meant = (build(m, "muon", muon_learning_rate=1e-4, weight_decay=0.0) for m in (model, other))
    for _ in range(100):
        model.weight.grad, other.weight.grad = gradient.clone(), gradient.clone()
        made.step()
        meant.step()
    moved = other.weight.detach() - 1
    assert ((model.weight.detach().float() - 1) * moved).sum() / moved.square().sum() == pytest.approx(1.0, abs=0.02)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weight_format"),
    [(kind, "fp32") for kind in KINDS]
    + [(kind, "pure_bf16") for kind in ("adamw", "adamw 8bit in backward", "muon 8bit", "adafactor")],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, kind: str, weight_format: str) -> None:
    half = Precision(weight_format, "cpu", 1.0)

    def begin() -> tuple[Any, Optimizers]:
        model = llama()
        convert(model, half)
        return model, build(model, kind)

    model, made = begin()
    with half.autocast():
        train(model, made, range(2))
        tensors = {f"model/{name}": value for name, value in weights(model).items()}
        tensors |= {f"optimizer/{name}": value for name, value in made.state_tensors().items()}
        tensors["generator"] = torch.get_rng_state()
        path = checkpoint.save(tmp_path, 2, tensors, {}, keep=checkpoint.Keep(1))
        train(model, made, range(2, 4))

        again, resumed = begin()
        train(again, resumed, range(1))  # whatever stood there before
        read = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in checkpoint.tensor_names(path).items()}
        checkpoint.load(path, read)
        with torch.no_grad():
            for name, parameter in again.named_parameters():
                parameter.copy_(read[f"model/{name}"])
        states = {n.removeprefix("optimizer/"): v for n, v in read.items() if n.startswith("optimizer/")}
        resumed.load_state_tensors(states)
        loaded = resumed.state_tensors()
        assert set(loaded) == set(states)
        assert all(
            torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in states.items()
        )
        torch.set_rng_state(read["generator"])
        train(again, resumed, range(2, 4))
    for parameter, meant in zip(again.parameters(), model.parameters(), strict=True):
        assert parameter.dtype == meant.dtype
        assert torch.equal(parameter, meant)
    final = resumed.state_tensors()
    assert all(torch.equal(final[name], value) for name, value in made.state_tensors().items())


# --- bytes ------------------------------------------------------------------------------------------------------------


def bytes_of_a_parameter(kind: str, weight_format: str) -> float:
    """Weights, gradients and states on the device between the steps of two updates, in bytes a parameter."""
    model = llama(hidden_size=256, intermediate_size=512, vocab_size=512)
    half = Precision(weight_format, "cpu", 1.0)
    convert(model, half)
    alive: list[int] = [0]

    def count(_: Tensor) -> None:
        alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    made = build(model, kind)
    with half.autocast():
        train(model, made, range(2))
    on_host = KINDS[kind].get("states") == "host"
    states = [v.nbytes for n, v in made.state_tensors().items() if not on_host or n.endswith("/step")]
    if KINDS[kind].get("in_backward"):
        # One gradient at a time: in a model of many layers, next to nothing.
        largest = max(p.numel() for p in model.parameters())
        assert max(alive) == 4 * largest
        alive = [0]
    total = sum(p.nbytes for p in model.parameters()) + max(alive) + sum(states)
    return total / sum(p.numel() for p in model.parameters())


BYTES = [
    ("adamw", "fp32", 16.0),
    ("adamw 8bit", "fp32", 10.0),
    ("adamw host", "fp32", 8.0),
    ("adamw bf16 gradients", "fp32", 14.0),
    ("adamw 8bit bf16 gradients", "fp32", 8.0),
    ("adamw in backward", "fp32", 12.0),
    ("adamw 8bit in backward", "fp32", 6.0),
    ("adamw 8bit in backward", "pure_bf16", 4.0),
    ("adamw 8bit bf16 gradients", "pure_bf16", 6.0),
    ("muon", "fp32", 12.4),
    ("muon 8bit", "fp32", 9.2),
    ("muon 8bit in backward", "fp32", 5.1),
    ("adafactor", "fp32", 8.0),
    ("adafactor in backward", "fp32", 4.0),
]


@pytest.mark.parametrize(("kind", "weight_format", "meant"), BYTES)
def test_bytes_of_a_parameter(kind: str, weight_format: str, meant: float) -> None:
    made = bytes_of_a_parameter(kind, weight_format)
    assert made == pytest.approx(meant, abs=0.1)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer_in_backward": True}, ["optimizer_in_backward", "max_grad_norm = 1"]),
        (
            {"optimizer_in_backward": True, "max_grad_norm": 0, "gradient_accumulation_steps": 4},
            ["optimizer_in_backward", "gradient_accumulation_steps = 4"],
        ),
        (
            {"optimizer_in_backward": True, "max_grad_norm": 0, "precision": "fp16"},
            ["optimizer_in_backward", "precision = fp16"],
        ),
        (
            {"optimizer_in_backward": True, "max_grad_norm": 0, "gradients": "bf16"},
            ["optimizer_in_backward", "gradients = bf16"],
        ),
        ({"optimizer": "adafactor", "optimizer_states": "8bit"}, ["adafactor", "optimizer_states = 8bit"]),
        ({"optimizer": "adafactor", "optimizer_states": "host"}, ["adafactor", "optimizer_states = host"]),
    ],
)
def test_settings_that_exclude_each_other_are_named(settings: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(PretrainConfig(size="4M", **settings))
    assert all(words in str(caught.value) for words in named)


def test_what_auto_became_counts() -> None:
    settings = PretrainConfig(size="4M", optimizer_in_backward=True, max_grad_norm=0, gradient_accumulation_steps=1)
    check(settings)
    check(settings, "bf16")
    with pytest.raises(ConfigError, match="fp16"):
        check(settings, "fp16")


@pytest.mark.parametrize("states", ["fp32", "8bit", "host"])
@pytest.mark.parametrize("optimizer", ["auto", "adamw", "muon"])
def test_all_else_combines(optimizer: str, states: str) -> None:
    check(
        PretrainConfig(size="4M", optimizer=optimizer, optimizer_states=states, gradients="bf16", precision="pure_bf16")
    )


def test_adafactor_s_first_step_is_as_large_as_adamw_s_whatever_the_weight() -> None:
    for value in (0.0, 0.02, 1.0):
        model = One()
        nn.init.constant_(model.weight, value)
        made = build(model, "adafactor", learning_rate=0.004, weight_decay=0.0)
        model.weight.sum().backward()
        made.step()
        torch.testing.assert_close(model.weight.detach(), torch.full((100, 100), value - 0.004))
