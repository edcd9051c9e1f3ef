"""The verb finetune with adapters: what it writes, what it keeps, and that it goes on where it was stopped."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_runs import Stop, cut, during, lines, run, weights
from torch._dynamo.testing import CompileCounter

from onecard.config import FinetuneConfig
from onecard.data.batches import RowOrder
from onecard.data.packing import PackedRows
from onecard.data.tokens import Encoded, write_store
from onecard.errors import ConfigError
from onecard.model import attention, lora
from onecard.model.load import load_model
from onecard.settings import build
from onecard.train import compilation, optimizers, session
from onecard.train.activations import Activations
from onecard.train.finetune import finetune
from onecard.train.loop import Loop, LoopSettings
from onecard.train.objectives import NextToken
from onecard.train.precision import Precision, convert
from onecard.train.schedule import Schedule


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no figures."""
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


def settings(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes {i}."} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / "run"),
        "max_length": 64,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "evaluate_every": 2,
        "save_every": 2,
        "held_out": 0.2,
        "compile": False,
        "precision": "fp32",
        "lora_rank": 4,
    }
    return made | changes


def test_an_adapter_and_a_merged_model_of_equal_logits(tmp_path: Path, tiny_model_directory: Path) -> None:
    from peft import PeftModel

    before = (tiny_model_directory / "model.safetensors").read_bytes()
    made = finetune(build(FinetuneConfig, settings(tmp_path, tiny_model_directory, lora_alpha=12)))
    assert made["updates"] == 6
    ids = torch.arange(3, 40)[None]
    base, merged = load_model(tiny_model_directory), load_model(tmp_path / "run")
    plain, wanted = base(ids).logits, merged(ids).logits
    assert (wanted - plain).abs().max() > 1e-3, "something was learned"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what that library calls of transformers is deprecated there
        beside = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    torch.testing.assert_close(beside(ids).logits, wanted, atol=1e-4, rtol=0)
    assert beside.peft_config["default"].lora_alpha == 12
    assert beside.peft_config["default"].base_model_name_or_path == str(tiny_model_directory.resolve())
    assert (tiny_model_directory / "model.safetensors").read_bytes() == before
    names = {name for name, _ in load_model(tiny_model_directory).named_parameters()}
    assert {name for name, _ in merged.named_parameters()} == names
    # Evaluated twice on the way, every adapter moved from its zeros.
    for name, parameter in beside.named_parameters():
        if ".lora_B." in name:
            assert parameter.abs().max() > 0, name


def test_checkpoints_hold_what_is_trained_and_nothing_frozen(tmp_path: Path, tiny_model_directory: Path) -> None:
    finetune(build(FinetuneConfig, settings(tmp_path, tiny_model_directory, target_modules=["q_proj"])))
    names = set()
    for file in (tmp_path / "run" / "checkpoints" / "step-00000006").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= {name for name in opened.keys() if not name.startswith("generator/")}  # noqa: SIM118
    adapters = {f"model.layers.{n}.self_attn.q_proj.lora_{side}.default.weight" for n in (0, 1) for side in "AB"}
    kept = {f"model/{name}" for name in adapters}
    kept |= {f"optimizer/{name}/{key}" for name in adapters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert names - {name for name in names if "rotary_emb" in name} == kept
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    # q_proj of each of two layers is 64 x 64: rank 4 adds 2 x 64 x 4.
    assert plan["trained_parameters"] == 2 * 2 * 64 * 4
    assert plan["optimizer"] == "adamw"
    # Ten times 2e-5 x 2048 / width, at most 2e-3.
    assert plan["learning_rate"] == 2e-3


@pytest.mark.parametrize("stop", [Stop("update", 3, signal.SIGTERM), Stop("finish", 6, signal.SIGKILL)], ids=str)
def test_a_stopped_run_ends_like_one_that_was_not(tmp_path: Path, tiny_model_directory: Path, stop: Stop) -> None:
    changes = settings(tmp_path, tiny_model_directory, lora_dropout=0.2)
    finetune(build(FinetuneConfig, changes | {"output": str(tmp_path / "whole")}))
    assert run("finetune", changes, stop)[0] == (130 if stop.number == signal.SIGTERM else -signal.SIGKILL)
    assert run("finetune", changes)[0] == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("run", "whole")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 7))


def adapter_loop(folder: Path, directory: Path, checkpointing: Any, *, compiled: bool = False) -> Loop:
    """Adapters over the frozen tiny model, two packed rows an update."""
    folder.mkdir()
    documents = [Encoded("chats", [(7 * d + i) % 300 + 3 for i in range(5 + d)]) for d in range(8)]
    rows = PackedRows(write_store(folder / "tokens", documents, vocabulary=384, tokenizer_hash=""), 24)
    model: Any = load_model(directory)
    lora.add(model, 4, 8.0, seed=3)
    model.train()
    assert attention.switch(model)
    activations = Activations(checkpointing=checkpointing)
    activations.apply(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    return Loop(
        run=folder,
        model=model,
        objective=NextToken(),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=2),
        held_out=(rows, [0, 1]),
        optimizers=optimizers.build(model, "adamw", learning_rate=1e-3, muon_learning_rate=0.0, weight_decay=0.0),
        schedule=Schedule("cosine", 4, 0.0, 0.0, 0.0),
        precision=Precision("fp32", "cpu", 1e9),
        settings=LoopSettings(4, 1, 0.0, 4, 4, 1, 1, 0),
        saving=activations.saving,
    )


# The compiler asks for the .grad of every tensor, and hides what torch says about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointing", ["full", "selective", 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_with_an_evaluation_between_trains_every_adapter(
    tmp_path: Path, tiny_model_directory: Path, checkpointing: Any, compiled: bool
) -> None:
    gradients = []
    for name, way, compile_layers in (("plain", "none", False), ("again", checkpointing, compiled)):
        loop = adapter_loop(tmp_path / name, tiny_model_directory, way, compiled=compile_layers)
        loop._gradients(loop.micro_batches(0))
        first = {n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None}
        loop.optimizers.zero_grad()
        loop.evaluate()
        assert loop.model.training
        assert all(module.training for module in loop.model.modules())
        loop._gradients(loop.micro_batches(0))
        found = {n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None}
        loop.optimizers.zero_grad()
        assert {n for n in found if not lora.is_adapter(n)} == set(), "frozen weights get no gradient"
        for n in found:
            torch.testing.assert_close(found[n], first[n], atol=1e-6, rtol=0)
        gradients.append(found)
        loop.update(0)
        loop.close()
        for n, p in loop.model.named_parameters():
            if ".lora_B." in n:
                assert p.abs().max() > 0, n
    assert gradients[0].keys() == gradients[1].keys()
    for n, value in gradients[1].items():
        torch.testing.assert_close(value, gradients[0][n], atol=1e-6, rtol=0)


def test_beside_frozen_embeddings_all_layers_are_compiled_as_one(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of the first layer has no gradient of its own accord: that alone would make a second graph of it."""
    plain = adapter_loop(tmp_path / "plain", tiny_model_directory, "none")
    plain._gradients(plain.micro_batches(0))
    torch._dynamo.reset()
    counter, original = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: original(self, backend=counter, dynamic=False))
    monkeypatch.setattr(compilation.shutil, "which", lambda _: "/usr/bin/g++")
    loop = adapter_loop(tmp_path / "compiled", tiny_model_directory, "none")
    assert compilation.compile_layers(loop.model, "cpu")
    loop._gradients(loop.micro_batches(0))
    assert counter.frame_count == 1
    before = dict(plain.model.named_parameters())
    for name, parameter in loop.model.named_parameters():
        if lora.is_adapter(name):
            torch.testing.assert_close(parameter.grad, before[name].grad, atol=1e-6, rtol=0)
        else:
            assert parameter.grad is None
    compilation.undo(loop.model)
    assert not loop.model.get_input_embeddings()._forward_hooks
    with torch.no_grad():
        assert not loop.model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long)).requires_grad
    for made in (plain, loop):
        made.close()


def test_adapters_over_16_bit_weights_stay_in_fp32(tiny_model_directory: Path) -> None:
    model: Any = load_model(tiny_model_directory)
    lora.add(model, 2, 4.0)
    convert(model, Precision("pure_bf16", "cpu", 1e9))
    for name, parameter in model.named_parameters():
        fp32 = lora.is_adapter(name) or parameter.ndim == 1
        assert parameter.dtype == (torch.float32 if fp32 else torch.bfloat16), name


def test_an_unknown_layer_is_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    changes = settings(tmp_path, tiny_model_directory, target_modules=["q_prj"])
    with pytest.raises(ConfigError, match="no linear layer q_prj"):
        finetune(build(FinetuneConfig, changes))


def test_adapters_beside_four_bits_learn_merge_and_go_on_after_a_cut(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    def tuned(output: str) -> dict[str, Any]:
        changes = {"quantization": "nf4", "lora_rank": 4, "learning_rate": 1e-2, "output": str(tmp_path / output)}
        return finetune(build(FinetuneConfig, settings(tmp_path, tiny_model_directory, **changes)))

    result = tuned("whole")
    losses = [row["loss"] for row in lines(tmp_path / "whole" / "metrics.jsonl")]
    assert losses[-1] < 0.95 * losses[0]
    assert 0 < result["merge_deviation"] < 0.5
    assert result["merged_into"] == str(tiny_model_directory)
    warnings.simplefilter("ignore")  # what the library says of its neighbours
    loaded = PeftModel.from_pretrained(load_model(tiny_model_directory), str(tmp_path / "whole" / "adapter")).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        meant = loaded(input_ids=ids).logits
        assert torch.allclose(load_model(tmp_path / "whole")(input_ids=ids).logits, meant, atol=1e-5)
    with monkeypatch.context() as patch:
        during(patch, 4, cut)
        with pytest.raises(RuntimeError, match="power cut"):
            tuned("run")
    tuned("run")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_four_bits_without_adapters_leave_nothing_to_train(tmp_path: Path, tiny_model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        finetune(build(FinetuneConfig, settings(tmp_path, tiny_model_directory, quantization="nf4", lora_rank=0)))
