"""The senses within a real run: heat, faults, energy and its cost, with recorded samples instead of a card."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import events, lines, pretrain_settings, quicken, steps

from onecard.config import PretrainConfig
from onecard.errors import Interrupted
from onecard.machine.faults import HardwareFault
from onecard.machine.sensors import Sample, Sampler
from onecard.settings import build
from onecard.train import checkpoint, control, heat, report, vitals
from onecard.train.metrics import RunLog, read_lines
from onecard.train.pretrain import pretrain
from onecard.train.vitals import Vitals, energy_text

WARM = Sample(card_celsius=60, card_watts=200.0, card_utilisation=0.9, host_memory_bytes=5, xids=(), card_lost=False)
HOT = Sample(card_celsius=95, card_watts=350.0)


class Recorded:
    """`of(n)` is sample number n, from 0."""

    def __init__(self, of: Callable[[int], Sample]) -> None:
        self.of, self.count = of, 0

    def sample(self) -> Sample:
        self.count += 1
        return self.of(self.count - 1)


@pytest.fixture(autouse=True)
def quick_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr("onecard.train.session._time_updates", lambda *_: 0.01)
    monkeypatch.setattr(vitals, "Sampler", partial(Sampler, interval_seconds=0.001))
    monkeypatch.setattr(heat, "LOOK_EVERY_SECONDS", 0.001)


@pytest.fixture
def train(
    folder: Path, tiny_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    def run(of: Callable[[int], Sample], **changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(vitals, "open_sensors", lambda *_: Recorded(of))
        plain = pretrain_settings(folder, tiny_tokenizer_directory, start="random", **changes)
        return pretrain(build(PretrainConfig, plain | {"output": str(tmp_path / "run")}))

    return run


def test_a_run_that_gets_hot_waits_and_its_energy_has_a_price(
    train: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def of(_: int) -> Sample:
        """Hot from the first update on, and until the run has begun to wait."""
        waiting = any(row["event"] == "thermal" for row in read_lines(run / "events.jsonl"))
        return HOT if (run / "metrics.jsonl").exists() and not waiting else WARM

    result = train(of, electricity_price=0.3, currency="EUR")
    begin, end = events(run, "thermal")
    assert (begin["state"], begin["card_celsius"]) == ("begin", 95)
    assert (end["state"], end["card_celsius"]) == ("end", 60)
    assert steps(run) == list(range(1, 13))
    assert result["energy_kwh"] > 0
    assert result["energy_cost"] == pytest.approx(result["energy_kwh"] * 0.3)
    assert result["currency"] == "EUR"
    assert result["cooling_seconds"] > 0
    rows = [row for row in lines(run / "metrics.jsonl") if "card_celsius" in row]
    assert max(row["card_celsius"] for row in rows) == 95
    energy = [row["energy_kwh"] for row in rows]
    assert energy == sorted(energy)
    assert 0 < energy[-1] <= result["energy_kwh"] + 1e-9
    assert all("card_memory_celsius" not in row for row in rows)
    page = (run / "report.html").read_text()
    assert "Heat and power" in page
    assert "for the card to cool" in page
    assert "energy of the card" in page
    assert "energy of the card" in capsys.readouterr().out


def test_a_hot_run_slows_down_and_learns_the_same(
    train: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat, "SETTLE_SECONDS", 0.0)
    run = tmp_path / "run"

    def of(_: int) -> Sample:
        """Too hot until the run rests a fifth of its time."""
        duties = [row["duty"] for row in read_lines(run / "events.jsonl") if row["event"] == "thermal"]
        return HOT if not duties or min(duties) > 0.8 else Sample(card_celsius=85, card_watts=200.0)

    def learned() -> list[Any]:
        return [(row["step"], row["loss"], row["tokens"], row["lr"]) for row in lines(run / "metrics.jsonl")]

    cool_result = train(lambda _: WARM, when_hot="slow")
    cool = learned()
    shutil.rmtree(run)
    result = train(of, when_hot="slow")
    assert learned() == cool
    duties = [row["duty"] for row in events(run, "thermal")]
    assert duties[:2] == [0.9, 0.8] and duties == sorted(duties, reverse=True)
    assert (cool_result["cooling_seconds"], result["cooling_seconds"] > 0) == (0.0, True)
    waited = [row["cooling_seconds"] for row in lines(run / "metrics.jsonl") if "cooling_seconds" in row]
    assert waited == sorted(waited) and waited[-1] == pytest.approx(result["cooling_seconds"], abs=1e-3)
    assert result["seconds"] == lines(run / "metrics.jsonl")[-1]["seconds"]


def test_without_a_card_there_is_no_energy_and_no_zero(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = train(lambda _: Sample(host_memory_bytes=5), electricity_price=0.3)
    assert (result["energy_kwh"], result["energy_cost"], result["cooling_seconds"]) == (None, None, 0.0)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert any(row.get("host_memory_bytes") == 5 for row in rows)
    assert not any(key.startswith(("card_", "energy")) for row in rows for key in row)
    assert "Heat and power" not in (tmp_path / "run" / "report.html").read_text()


def test_a_pause_that_is_asked_for_while_the_card_cools_is_obeyed_at_once(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def of(n: int) -> Sample:
        if n == 20:
            control.ask(tmp_path / "run", control.PAUSE)
        return HOT

    with pytest.raises(Interrupted, match="Paused after update"):
        train(of)
    assert [row["state"] for row in events(tmp_path / "run", "thermal")] == ["begin", "end"]


def test_a_signal_ends_the_cooling(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def of(n: int) -> Sample:
        if n == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return HOT

    with pytest.raises(Interrupted, match="SIGTERM"):
        train(of)
    newest = checkpoint.newest_whole(tmp_path / "run")
    assert newest is not None


def test_a_broken_card_whose_memory_is_whole_stops_after_a_save(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(HardwareFault, match="Xid 62: the controller inside the card stopped"):
        train(lambda _: Sample(xids=(62,)) if (run / "metrics.jsonl").exists() else WARM, save_every=100)
    newest = checkpoint.newest_whole(run)
    assert newest is not None
    assert newest[0] == steps(run)[-1]
    (fault,) = events(run, "fault")
    assert fault["what"].startswith("The card has a fault")
    # Repaired, it goes on from there.
    assert train(lambda _: WARM, save_every=100)["updates"] == 12
    assert steps(run) == list(range(1, 13))


def test_what_a_broken_memory_holds_is_not_saved(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(HardwareFault, match="uncorrected ECC"):
        train(lambda _: Sample(ecc_uncorrected=int((run / "metrics.jsonl").exists())), save_every=100)
    assert checkpoint.newest_whole(run) is None


def test_an_update_that_fails_on_a_lost_card_says_so(
    train: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = False

    def update(*_: Any) -> Any:
        nonlocal lost
        lost = True
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("onecard.train.loop.Loop.update", update)
    with pytest.raises(HardwareFault, match="no longer answers") as caught:
        train(lambda _: Sample(card_lost=lost))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_update_that_fails_on_a_whole_card_is_a_bug(
    train: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr("onecard.train.loop.Loop.update", update)
    with pytest.raises(RuntimeError, match="something else"):
        train(lambda _: WARM)


def test_the_picture_has_what_is_known() -> None:
    from matplotlib.figure import Figure

    rows = [
        {"seconds": 60.0, "card_celsius": 60, "card_watts": 300.0},
        {"seconds": 120.0, "card_celsius": 70},
    ]
    picture = Figure()
    report._draw_heat(picture.add_subplot(), rows)
    heat_axes, power_axes = picture.axes
    assert [line.get_xydata().tolist() for line in heat_axes.lines] == [[[1.0, 60.0], [2.0, 70.0]]]
    assert [line.get_xydata().tolist() for line in power_axes.lines] == [[[1.0, 300.0]]]
    legend = heat_axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["card", "power"]


# --- without a run ------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(run: Path, monkeypatch: pytest.MonkeyPatch, sample: Sample, clock: Clock) -> tuple[Vitals, Sampler]:
    made: list[Sampler] = []

    def sampler(sensors: Any) -> Sampler:
        made.append(Sampler(sensors, clock=clock))
        return made[0]

    monkeypatch.setattr(vitals, "Sampler", sampler)
    config = PretrainConfig(size="26M", electricity_price=0.6, currency="元")
    return vitals.open_vitals(config, run, "cpu", sensors=Recorded(lambda _: sample)), made[0]


def test_energy_goes_on_after_a_resume_also_of_updates_that_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, clock = RunLog(tmp_path), Clock()
    for step, energy in ((1, 0.5), (2, 1.0)):
        log.update(step=step, energy_kwh=energy)
    senses, sampler = opened(tmp_path, monkeypatch, Sample(card_watts=3.6e6), clock)
    log.cut_after(1)
    assert senses.energy_kwh == 1.0
    sampler.sample()
    clock.now = 1.0
    sampler.sample()  # 3.6 MJ: 1 kWh
    assert senses.energy_kwh == pytest.approx(2.0)
    assert senses.row(2)["energy_kwh"] == pytest.approx(2.0)
    assert senses.result()["energy_cost"] == pytest.approx(1.2)
    assert energy_text(senses.result()) == "2 kWh, 1.20 元"


def test_a_line_without_new_samples_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    senses, sampler = opened(tmp_path, monkeypatch, WARM, Clock())
    assert senses.row(1) == {}
    sampler.sample()
    assert senses.row(2) == {
        "card_celsius": 60,
        "card_watts": 200.0,
        "card_utilisation": 0.9,
        "host_memory_bytes": 5,
        "energy_kwh": 0.0,
    }
    assert senses.row(3) == {}


def test_under_use_is_said_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    senses, sampler = opened(tmp_path, monkeypatch, WARM, Clock())
    for _ in range(2):
        senses.after_update(3.0, 10.0)
        for _ in range(60):
            sampler.sample()
        senses.row(4)
    (event,) = events(tmp_path, "under_use")
    assert (event["step"], event["cause"]) == (4, "data")
    assert "warning: Updates wait 30% of their time" in capsys.readouterr().err


def test_energy_that_is_unknown_says_so() -> None:
    assert energy_text({"energy_kwh": None}) == "unknown"
    assert energy_text({"energy_kwh": 0.4213, "energy_cost": None}) == "0.421 kWh"
    assert energy_text({"energy_kwh": 12.345, "energy_cost": 3.7035, "currency": "EUR"}) == "12.3 kWh, 3.70 EUR"
    assert energy_text({"energy_kwh": 0.0004, "energy_cost": 0.0001, "currency": ""}) == "0.4 Wh, less than 0.01"
    assert Vitals(RunLog(Path("nowhere"))).result()["energy_kwh"] is None


def test_readings_for_a_person() -> None:
    assert vitals.readings({"step": 3, "card_celsius": 61, "card_utilisation": 0.973, "energy_kwh": 1.5}) == [
        ["card", "61 °C"],
        ["card at work", "97%"],
        ["energy of the card", "1.5 kWh"],
    ]
    assert vitals.readings({"host_memory_bytes": 3 << 30}) == [["memory used", "3.0 GiB"]]
    assert vitals.readings({"step": 3}) == []
