"""Adapters: what they compute, what of them is trained, what other programs read."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onecard.errors import ConfigError, MissingExtra
from onecard.model import attention, lora
from onecard.model.load import load_model

IDS = torch.arange(3, 15)[None]
ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLACES = ("self_attn",) * 4 + ("mlp",) * 3
ALL = [f"model.layers.{layer}.{place}.{end}" for layer in range(2) for place, end in zip(PLACES, ENDS)]


def adapted(directory: Path, **settings: Any) -> Any:
    """The tiny model with adapters that do something."""
    model: Any = load_model(directory)
    lora.add(model, 4, 8.0, **settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_a_new_adapter_changes_nothing_and_only_adapters_are_trained(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    before = model(IDS).logits
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert lora.add(model, 4, 8.0, seed=1) == ALL
    assert torch.equal(torch.rand(1), drawn), "the generator of the run is left alone"
    assert torch.equal(model(IDS).logits, before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {f"{name}.lora_{side}.default.weight" for name in ALL for side in "AB"}
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert trained["model.layers.0.mlp.up_proj.lora_A.default.weight"].shape == (4, 64)
    assert trained["model.layers.0.mlp.up_proj.lora_B.default.weight"].shape == (128, 4)
    again: Any = load_model(tiny_model_directory)
    lora.add(again, 4, 8.0, seed=1)
    other: Any = load_model(tiny_model_directory)
    lora.add(other, 4, 8.0, seed=2)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(again.get_parameter(name), trained[name])
    assert not torch.equal(other.get_parameter(name), trained[name])


def test_the_scale_is_alpha_over_rank(tiny_model_directory: Path) -> None:
    model = adapted(tiny_model_directory)
    layer = model.model.layers[1].mlp.up_proj
    x = torch.randn(3, 64)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    wanted = x @ layer.base_layer.weight.T + (8 / 4) * (x @ a.T) @ b.T
    torch.testing.assert_close(layer(x), wanted)


def test_adapters_of_a_16_bit_model_are_fp32(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory, dtype=torch.bfloat16)
    lora.add(model, 2, 4.0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if lora.is_adapter(name) else torch.bfloat16)
    assert model.get_decoder()(IDS[:, :2], use_cache=False).last_hidden_state.dtype == torch.bfloat16


def test_named_layers_only_and_unknown_names_are_refused(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    found = lora.add(model, 2, 4.0, target_modules=["mlp.up_proj", "q_proj"])
    assert found == [name for name in ALL if name.endswith(("up_proj", "q_proj"))]
    assert lora.coverage(found) == "q_proj 2, up_proj 2"
    model = load_model(tiny_model_directory)
    with pytest.raises(ConfigError, match="no linear layer q_prj") as fault:
        lora.add(model, 2, 4.0, target_modules=["q_prj", "v_proj"])
    assert "Did you mean q_proj?" in fault.value.remedy
    with pytest.raises(ConfigError, match="no linear layer lm_head") as fault:
        lora.add(model, 2, 4.0, target_modules=["lm_head"])
    assert "It has: down_proj, gate_proj," in fault.value.remedy
    assert all(p.requires_grad for p in model.parameters()), "a refusal leaves the model as it was"
    with pytest.raises(ConfigError, match="no linear layers"):
        lora.add(torch.nn.Sequential(torch.nn.Embedding(3, 3)), 2, 4.0)


def test_the_layers_of_gpt_2_are_found_too(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    model: Any = GPT2LMHeadModel(config).eval()
    assert lora.coverage(lora.add(model, 2, 4.0)) == "c_attn 2, c_proj 4, c_fc 2"
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wanted = model(IDS).logits
    lora.merge(model)
    torch.testing.assert_close(model(IDS).logits, wanted, atol=1e-5, rtol=0)


def test_peft_loads_what_was_saved(tmp_path: Path, tiny_model_directory: Path) -> None:
    from peft import PeftModel

    model = adapted(tiny_model_directory, dropout=0.1, target_modules=["v_proj", "down_proj"]).eval()
    wanted = model(IDS).logits
    lora.save(model, tmp_path / "适配 器", tiny_model_directory)
    written = json.loads((tmp_path / "适配 器" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tiny_model_directory.resolve())
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (4, 8, 0.1)
    assert written["target_modules"] == ["down_proj", "v_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what that library calls of transformers is deprecated there
        loaded = PeftModel.from_pretrained(load_model(tiny_model_directory), str(tmp_path / "适配 器")).eval()
    assert torch.equal(loaded(IDS).logits, wanted)


def test_merged_it_is_an_ordinary_model_of_equal_logits(tmp_path: Path, tiny_model_directory: Path) -> None:
    model = adapted(tiny_model_directory)
    wanted = model(IDS).logits
    names = [name for name, _ in load_model(tiny_model_directory).named_parameters()]
    lora.merge(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(load_model(tmp_path / "merged")(IDS).logits, wanted, atol=1e-5, rtol=0)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the mean next-token loss over two packed documents, taken and cleared."""
    model.train()
    hidden_1ND = model.get_decoder()(
        input_ids=IDS,
        position_ids=torch.cat([torch.arange(5), torch.arange(7)])[None],
        use_cache=False,
        cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32),
        max_length_q=7,
    ).last_hidden_state
    F.cross_entropy(model.lm_head(hidden_1ND)[0, :-1], IDS[0, 1:]).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_checkpointing_over_frozen_weights_trains_every_adapter(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    lora.add(model, 4, 8.0)
    attention.switch(model)
    plain = gradients(model)
    assert len(plain) == 2 * len(ALL)
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    checkpointed = gradients(model)
    assert checkpointed.keys() == plain.keys()
    for name, value in checkpointed.items():
        torch.testing.assert_close(value, plain[name], atol=1e-6, rtol=0)
        model.get_parameter(name).grad = value
    optimizer.step()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert parameter.abs().max() > 0, name


def test_without_the_library_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tiny_model_directory: Path) -> None:
    model = load_model(tiny_model_directory)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="pip install peft"):
        lora.add(model, 2, 4.0)


# --- starts -------------------------------------------------------------------------------------------------------


def test_pissa_begins_at_the_largest_singular_directions(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    whole = model.get_parameter("model.layers.1.mlp.up_proj.weight").detach().clone()
    before = model(IDS).logits
    lora.add(model, 4, 8.0, start="pissa")
    torch.testing.assert_close(model(IDS).logits, before, atol=2e-5, rtol=0)
    layer = model.model.layers[1].mlp.up_proj
    product = 2.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    left, values, right = torch.linalg.svd(whole.double(), full_matrices=False)
    best = (left[:, :4] * values[:4]) @ right[:4]
    torch.testing.assert_close(product.double(), best, atol=1e-5, rtol=0)
    # What is left has the other singular values, and four that are zero.
    rest = torch.linalg.svdvals(layer.base_layer.weight.double())
    torch.testing.assert_close(rest[:60], values[4:], atol=1e-5, rtol=0)
    assert rest[60:].max() < 1e-5


@pytest.mark.parametrize("rank_stabilised", [False, True])
@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "orthogonal"])
def test_any_start_is_saved_for_the_weights_as_they_were(
    tmp_path: Path, tiny_model_directory: Path, start: str, rank_stabilised: bool
) -> None:
    from peft import PeftModel

    model: Any = load_model(tiny_model_directory)
    untouched = model(IDS).logits
    lora.add(model, 4, 8.0, start=start, rank_stabilised=rank_stabilised, seed=3)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if lora.is_adapter(name):  # as training would move both
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    wanted = model(IDS).logits
    assert (wanted - untouched).abs().max() > 1e-3
    lora.save(model, tmp_path / "adapter", tiny_model_directory)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    rank = 4 if start == "orthogonal" else 8
    assert written["r"] == rank
    scale = written["lora_alpha"] / (rank**0.5 if rank_stabilised else rank)
    assert scale == pytest.approx(8 / 2 if rank_stabilised else 8 / 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(load_model(tiny_model_directory), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(IDS).logits, wanted, atol=5e-5, rtol=0)
    lora.merge(model)
    torch.testing.assert_close(model(IDS).logits, wanted, atol=5e-5, rtol=0)


def test_a_start_is_the_same_again_and_is_refused_where_it_cannot_be(tiny_model_directory: Path) -> None:
    made = []
    for _ in range(2):
        model: Any = load_model(tiny_model_directory)
        lora.add(model, 4, 8.0, start="pissa_niter_16", seed=5)
        made.append({name: p.detach() for name, p in model.named_parameters()})
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items()), "a resumed run begins alike"
    for settings, reason in (
        ({"rank": 3, "start": "orthogonal"}, "even rank, and lora_rank = 3"),
        ({"rank": 4, "start": "pissa", "decomposed": True}, "decomposed = true"),
        ({"rank": 65, "start": "olora"}, "rank of at most"),
    ):
        model = load_model(tiny_model_directory)
        with pytest.raises(ConfigError, match=reason) as fault:
            lora.add(model, settings.pop("rank"), 8.0, **settings)
        assert fault.value.remedy == "Set lora_start = default."
        assert all(p.requires_grad for p in model.parameters()), "a refusal leaves the model as it was"
