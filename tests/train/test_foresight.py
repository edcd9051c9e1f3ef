"""What a run says of its memory before it begins: foretold, mended, refused, and set beside what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_toys import TOY
from tiny_runs import SIZE, events, lines, tiny_pretrain, weights, write_corpus

from onecard.config import PretrainConfig
from onecard.errors import ConfigError, DoesNotFit
from onecard.plan.job import Job, Memory
from onecard.settings import build
from onecard.train import foresight, loop, session
from onecard.train.pretrain import pretrain
from onecard.train.run_plan import batch_shape

MIB = 1 << 20
REAL = foresight.forecast
HELD = 300 * MIB

pytestmark = pytest.mark.usefixtures("quick")


def formula(job: Job) -> Memory:
    """10 MiB of weights, 8 of states (8bit: 2), and 4 a row (selective 2, full 1)."""
    row = {"none": 4, "selective": 2, "full": 1}.get(str(job.activation_checkpointing), 3)
    states = {"fp32": 8, "8bit": 2, "host": 0}[job.optimizer_states]
    kinds = {"parameters": 10 * MIB, "optimizer": states * MIB, "activations": row * job.batch_size * MIB}
    total = sum(kinds.values())
    return Memory(total, total, 0, kinds)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many MiB are free; the forecast is the formula."""
    monkeypatch.setattr(foresight, "forecast", lambda: formula)
    monkeypatch.setattr(foresight, "resident_bytes", lambda: HELD)
    rates = {"fp32": 1e11, "bf16": 1e9}
    machine = replace(TOY, device="cpu", capability=None, flops_per_second=rates, host_bytes_per_second=None)
    monkeypatch.setattr(foresight, "this_machine", lambda: machine)

    def free(mib: float) -> None:
        monkeypatch.setattr(foresight, "room_bytes", lambda _: int(mib * MIB))

    free(1000)
    return free


def test_the_prediction_stands_beside_the_measurement(
    tmp_path: Path, tiny_tokenizer_directory: Path, room: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 rows: 10 + 8 + 2 x 4 MiB beside the 300 that the process held."""
    write_corpus(tmp_path)
    made = pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=2))
    assert made["predicted_peak_memory_bytes"] == 326 * MIB
    assert made["peak_memory_bytes"] > 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["predicted_memory"] == {"parameters": 10 * MIB, "optimizer": 8 * MIB, "activations": 8 * MIB}
    assert (plan["activation_checkpointing"], plan["optimizer_states"]) == ("none", "fp32")
    said = capsys.readouterr()
    assert "memory: 26.0 MiB (parameters 10.0 MiB, optimizer 8.0 MiB, activations 8.0 MiB); 1000.0 MiB" in said.err
    assert "326.0 MiB" in said.out and "peak memory" in said.out
    assert "326.0 MiB" in (tmp_path / "run" / "report.html").read_text()


def test_auto_takes_less_where_the_usual_does_not_fit(
    tmp_path: Path, tiny_tokenizer_directory: Path, room: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """4,096 tokens of an update are 128 rows of 32: 530 MiB. 200 are free; the update keeps its rows."""
    write_corpus(tmp_path)
    room(200)
    auto = {"batch_size": "auto", "gradient_accumulation_steps": "auto", "max_steps": 1}
    made = pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", **auto))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["batch_size"] * plan["gradient_accumulation_steps"] == 128
    assert made["predicted_peak_memory_bytes"] - HELD <= 0.95 * 200 * MIB
    assert "530.0 MiB would be needed and 200.0 MiB are free: " in capsys.readouterr().err


def test_only_what_is_auto_is_changed(tmp_path: Path, tiny_tokenizer_directory: Path, room: Any) -> None:
    """A fixed split of 2 rows needs 26 MiB; 20 are free: 8 bits or checkpointing must do it, and a resumption stays."""
    write_corpus(tmp_path)
    room(21)
    made = pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=1))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["batch_size"], plan["gradient_accumulation_steps"]) == (2, 2)
    assert made["predicted_peak_memory_bytes"] - HELD <= 0.95 * 21 * MIB
    chosen = plan["activation_checkpointing"], plan["optimizer_states"]
    assert chosen != ("none", "fp32")
    given = {"activation_checkpointing": "full", "optimizer_states": "fp32", "max_steps": 1}
    config = tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "given", **given)
    room(20.5)  # 10 + 8 + 2: it fits, with less than the margin, and nothing is left to choose
    assert pretrain(config)["predicted_peak_memory_bytes"] == HELD + 20 * MIB


def test_a_resumption_goes_on_with_what_was_chosen(
    tmp_path: Path, tiny_tokenizer_directory: Path, room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    room(21)
    config = tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=4, save_every=2)
    used: list[Any] = []
    original = session.Activations

    def spy(**settings: Any) -> Any:
        used.append(settings["checkpointing"])
        return original(**settings)

    monkeypatch.setattr(session, "Activations", spy)
    with monkeypatch.context() as patch:
        run = loop.Loop.update

        def end(self: loop.Loop, number: int) -> Any:
            if number == 3:
                raise RuntimeError("power cut")
            return run(self, number)

        patch.setattr(loop.Loop, "update", end)
        with pytest.raises(RuntimeError, match="power cut"):
            pretrain(config)
    room(10_000)
    made = pretrain(config)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert used == [plan["activation_checkpointing"]] * 2
    assert made["predicted_peak_memory_bytes"] == plan["predicted_peak_memory_bytes"]
    fresh = tiny_pretrain(
        tmp_path,
        tiny_tokenizer_directory,
        tmp_path / "fresh",
        max_steps=4,
        save_every=2,
        activation_checkpointing=plan["activation_checkpointing"],
        optimizer_states=plan["optimizer_states"],
    )
    pretrain(fresh)
    assert weights(tmp_path / "run") == weights(tmp_path / "fresh")


def test_what_cannot_fit_is_refused_with_what_would_and_a_way_to_try(
    tmp_path: Path, tiny_tokenizer_directory: Path, room: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """With nothing auto 26 MiB; 23 are free: 1 row (22) fits."""
    write_corpus(tmp_path)
    room(23)
    given = {"activation_checkpointing": "none", "optimizer_states": "fp32", "max_steps": 1}
    config = tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", **given)
    with pytest.raises(DoesNotFit) as caught:
        pretrain(config)
    fault = caught.value
    assert fault.exit_status == 3
    assert "26.0 MiB" in fault.what and "activations 8.0 MiB" in fault.what and "23.0 MiB" in fault.what
    assert "batch_size = 1, gradient_accumulation_steps = 4" in fault.remedy and "check_memory = false" in fault.remedy
    assert fault.document["would_fit"] == {"batch_size": 1, "gradient_accumulation_steps": 4}
    assert [row["reason"] for row in events(tmp_path / "run", "error")] == [fault.what]
    assert not (tmp_path / "run" / "plan.json").exists()
    # It is not the same run any more, and begins anew in the same place.
    made = pretrain(config.model_copy(update={"check_memory": False}))
    assert made["updates"] == 1 and "tried all the same" in capsys.readouterr().err


def test_nothing_would_fit(tmp_path: Path, tiny_tokenizer_directory: Path, room: Any) -> None:
    write_corpus(tmp_path)
    room(3)
    with pytest.raises(DoesNotFit, match="predicted to need") as caught:
        pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=1))
    assert "smaller model" in caught.value.remedy and caught.value.document["would_fit"] is None


def test_what_cannot_be_predicted_runs(
    tmp_path: Path,
    tiny_tokenizer_directory: Path,
    room: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(_: Job) -> Memory:
        raise NotImplementedError("an operation without a fake\nand more")

    monkeypatch.setattr(foresight, "forecast", lambda: broken)
    write_corpus(tmp_path)
    made = pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=1))
    assert made["updates"] == 1 and made["predicted_peak_memory_bytes"] is None
    assert "cannot be predicted (an operation without a fake)" in capsys.readouterr().err
    assert "predicted_memory" not in next(events(tmp_path / "run", "plan"))
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


def test_the_engine_foretells_its_own_run(
    tmp_path: Path, tiny_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 4 bytes, exactly; and the whole within a factor of what the run adds to its process."""
    monkeypatch.setattr(foresight, "forecast", REAL)
    write_corpus(tmp_path)
    made = pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", max_steps=1))
    found = json.loads((tmp_path / "run" / "plan.json").read_text())["predicted_memory"]
    assert found["parameters"] == pytest.approx(4 * made["parameters"], rel=0.01)
    assert found["activations"] > 0 and made["predicted_peak_memory_bytes"] > 100 * MIB


def test_attention_by_document_is_foretold_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException

    asked: list[bool] = []

    def memory(job: Job) -> Memory:
        asked.append(job.packed)
        if job.packed:
            raise DataDependentOutputException("a length")  # type: ignore[arg-type]
        return formula(job)

    monkeypatch.setattr("onecard.train.forecast.memory", memory)
    job = Job(None, 2, 32)
    assert REAL()(job) == formula(job) and asked == [True, False]
    with pytest.raises(DataDependentOutputException):
        monkeypatch.setattr("onecard.train.forecast.memory", lambda job: memory(replace(job, packed=True)))
        REAL()(job)


def test_settings_that_cannot_be_combined_are_still_refused(tmp_path: Path, tiny_tokenizer_directory: Path) -> None:
    write_corpus(tmp_path)
    changes = {"optimizer": "adafactor", "optimizer_states": "8bit"}
    with pytest.raises(ConfigError, match="saves nothing"):
        pretrain(tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", **changes))
    made = pretrain(
        tiny_pretrain(tmp_path, tiny_tokenizer_directory, tmp_path / "run", optimizer="adafactor", max_steps=1)
    )
    assert made["updates"] == 1


def test_the_split_of_an_update_by_hand() -> None:
    """4,096 tokens in rows of 512: 8 rows at once on a CPU, which takes up to 4,096; 16,384 on a card."""

    def split(device: str, update_tokens: int, **settings: Any) -> tuple[int, int]:
        config = build(PretrainConfig, {"size": "4M", **settings})
        return batch_shape(config, row_tokens=512, update_tokens=update_tokens, device=device)

    assert split("cpu", 4096) == (8, 1) == split("cuda", 4096)
    assert split("cpu", 16384) == (8, 4) and split("cuda", 16384) == (32, 1)
    assert split("cpu", 16384, batch_size=4) == (4, 8)
    assert split("cpu", 16384, gradient_accumulation_steps=16) == (2, 16)
    assert split("cuda", 65536, optimizer_in_backward=True, max_grad_norm=0) == (32, 1)


def test_the_size_of_these_runs_is_known() -> None:
    from onecard.model.presets import preset

    assert preset(SIZE).update_tokens == 4096
