"""The verb pretrain from a corpus to a model directory, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import SIZE, events, lines, pretrain_settings, weights, write_corpus

from onecard import artifact
from onecard.config import PretrainConfig
from onecard.data import corpus
from onecard.errors import ArtifactError, ConfigError, DataError, Interrupted
from onecard.model import presets
from onecard.settings import build
from onecard.train import loop, session
from onecard.train import pretrain as pretrain_module
from onecard.train.pretrain import pretrain


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = presets.Preset(SIZE, layers=2, width=32, heads=2, key_value_heads=1)
    monkeypatch.setitem(presets.PRESETS, SIZE, shape)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no figures."""
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


def settings(folder: Path, tokenizer: Path, **changes: Any) -> PretrainConfig:
    return build(PretrainConfig, pretrain_settings(folder, tokenizer, **changes))


def test_the_model_is_that_in_memory_and_plain_transformers_reads_it(
    tmp_path: Path,
    tiny_tokenizer_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_corpus(tmp_path)
    ids = torch.arange(20)[None]
    in_memory: dict[str, torch.Tensor] = {}
    original = session.save_model

    def spy(model: Any, *arguments: Any, **others: Any) -> None:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            in_memory["logits"] = model.eval()(ids).logits
        original(model, *arguments, **others)

    monkeypatch.setattr(session, "save_model", spy)
    result = pretrain(settings(tmp_path, tiny_tokenizer_directory))
    run = tmp_path / "run"
    model = AutoModelForCausalLM.from_pretrained(str(run / "model"))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, in_memory["logits"])
    tokenizer = AutoTokenizer.from_pretrained(str(run / "model"))
    assert tokenizer.decode(tokenizer.encode("你好 world", add_special_tokens=False)) == "你好 world"
    question = [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    # Older readers know these names.
    written = json.loads((run / "model" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"

    # The record of the run.
    assert artifact.verify(run / "model").kind == "model"
    assert artifact.read_manifest(run, "run").result["updates"] == 12
    assert json.loads(json.dumps(result)) == result
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8, 12]
    assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "peak_memory_bytes"} <= set(
        rows[0]
    )
    kinds = [row["event"] for row in lines(run / "events.jsonl")]
    assert kinds == ["plan", "start", *["checkpoint"] * 4, "end"]
    plan = next(events(run, "plan"))
    assert plan["max_steps"] == 12
    assert "auto" not in plan.values()
    assert (run / "report.html").exists()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    assert not (run / "tokens").exists()
    # It has learned.
    assert rows[-1]["loss"] < rows[0]["loss"]
    said = capfd.readouterr()
    assert "Loading weights" not in said.err + said.out
    assert "model shards" not in said.err + said.out


def test_measuring_leaves_no_trace(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    compared: list[bool] = []
    original = session._time_updates

    def spy(task: Any, model: Any, plan: dict[str, Any]) -> float:
        state = [p.clone() for p in (*model.parameters(), *model.buffers())]
        generator, files = torch.get_rng_state(), sorted(task.run.path.rglob("*"))
        seconds = original(task, model, plan)
        compared.append(
            all(torch.equal(a, b) for a, b in zip(state, (*model.parameters(), *model.buffers())))
            and torch.equal(generator, torch.get_rng_state())
            and files == sorted(task.run.path.rglob("*"))
            and all(p.grad is None for p in model.parameters())
            and model.training
        )
        return seconds

    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    monkeypatch.setattr(session, "_time_updates", spy)
    timed = {"max_steps": "auto", "time_limit_minutes": 60, "num_epochs": 1}
    measured = pretrain(settings(tmp_path, tiny_tokenizer_directory, output="measured", **timed))
    assert compared == [True]
    pretrain(settings(tmp_path, tiny_tokenizer_directory, output="unmeasured", max_steps=measured["updates"]))
    assert compared == [True]
    assert weights(tmp_path / "measured") == weights(tmp_path / "unmeasured")


def test_a_time_limit_fixes_the_updates(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """0.3 s of which 5 % go to evaluations, 0.1 s an update: 2 updates; never more than num_epochs."""
    write_corpus(tmp_path)
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.1)
    made = pretrain(
        settings(tmp_path, tiny_tokenizer_directory, max_steps="auto", time_limit_minutes=0.005, num_epochs=50)
    )
    assert made["updates"] == 2
    assert made["predicted_seconds"] == pytest.approx(0.2 / 0.95)


def test_a_setting_that_is_not_used_is_said(
    tmp_path: Path, tiny_tokenizer_directory: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    pretrain(settings(tmp_path, tiny_tokenizer_directory, max_steps=1, num_epochs=3))
    assert "num_epochs = 3.0 is not used" in capsys.readouterr().err


def test_mixed_sources(tmp_path: Path, tiny_tokenizer_directory: Path, quick: None) -> None:
    write_corpus(tmp_path)
    pretrain(settings(tmp_path, tiny_tokenizer_directory, max_steps=1, mix={"poems": 2.0, "news": 0.0}))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["asked"]["mix"] == {"poems": 2.0, "news": 0.0}
    pretrain(settings(tmp_path, tiny_tokenizer_directory, output="one", max_steps=1, mix={"news": 0.0}))
    assert plan["rows_per_epoch"] == 2 * json.loads((tmp_path / "one" / "plan.json").read_text())["rows_per_epoch"]


@pytest.mark.parametrize(
    ("mix", "what", "remedy"),
    [
        ({"poem": 1.0}, "a source poem that", "Did you mean poems"),
        ({"poems": 0.0, "news": 0.0}, "every source a weight of 0", "positive weight"),
        ({"poems": 0.001}, "none of its", "0 to leave it out"),
    ],
)
def test_a_mix_that_cannot_be(
    tmp_path: Path, tiny_tokenizer_directory: Path, mix: dict[str, float], what: str, remedy: str
) -> None:
    write_corpus(tmp_path)
    with pytest.raises(ConfigError, match=what) as fault:
        pretrain(settings(tmp_path, tiny_tokenizer_directory, mix=mix))
    assert remedy in fault.value.remedy


def test_a_corpus_without_documents(tmp_path: Path, tiny_tokenizer_directory: Path) -> None:
    write_corpus(tmp_path, documents=2, held_out=2)
    with pytest.raises(DataError, match="no document to train on"):
        pretrain(settings(tmp_path, tiny_tokenizer_directory))
    (tmp_path / "other").mkdir()
    corpus.write_corpus(tmp_path / "other" / "corpus", [])
    with pytest.raises((DataError, ArtifactError), match="no document"):
        pretrain(settings(tmp_path / "other", tiny_tokenizer_directory))


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the run as a signal does, after update `step`."""
    original = loop.Loop.save

    def save(self: loop.Loop, *_: Any, **__: Any) -> None:
        original(self)
        if self.step == step:
            raise Interrupted("stopped", "Run the same command again to go on from there.")

    monkeypatch.setattr(loop.Loop, "save", save)


def test_a_corpus_without_held_out_documents_can_be_resumed(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    write_corpus(tmp_path, held_out=0)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        pretrain(settings(tmp_path, tiny_tokenizer_directory, max_steps=4))
    made = pretrain(settings(tmp_path, tiny_tokenizer_directory, max_steps=4))
    assert (made["updates"], made["held_out_loss"]) == (4, None)


def test_an_unfinished_run_is_gone_on_with_only_with_its_settings(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    write_corpus(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted) as stopped:
            pretrain(settings(tmp_path, tiny_tokenizer_directory))
        assert stopped.value.remedy == "Run the same command again to go on from there."
        with pytest.raises(Interrupted) as stopped:
            pretrain(settings(tmp_path, tiny_tokenizer_directory, overwrite=True))
        assert "without --overwrite" in stopped.value.remedy
    with pytest.raises(ArtifactError, match=r"weight_decay: 0\.1 -> 0\.2"):
        pretrain(settings(tmp_path, tiny_tokenizer_directory, weight_decay=0.2))
    # How often lines are logged and checkpoints kept changes no weight.
    made = pretrain(settings(tmp_path, tiny_tokenizer_directory, log_every=5, keep_last=1))
    assert made["updates"] == 12
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 8, 10, 12]
    with pytest.raises(ArtifactError, match="finished run"):
        pretrain(settings(tmp_path, tiny_tokenizer_directory))
    made = pretrain(settings(tmp_path, tiny_tokenizer_directory, weight_decay=0.2, max_steps=2, overwrite=True))
    assert made["updates"] == 2
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_tokens_of_another_tokenizer_are_not_taken(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """A first try that ended before its plan leaves tokens; a second with other inputs makes its own."""
    write_corpus(tmp_path)

    def fail(*_: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(session, "_time_updates", fail)
        pretrain(settings(tmp_path, tiny_tokenizer_directory, max_steps="auto", time_limit_minutes=1))
    assert (tmp_path / "run" / "tokens" / "train" / "meta.json").exists()
    write_corpus(tmp_path / "second", documents=12)
    config = settings(tmp_path / "second", tiny_tokenizer_directory, max_steps=1)
    pretrain(config.model_copy(update={"output": tmp_path / "run"}))
    pretrain(config)
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("run", "second/run")]
    assert plans[0]["rows_per_epoch"] == plans[1]["rows_per_epoch"]


def test_a_tokenizer_with_files_missing_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        pretrain(settings(tmp_path, tmp_path / "tokenizer"))
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        pretrain(settings(tmp_path, tmp_path / "tokenizer"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", float("inf")),
        ("learning_rate", float("nan")),
        ("learning_rate", -1.0),
        ("muon_learning_rate", float("inf")),
        ("weight_decay", float("inf")),
        ("weight_decay", -0.1),
        ("max_grad_norm", float("nan")),
        ("num_epochs", float("inf")),
        ("time_limit_minutes", float("inf")),
        ("warmup_ratio", 1.5),
        ("max_steps", 0),
        ("batch_size", -2),
        ("mix", {"poems": float("inf")}),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        settings(tmp_path, tmp_path, **{name: value})


def test_a_compiler_that_does_not_work_leaves_plain_layers(
    tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a g++ that finds no Python.h: the run goes on uncompiled, says so, and gives what plain layers give."""
    from torch._inductor.exc import InductorError

    write_corpus(tmp_path)
    plain = settings(tmp_path, tiny_tokenizer_directory, output="plain", compile=False, max_steps=3)
    pretrain(plain)

    def broken(*_: Any, **__: Any) -> None:
        raise InductorError(RuntimeError("Python.h: No such file or directory"), None)

    def break_layers(model: Any, device: str, **_: Any) -> bool:
        for layer in session.compilation.decoder_layers(model):
            layer._compiled_call_impl = broken
        return True

    monkeypatch.setattr(session, "compile_layers", break_layers)
    pretrain(settings(tmp_path, tiny_tokenizer_directory, output="broken", compile=True, max_steps=3))
    assert "run plainly" in capsys.readouterr().err
    assert json.loads((tmp_path / "broken" / "plan.json").read_text())["compiled"] is False
    assert weights(tmp_path / "broken") == weights(tmp_path / "plain")


def test_the_start_from_counts_is_taken_where_it_is_a_small_share_of_the_run() -> None:
    """Vocabulary 4,096, width 256: 40 x 6 x 4,096^2 x 256 = 1.03 TFLOP, 5 % of a run of 20.6."""
    shape = presets.preset("4M")

    def taken(work: float, **changes: Any) -> bool:
        config = build(PretrainConfig, {"size": "4M", "max_length": 512, **changes})
        return pretrain_module.starts_from_counts(config, shape, changes.pop("vocabulary", 4096), work)

    assert taken(21e12) and not taken(20e12)
    assert taken(1.0, start="bigram") and not taken(1e20, start="random")
    rows: Any = type("Rows", (), {"per_source": [100, 50]})()

    def work(**changes: Any) -> float:
        config = build(PretrainConfig, {"size": "4M", "max_length": 512, **changes})
        return pretrain_module._training_flops(config, shape, 4096, rows, [1.0, 2.0], 1e11)

    per_token = shape.training_flops_per_token(4096, 256)
    assert work(max_steps=10) == 10 * 4096 * per_token
    assert work(num_epochs=3) == 3 * 200 * 512 * per_token
    assert work(num_epochs=3, time_limit_minutes=0.1) == 6e11
    assert work(num_epochs=3, time_limit_minutes=1000) == 3 * 200 * 512 * per_token
