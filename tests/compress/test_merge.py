"""Merged models: sums computed by hand in fp64, what is refused, what is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onecard import artifact
from onecard.compress.merge import merge
from onecard.compress.merging import linear, ties
from onecard.config import MergeConfig
from onecard.errors import ConfigError
from onecard.model import lora
from onecard.model.adapter_files import open_adapter, put_beside, weighed
from onecard.model.load import load_model, load_tokenizer, weights_hash

IDS = torch.arange(40)[None]


def merged(base: Path, parts: list[Path], output: Path, **settings: Any) -> dict[str, Any]:
    made = {"model": base, "parts": parts, "output": output, "question_count": 2, "max_new_tokens": 4, **settings}
    return merge(MergeConfig.model_validate(made))


def adapter(base: Path, directory: Path, seed: int, **settings: Any) -> Path:
    """An adapter of rank 2 that changes something, as `finetune` writes it."""
    model: Any = load_model(base)
    lora.add(model, 2, 6.0, 0.0, **settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.is_adapter(name):
                parameter.add_(0.1 * torch.randn(parameter.shape))
    lora.save(model, directory, base, facts={"quantization": "none", "base_weights": weights_hash(base)})
    return directory


def changed(base: Path, directory: Path, seed: int, size: float = 0.02) -> Path:
    """A model whose every weight is a little off that of the base."""
    shutil.copytree(base, directory)
    torch.manual_seed(seed)
    stored = load_file(base / "model.safetensors")
    moved = {name: x + size * torch.randn(x.shape) * x.std().nan_to_num(1) for name, x in stored.items()}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def base(tiny_model_directory: Path) -> Path:
    """The base of all parts."""
    return tiny_model_directory


def logits(state: dict[str, torch.Tensor], base: Path) -> torch.Tensor:
    """In fp64, of a model with these weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    model.load_state_dict({name: x.double() for name, x in state.items()}, strict=False)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


# --- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_adapters_are_added_as_by_hand(base: Path, tmp_path: Path, rank_stabilised: bool) -> None:
    parts = [
        adapter(base, tmp_path / "one", 1, rank_stabilised=rank_stabilised),
        adapter(base, tmp_path / "two", 2, target_modules=["q_proj", "down_proj"]),
    ]
    found = merged(base, parts, tmp_path / "m", weights=[0.75, -0.5])
    state = {name: x.double() for name, x in load_file(base / "model.safetensors").items()}
    scales = [6 / 2**0.5 if rank_stabilised else 3.0, 3.0]
    for place, weight, scale in zip(parts, (0.75, -0.5), scales):
        stored = load_file(place / "adapter_model.safetensors")
        for name in [name for name in stored if ".lora_A." in name]:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            state[target] += weight * scale * stored[name.replace("_A", "_B")].double() @ stored[name].double()
    made = load_file(tmp_path / "m" / "model.safetensors")
    assert made.keys() == state.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, state[name].float()), name
    assert (logits(made, base) - logits(state, base)).abs().max() < 1e-5
    assert found["logit_deviation"] < 1e-5
    assert found["read_back_deviation"] < 1e-5
    assert [part["weight"] for part in found["parts"]] == [0.75, -0.5]
    # Length of all changes over that of the weights that are changed.
    only = [name for name in state if "q_proj" in name or "down_proj" in name]
    before = load_file(base / "model.safetensors")
    two = load_file(parts[1] / "adapter_model.safetensors")
    change, length = 0.0, sum(float(before[name].double().square().sum()) for name in only)
    for name in only:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        change += float((3 * two[f"{key}.lora_B.weight"] @ two[f"{key}.lora_A.weight"]).double().square().sum())
    assert found["parts"][1]["distance"] == pytest.approx((change / length) ** 0.5, rel=1e-5)
    assert artifact.verify(tmp_path / "m").kind == "model"
    assert load_tokenizer(tmp_path / "m").chat_template == load_tokenizer(base).chat_template
    assert "Its logits differ" in (tmp_path / "m" / "report.html").read_text()


def test_one_adapter_is_what_fine_tuning_merges(base: Path, tmp_path: Path) -> None:
    for decomposed in (False, True):
        part = adapter(base, tmp_path / f"part-{decomposed}", 3, decomposed=decomposed)
        found = merged(base, [part], tmp_path / f"m-{decomposed}")
        model: Any = load_model(base)
        put_beside(model, open_adapter(part), "default")
        with torch.no_grad():
            beside = model(input_ids=IDS).logits
        lora.merge(model)
        made: Any = load_model(tmp_path / f"m-{decomposed}")
        with torch.no_grad():
            assert torch.allclose(made(input_ids=IDS).logits, beside, atol=1e-5)
        for name, parameter in model.state_dict().items():
            assert torch.allclose(made.state_dict()[name], parameter, atol=1e-6), name
        assert found["logit_deviation"] < 1e-5


def test_dora_by_hand(base: Path, tmp_path: Path) -> None:
    """What each adapter alone makes of a weight is weighed: its rows have the learned length."""
    part = adapter(base, tmp_path / "part", 4, decomposed=True, target_modules=["o_proj"])
    merged(base, [part], tmp_path / "m", weights=[0.5])
    stored, before = load_file(part / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    made = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    key = f"base_model.model.{name}"
    weight = before[f"{name}.weight"].double()
    whole = weight + 3 * stored[f"{key}.lora_B.weight"].double() @ stored[f"{key}.lora_A.weight"].double()
    length = stored[f"{key}.lora_magnitude_vector"].double()
    alone = length[:, None] * whole / whole.norm(dim=1, keepdim=True)
    assert torch.allclose(made[f"{name}.weight"].double(), weight + 0.5 * (alone - weight), atol=1e-7)


def test_models_are_added_as_by_hand(base: Path, tmp_path: Path) -> None:
    parts = [changed(base, tmp_path / "one", 1), changed(base, tmp_path / "two", 2)]
    found = merged(base, parts, tmp_path / "m", weights=[0.25, 1.5])
    before, one, two = (load_file(place / "model.safetensors") for place in (base, *parts))
    state = {
        name: x.double() + 0.25 * (one[name].double() - x.double()) + 1.5 * (two[name].double() - x.double())
        for name, x in before.items()
    }
    made = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in made.items():
        assert torch.equal(tensor, state[name].float()), name
    assert (logits(made, base) - logits(state, base)).abs().max() < 1e-5
    assert "logit_deviation" not in found
    assert found["parts"][0]["distance"] == pytest.approx(0.02, rel=0.1)
    # Equal shares where nothing is said; a model and an adapter together.
    both = [parts[0], adapter(base, tmp_path / "part", 5, target_modules=["q_proj"])]
    found = merged(base, both, tmp_path / "both")
    made = load_file(tmp_path / "both" / "model.safetensors")
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(made[up], ((before[up].double() + one[up].double()) / 2).float())
    assert [(part["kind"], part["weight"]) for part in found["parts"]] == [("model", 0.5), ("adapter", 0.5)]


def test_ties_by_hand() -> None:
    base = torch.ones(1, 5)
    one = base + torch.tensor([[4.0, -3.0, 1.0, 0.1, 2.0]])
    two = base + torch.tensor([[2.0, 6.0, -1.0, 0.2, -5.0]])
    # Of each the three largest: 4 -3 0 0 2 and 2 6 0 0 -5. Signs of the sums: + + 0 0 -; means of those that agree.
    made = ties(base, [one, two], [0.5, 0.5], 0.6)
    assert torch.allclose(made - base, torch.tensor([[3.0, 6.0, 0.0, 0.0, -5.0]], dtype=torch.float64))
    # Three times the second: of the first entry (4 + 3 x 2) / 4, twice as far as the weights add up to 2.
    made = ties(base, [one, two], [0.5, 1.5], 0.6)
    assert torch.allclose(made - base, torch.tensor([[5.0, 12.0, 0.0, 0.0, -10.0]], dtype=torch.float64))
    assert torch.equal(linear(base, [one], [1.0]), one.double())
    assert torch.allclose(ties(base, [one], [1.0], 1.0), one.double())


def test_ties_of_models(base: Path, tmp_path: Path) -> None:
    parts = [changed(base, tmp_path / "one", 1), changed(base, tmp_path / "two", 2)]
    merged(base, parts, tmp_path / "m", method="ties", density=0.5)
    before, one, two = (load_file(place / "model.safetensors") for place in (base, *parts))
    made = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(made[name], ties(before[name], [one[name], two[name]], [0.5, 0.5], 0.5).float())


def test_rounding_is_measured(base: Path, tmp_path: Path) -> None:
    part = adapter(base, tmp_path / "part", 6)
    exact = merged(base, [part], tmp_path / "exact")
    rounded = merged(base, [part], tmp_path / "rounded", kept_precision="bf16")
    assert exact["logit_deviation"] < 1e-5 < 1e-3 < rounded["logit_deviation"] < 0.05
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "rounded"))
    assert all(torch.equal(one[name].to(torch.bfloat16), other[name]) for name in one)
    assert rounded["written_in"] == "bfloat16"
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"


def test_four_bits_are_told_of(base: Path, tmp_path: Path) -> None:
    part = adapter(base, tmp_path / "part", 7)
    path = part / artifact.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["result"]["quantization"] = "nf4"
    path.write_text(json.dumps(manifest))
    found = merged(base, [part], tmp_path / "m")
    off = found["deviation_from_four_bits"][str(part)]
    assert 0.01 < off < 0.5
    assert "trained beside weights in 4 bits" in (tmp_path / "m" / "report.html").read_text()


def test_weighed_layers_add_what_each_adapter_adds(base: Path, tmp_path: Path) -> None:
    model: Any = load_model(base)
    for name, seed in (("first", 1), ("second", 2)):
        put_beside(model, open_adapter(adapter(base, tmp_path / name, seed)), name)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64)
    plain = layer.base_layer(x)
    with weighed(model, {"first": 0.5, "second": 2.0}), torch.no_grad():
        found = layer(x)
    by_hand = plain.clone()
    for name, weight in (("first", 0.5), ("second", 2.0)):
        by_hand += weight * 3 * x @ layer.lora_A[name].weight.T @ layer.lora_B[name].weight.T
    assert torch.allclose(found, by_hand, atol=1e-5)


# --- what is refused ----------------------------------------------------------------------------------------------


def _other_base(base: Path, place: Path) -> list[Path]:
    other = changed(base, place / "other", 8)
    return [adapter(other, place / "part", 1)]


def _other_shape(base: Path, place: Path) -> list[Path]:
    shutil.copytree(base, place / "part")
    stored = load_file(base / "model.safetensors")
    stored["model.norm.weight"] = torch.ones(32)
    save_file(stored, place / "part" / "model.safetensors", metadata={"format": "pt"})
    return [place / "part"]


def _other_tokens(base: Path, place: Path) -> list[Path]:
    part = changed(base, place / "part", 1)
    settings = json.loads((part / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    one, other = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (part / "tokenizer.json").write_text(json.dumps(settings))
    return [part]


def _few_bits(base: Path, place: Path) -> list[Path]:
    part = changed(base, place / "part", 1)
    settings = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps({**settings, "quantization_config": {}}))
    return [part]


def _another_model(base: Path, place: Path) -> list[Path]:
    shutil.copytree(base, place / "part")
    torch.manual_seed(99)
    LlamaForCausalLM(LlamaConfig.from_pretrained(base)).save_pretrained(place / "part")
    return [place / "part"]


def _other_kind(base: Path, place: Path, **changes: Any) -> list[Path]:
    part = adapter(base, place / "part", 1)
    settings = json.loads((part / "adapter_config.json").read_text())
    (part / "adapter_config.json").write_text(json.dumps({**settings, **(changes or {"peft_type": "IA3"})}))
    return [part]


@pytest.mark.parametrize(
    ("parts", "settings", "said"),
    [
        (_other_base, {}, "trained beside other weights"),
        (_other_shape, {}, r"of another shape than the base: model\.norm\.weight is \(32,\), not \(64,\)"),
        (_other_tokens, {}, "tokenizers .* are not the same: id 10"),
        (_few_bits, {}, "rounded to few bits"),
        (_another_model, {}, r"1\.\d+ times their own length away from the base"),
        (_other_kind, {}, "of the kind IA3"),
        (lambda b, p: _other_kind(b, p, modules_to_save=["score"]), {}, "learned whole"),
        (lambda b, p: _other_kind(b, p, bias="all"), {}, "brings biases"),
        (lambda b, p: _other_kind(b, p, init_lora_weights="pissa_niter_4"), {}, "began with a part of the weights"),
        (lambda b, p: [changed(b, p / "part", 1)], {"weights": [1.0, 2.0]}, "1 parts and 2 weights"),
        (lambda b, p: [changed(b, p / "part", 1)], {"weights": [-1.0], "method": "ties"}, "positive weights"),
    ],
)
def test_what_would_lie(
    base: Path, tmp_path: Path, parts: Callable[[Path, Path], list[Path]], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        merged(base, parts(base, tmp_path), tmp_path / "m", **settings)
    assert not (tmp_path / "m").exists()


def test_layers_that_the_base_lacks(base: Path, tmp_path: Path) -> None:
    part = adapter(base, tmp_path / "part", 1)
    stored = load_file(part / "adapter_model.safetensors")
    stored["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(2, 64)
    save_file(stored, part / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"do not have the same layers, such as .*layers\.7"):
        merged(base, [part], tmp_path / "m")


def test_the_adapters_of_a_run_are_taken(base: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    adapter(base, tmp_path / "run" / "adapter", 1)
    changed(base, tmp_path / "run" / "model", 2)
    found = merged(base, [tmp_path / "run"], tmp_path / "m")
    assert found["parts"][0]["kind"] == "adapter"


def test_the_tokenizer_beside_an_adapter_is_its_own(base: Path, tmp_path: Path) -> None:
    one = adapter(base, tmp_path / "one", 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, one / name)
    settings = json.loads((one / "tokenizer_config.json").read_text())
    template = load_tokenizer(base).chat_template.replace("user", "用户")
    (one / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    merged(base, [one], tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").chat_template == template
    # One of other tokens would write what the base has no rows for.
    file = json.loads((one / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = file["model"]["vocab"]
    vocabulary["Q"], vocabulary["Z"] = vocabulary["Z"], vocabulary["Q"]
    (one / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    with pytest.raises(ConfigError, match="tokenizers of .* are not the same"):
        merged(base, [one], tmp_path / "again")
