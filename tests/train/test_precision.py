from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from onecard.errors import ConfigError
from onecard.train import precision
from onecard.train.precision import Precision, choose, convert, pick, unfit

TIMES = {"fp32": 100e9, "bf16": 300e9}


@pytest.mark.parametrize(
    ("card", "capability", "taken"),
    [
        ("GTX 1080 Ti", (6, 1), "fp32"),
        ("V100", (7, 0), "fp16"),
        ("RTX 2080 Ti", (7, 5), "fp16"),
        ("A100", (8, 0), "bf16"),
        ("RTX 3090", (8, 6), "bf16"),
        ("RTX 4090", (8, 9), "bf16"),
        ("H100", (9, 0), "bf16"),
        ("RTX 5090", (12, 0), "bf16"),
    ],
)
def test_auto_takes_what_a_card_does_in_hardware(card: str, capability: tuple[int, int], taken: str) -> None:
    name, reason = pick("cuda", capability, {})
    assert name == taken, card
    assert f"capability {capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(("bf16", "taken"), [(300.0, "bf16"), (120.0, "bf16"), (119.0, "fp32"), (1.0, "fp32")])
def test_auto_takes_what_a_processor_was_measured_to_do(bf16: float, taken: str) -> None:
    name, reason = pick("cpu", None, {"fp32": 100e9, "bf16": bf16 * 1e9})
    assert name == taken
    assert reason == f"products at 100 GFLOP/s in fp32 and {bf16:.0f} in bf16 on this cpu"


@pytest.mark.parametrize(
    ("capability", "words"),
    [(None, "there is no CUDA card here"), ((8, 6), "this one has 8.6"), ((7, 5), "this one has 7.5")],
)
def test_float8_says_what_it_needs(capability: tuple[int, int] | None, words: str) -> None:
    fault = unfit("float8", capability)
    assert fault is not None
    assert "capability 8.9" in fault
    assert words in fault


def test_float8_is_had_from_8_9_on_and_all_else_everywhere() -> None:
    assert unfit("float8", (8, 9)) is None
    assert unfit("float8", (12, 0)) is None
    assert all(unfit(name, None) is None for name in ("fp32", "bf16", "fp16", "pure_bf16"))


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What an earlier calibration kept: nothing, where a test adds nothing."""
    rates: dict[str, float] = {}
    monkeypatch.setattr(precision, "known", lambda: rates)
    return rates


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine without a card whose rates are set by the test."""
    rates = {"fp32": 100e9, "bf16": 300e9, "fp16": 50e9}
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setattr(precision, "matrix_rate", lambda dtype, device: rates[kinds[dtype]])
    return rates


def test_auto_on_this_machine_says_why(processor: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("auto") == Precision("bf16", "cpu", 300e9)
    assert "precision bf16: products at 100 GFLOP/s in fp32 and 300 in bf16" in capsys.readouterr().err
    processor["bf16"] = 1e9
    assert choose("auto") == Precision("fp32", "cpu", 100e9)


def test_a_format_that_is_slow_here_is_taken_with_a_warning(
    processor: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("fp16") == Precision("fp16", "cpu", 50e9)
    assert "fp16 products run at 50 GFLOP/s here, fp32 at 100" in capsys.readouterr().err
    assert choose("pure_bf16") == Precision("pure_bf16", "cpu", 300e9)
    assert capsys.readouterr().err == ""


def test_float8_without_a_card_is_an_error(processor: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="float8"):
        choose("float8")


@pytest.mark.parametrize(
    ("name", "products", "weights", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, False),
        ("bf16", torch.bfloat16, torch.float32, False),
        ("fp16", torch.float16, torch.float32, True),
        ("pure_bf16", torch.bfloat16, torch.bfloat16, False),
        ("float8", torch.bfloat16, torch.float32, False),
    ],
)
def test_what_each_format_means(name: str, products: torch.dtype, weights: torch.dtype, scaled: bool) -> None:
    made = Precision(name, "cpu", 1.0)
    assert (made.dtype, made.weight_dtype, made.loss_scaling) == (products, weights, scaled)
    with made.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == products


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


def test_pure_bf16_keeps_norms_and_positions_in_fp32() -> None:
    made = model()
    frequencies = made.model.rotary_emb.inv_freq.clone()
    convert(made, Precision("pure_bf16", "cpu", 1.0))
    kinds = {name: parameter.dtype for name, parameter in made.named_parameters()}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == {
        name for name in kinds if "norm" in name
    }
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(made.model.rotary_emb.inv_freq, frequencies)


def test_pure_bf16_keeps_tied_weights_tied() -> None:
    made = model(tie_word_embeddings=True)
    convert(made, Precision("pure_bf16", "cpu", 1.0))
    assert made.lm_head.weight is made.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_other_formats_change_no_weight(name: str) -> None:
    made, before = model(), model()
    convert(made, Precision(name, "cpu", 1.0))
    for parameter, meant in zip(made.parameters(), before.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, meant)


def test_the_loss_in_pure_bf16_is_that_of_fp32_to_bf16_precision() -> None:
    ids = torch.arange(8).unsqueeze(0)
    meant = model()(input_ids=ids, labels=ids).loss.item()
    half = Precision("pure_bf16", "cpu", 1.0)
    made = model()
    convert(made, half)
    with half.autocast():
        loss = made(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(meant, rel=5e-3)
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_float8_swaps_the_linear_maps_of_the_layers_and_never_the_head() -> None:
    made = model()
    ids = torch.arange(16).unsqueeze(0)
    meant = made(input_ids=ids).logits
    made.model.layers[0].mlp.odd = nn.Linear(32, 8)  # too narrow for the kernels
    names = set(made.state_dict())
    convert(made, Precision("float8", "cpu", 1.0), emulate=True)
    swapped = {name for name, module in made.named_modules() if type(module).__name__ == "Float8Linear"}
    per_layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert swapped == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in per_layer}
    assert set(made.state_dict()) == names
    logits = made(input_ids=ids).logits
    error = ((logits - meant).norm() / meant.norm()).item()
    assert 0 < error < 0.1
    logits.sum().backward()
    assert made.model.layers[0].mlp.up_proj.weight.grad.dtype == torch.float32


def test_fp32_products_are_tf32_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "default_device", lambda: "cuda")
    monkeypatch.setattr(precision, "matrix_rate", lambda dtype, device: 1e12)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    before = torch.get_float32_matmul_precision()
    try:
        assert choose("auto") == Precision("bf16", "cuda", 1e12)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        with pytest.raises(ConfigError, match=r"capability 8\.9 or more, and this one has 8\.6"):
            choose("float8")
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_slow_moment_does_not_choose_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product in fp32 is measured while another program takes the processor."""
    rates = {torch.float32: [1e9, 100e9], torch.bfloat16: [2e9, 2e9]}
    monkeypatch.setattr(precision, "matrix_rate", lambda dtype, device: rates[dtype].pop(0))
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    chosen = choose("auto")
    assert (chosen.name, chosen.flops_per_second) == ("fp32", 100e9)


def test_what_a_calibration_kept_is_not_measured_again(
    kept: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setattr(precision, "matrix_rate", lambda dtype, _: measured.append(dtype) or 7e9)
    kept |= {"fp32_flops_per_second": 80e9, "bf16_flops_per_second": 240e9}
    assert choose("auto") == Precision("bf16", "cpu", 240e9)
    assert choose("fp32") == Precision("fp32", "cpu", 80e9)
    assert measured == []
    assert choose("fp16") == Precision("fp16", "cpu", 7e9)  # which calibration on a processor leaves out
    assert measured == [torch.float16]
    assert "fp16 products run at 7 GFLOP/s here, fp32 at 80" in capsys.readouterr().err
