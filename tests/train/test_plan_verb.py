"""`onecard plan` on a toy machine with a formula for memory: what it chooses, says, refuses and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_toys import GIB, OF_THE_TABLE, TOY, formula, small_llama

from onecard import console
from onecard.config import PlanConfig
from onecard.errors import ArtifactError, ConfigError, DoesNotFit
from onecard.plan.job import Job, Target
from onecard.settings import build
from onecard.train.plan import plan

CONTRACT = [
    "fits",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "context_bytes",
    "capacity_bytes",
    "breakdown",
    "tokens_per_second",
    "seconds",
    "energy_kwh",
    "settings",
    "alternatives",
]
FIXED: dict[str, Any] = {
    "max_length": 1024,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "precision": "bf16",
    "optimizer_states": "fp32",
    "optimizer_in_backward": False,
    "gradients": "fp32",
    "activation_checkpointing": "none",
    "activation_offload": False,
    "activation_compression": "none",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def asked(model: Path, on: Target = TOY, **settings: Any) -> dict[str, Any]:
    return plan(build(PlanConfig, {"model": str(model), **settings}), formula, on)


def test_the_document_keeps_the_contract_with_the_sums_of_the_formula(model: Path) -> None:
    """4 + 4 + 8 and 4 rows of 2 GiB are the whole 24."""
    made = asked(model, **FIXED, tokens=8e6)
    assert all(name in made for name in CONTRACT)
    assert made["fits"] and made["peak_allocated_bytes"] == 24 * GIB == made["capacity_bytes"]
    assert made["breakdown"] == {
        "parameters": 4 * GIB,
        "gradients": 4 * GIB,
        "optimizer": 8 * GIB,
        "activations": 8 * GIB,
        "logits": 0,
        "workspace": 0,
    }
    assert made["settings"]["batch_size"] == 4 and made["settings"]["method"] == "full"
    assert "lora_rank" not in made["settings"]
    assert made["peak_place"] == "backward, layer 1"
    # 5 % of the time goes to evaluations; a card draws 0.86 of its 300 W.
    assert made["seconds"] == pytest.approx(8e6 / made["tokens_per_second"] / 0.95)
    assert made["energy_kwh"] == pytest.approx(made["seconds"] * 0.86 * 300 / 3.6e6)
    json.dumps(made)


def test_cost_and_a_training_of_unknown_length(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = asked(model, **FIXED, tokens=1e9, electricity_price=0.5, currency="EUR")
    assert made["cost"] == pytest.approx(made["energy_kwh"] / 2)
    assert f"{made['cost']:,.2f} EUR" in capsys.readouterr().out
    made = asked(model, **FIXED)
    assert made["seconds"] is None and made["energy_kwh"] is None
    assert "--tokens" in capsys.readouterr().out


def test_auto_is_searched_and_what_is_given_stays(model: Path) -> None:
    """20 rows of 2 GiB beside 16 do not fit into 24 less a margin of 5 %; the search finds what does."""
    made = asked(model, max_length=1024, batch_size=20, gradient_accumulation_steps=1)
    assert made["fits"] and made["settings"]["batch_size"] == 20
    assert made["margin_bytes"] >= 0.05 * 24 * GIB
    found = made["settings"]
    assert found["activation_checkpointing"] != "none" or found["optimizer_states"] != "fp32"
    free = asked(model, max_length=1024)
    assert free["fits"] and free["settings"]["batch_size"] * free["settings"]["gradient_accumulation_steps"] == 8
    assert free["alternatives"]
    for other in free["alternatives"]:
        assert other["settings"] and other["margin_bytes"] == 24 * GIB - other["needed_bytes"]


def test_what_does_not_fit_is_said_with_what_would(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 rows: 16 + 40 GiB; of the formula 10 rows (36), 5 (26), 2 (20) fit in turn."""
    with pytest.raises(DoesNotFit) as caught:
        asked(model, **FIXED | {"batch_size": 20, "gradient_accumulation_steps": 1})
    fault = caught.value
    assert fault.exit_status == 3
    assert "needs 56.0 GiB" in fault.what and "activations, 40.0 GiB" in fault.what and "24.0 GiB" in fault.what
    assert "batch_size = 2, gradient_accumulation_steps = 10" in fault.remedy
    assert fault.document["fits"] is False and fault.document["margin_bytes"] == -32 * GIB
    assert fault.document["would_fit"]["settings"] == {"batch_size": 2, "gradient_accumulation_steps": 10}
    most = fault.document["savings"][0]
    assert most["settings"] == {"batch_size": 1, "gradient_accumulation_steps": 20} and most["bytes"] == 38 * GIB
    assert "missing" in capsys.readouterr().out


def test_nothing_helps(model: Path) -> None:
    with pytest.raises(DoesNotFit, match="1") as caught:
        asked(model, on=replace(TOY, capacity_bytes=GIB), **FIXED)
    assert "smaller model" in caught.value.remedy and caught.value.document["would_fit"] is None


def test_a_thin_margin_and_a_card_nobody_measured_are_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(model, **FIXED)
    text = capsys.readouterr().out
    assert "thin margin" in text and "measured on this machine" in text
    asked(model, on=OF_THE_TABLE, **FIXED | {"batch_size": 1})
    text = capsys.readouterr().out
    assert "thin margin" not in text and "onecard has not been measured on one" in text
    assert "backward, layer 1" in text and "layers.1.mlp.up_proj: 1.0 GiB" in text


def test_adapters_take_weights_of_16_bits_where_those_are_fast(model: Path) -> None:
    made = asked(model, method="lora", lora_rank=8, max_length=1024)
    assert made["settings"]["precision"] == "pure_bf16" and made["settings"]["lora_rank"] == 8
    assert made["settings"]["optimizer"] == "adamw"
    slow = replace(TOY, device="cpu", flops_per_second={"fp32": 1e11, "bf16": 1e9}, capability=None)
    assert asked(model, on=slow, method="lora", max_length=1024)["settings"]["precision"] == "fp32"


def test_sizes_directories_and_names(tmp_path: Path, model: Path) -> None:
    assert asked(model, **FIXED)["parameters"] == 90_432
    made = plan(build(PlanConfig, {"model": "4M", "batch_size": 1}), formula, TOY)
    assert made["parameters"] == pytest.approx(4e6, rel=0.1) and made["settings"]["optimizer"] == "muon"
    assert made["settings"]["max_length"] == 512
    with pytest.raises(ArtifactError, match="no model at"):
        asked(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="positions"):
        asked(model, max_length=8192)


def test_the_report_has_the_picture(model: Path, tmp_path: Path) -> None:
    made = asked(model, **FIXED, output=str(tmp_path / "report"))
    html = (tmp_path / "report" / "report.html").read_text()
    for word in ("It fits on Toy", "activations", "backward, layer 1", "GiB", "<svg"):
        assert word in html
    assert json.loads((tmp_path / "report" / "plan.json").read_text())["peak_allocated_bytes"] == 24 * GIB
    assert made["output"] == str(tmp_path / "report")
    with pytest.raises(ArtifactError, match="already exists|holds a finished"):
        asked(model, **FIXED, output=str(tmp_path / "report"))


# --- recipes ------------------------------------------------------------------------------------------------------


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


TWO = """
[pretrain]
size = "4M"
max_length = 512
max_steps = 10
[finetune]
sources = ["chats"]
max_length = 256
max_steps = 5
"""


def test_the_stages_of_a_recipe_one_after_another(tmp_path: Path) -> None:
    """Of the pretraining's size what a run would take: 16 rows of 512 (most 16,384 tokens), Muon; time is the sum."""
    made = plan(PlanConfig(recipe=recipe(tmp_path, TWO)), formula, TOY)
    first, second = made["stages"]
    assert (first["name"], second["name"]) == ("pretrain", "finetune")
    assert first["settings"]["batch_size"] == 8 and first["settings"]["optimizer"] == "muon"
    assert first["tokens"] == 10 * 4096 and second["tokens"] == 5 * 2048
    assert second["parameters"] == first["parameters"]
    assert made["seconds"] == pytest.approx(first["seconds"] + second["seconds"])
    assert made["needed_bytes"] == max(first["needed_bytes"], second["needed_bytes"])


def test_settings_of_the_command_win_over_the_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, TWO)
    made = plan(build(PlanConfig, {"recipe": path, "batch_size": 2, "max_length": 128}), formula, TOY)
    for stage in made["stages"]:
        assert (stage["settings"]["batch_size"], stage["settings"]["max_length"]) == (2, 128)


def test_the_table_plan_of_a_recipe(tmp_path: Path, model: Path) -> None:
    path = recipe(tmp_path, '[plan]\nmodel = "model"\nmethod = "qlora"\ntokens = 1e6\nbatch_size = 2\n')
    made = plan(PlanConfig(recipe=path), formula, TOY)
    assert made["settings"]["method"] == "qlora" and made["tokens"] == 1e6
    made = plan(build(PlanConfig, {"recipe": path, "tokens": 2e6}), formula, TOY)
    assert made["tokens"] == 2e6
    with pytest.raises(ConfigError, match=r"\[plan\].*unknown setting methd"):
        plan(PlanConfig(recipe=recipe(tmp_path, '[plan]\nmethd = "lora"\n')), formula, TOY)


def test_a_model_to_be_tuned_is_a_directory_or_a_published_name(tmp_path: Path, model: Path) -> None:
    text = '[finetune]\nmodel = "{}"\nsources = ["chats"]\nlora_rank = 8\n'
    made = plan(PlanConfig(recipe=recipe(tmp_path, text.format("model"))), formula, TOY)
    assert made["settings"]["lora_rank"] == 8 and made["settings"]["max_length"] == 1024
    assert made["parameters"] == 90_432
    with pytest.raises(ArtifactError, match="no model at"):
        plan(PlanConfig(recipe=recipe(tmp_path, text.format("models/unheard-of"))), formula, TOY)


def test_nothing_to_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plan"):
        plan(PlanConfig(), formula, TOY)
    with pytest.raises(ConfigError, match="trains nothing"):
        plan(PlanConfig(recipe=recipe(tmp_path, '[clean]\nsources = ["x"]\n')), formula, TOY)
    with pytest.raises(ConfigError, match="two questions"):
        plan(PlanConfig(largest=True, longest_context=True), formula, TOY)
    with pytest.raises(ConfigError, match="compute_optimal"):
        plan(PlanConfig(compute_optimal=True), formula, TOY)


# --- the questions the other way round ----------------------------------------------------------------------------


def test_the_longest_rows(model: Path) -> None:
    """Full checkpointing: 16 GiB and half a GiB for 1,024 tokens: 22.8 - 16 = 6.8 GiB are 13,926 tokens."""
    made = asked(model, longest_context=True, optimizer="adamw", precision="bf16")
    assert 13_926 * 15 / 16 <= made["value"] <= 13_926
    assert made["plan"]["settings"]["activation_checkpointing"] == "full"
    with pytest.raises(DoesNotFit) as caught:
        asked(model, on=replace(TOY, capacity_bytes=GIB), longest_context=True)
    assert caught.value.document["fits"] is False


def test_the_size_for_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(PlanConfig(compute_optimal=True, tokens=2e9), formula, TOY)
    assert made["best"]["parameters"] == pytest.approx(1e8)
    assert "100M" in capsys.readouterr().out


def test_a_model_that_cannot_be_traced_is_said_to_be_one(model: Path) -> None:
    def broken(_: Job) -> Any:
        raise NotImplementedError("no fake of this")

    with pytest.raises(ConfigError, match=r"a llama model cannot be predicted here \(no fake of this\)"):
        plan(build(PlanConfig, {"model": str(model), **FIXED}), broken, TOY)


def test_json_is_quiet(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(json_output=True)
    asked(model, **FIXED)
    assert capsys.readouterr().out == ""


def test_a_job_that_is_planned_is_the_one_that_was_asked(model: Path) -> None:
    seen: list[Job] = []

    def spy(job: Job) -> Any:
        seen.append(job)
        return formula(job)

    settings = FIXED | {"optimizer": "adafactor", "target_modules": ["q_proj"], "packing": False, "compile": False}
    plan(build(PlanConfig, {"model": str(model), **settings | {"gradients": "bf16"}}), spy, TOY)
    first = seen[0]
    assert (first.optimizer, first.gradients, first.device) == ("adafactor", "bf16", "cuda")
    assert not first.packed and not first.engine.compiled
