"""find-lr: sensible suggestions, and everything left as it was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import pretrain_settings, write_corpus

from onecard import artifact
from onecard.config import FindFinetuneRateConfig, FindPretrainRateConfig
from onecard.settings import build
from onecard.train import find_lr
from onecard.train.find_lr import Point, Trial
from onecard.train.timing import left_as_found

Finder = Callable[..., tuple[dict[str, Any], Path]]


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def find(tmp_path: Path, tiny_tokenizer_directory: Path) -> Finder:
    """Run `find-lr pretrain` on a tiny corpus; returns its document and its directory."""
    write_corpus(tmp_path)

    def run(**changes: Any) -> tuple[dict[str, Any], Path]:
        changes = {"start": "random", "optimizer": "adamw"} | changes
        values = pretrain_settings(tmp_path, tiny_tokenizer_directory, **changes)
        return find_lr.pretrain(build(FindPretrainRateConfig, values)), Path(values["output"])

    return run


def test_the_range_finds_a_rate_between_none_and_too_much(find: Finder) -> None:
    said, output = find(updates=60, lowest_learning_rate=1e-5, highest_learning_rate=10.0)
    rates = [point["learning_rate"] for point in said["points"]]
    ratios = [after / before for before, after in zip(rates, rates[1:])]
    assert rates[0] == pytest.approx(1e-5) and ratios == pytest.approx([1e6 ** (1 / 59)] * len(ratios))
    # A rate of 10 tears this model apart: the test ended before it, and well above what it suggests.
    assert len(rates) < 60 and 3e-4 < said["learning_rate"] < rates[-1] / 3
    smoothed = [point["smoothed"] for point in said["points"]]
    assert min(smoothed) < smoothed[0] - 0.3
    assert "falls fastest" in said["reason"]
    assert sorted(path.name for path in output.iterdir()) == ["find_lr.json", "onecard.json", "report.html"]
    assert json.loads((output / "find_lr.json").read_text())["learning_rate"] == said["learning_rate"]
    assert artifact.read_manifest(output, "find_lr").result["learning_rate"] == said["learning_rate"]
    assert f"--learning-rate {said['learning_rate']:g}" in (output / "report.html").read_text()


def test_short_runs_begin_alike_and_the_best_is_taken(find: Finder) -> None:
    said, _ = find(method="short_runs", updates=30, candidates=[3e-3, 1e-5, 3e-3])
    low, first, again = said["trials"]
    assert (low["learning_rate"], first["learning_rate"]) == (1e-5, 3e-3)
    assert first == again  # nothing of a trial is left for the next
    assert low["losses"][0] == first["losses"][0]
    assert first["end"] < low["end"] and said["learning_rate"] == 3e-3
    assert first["slope"] < 0


def test_muon_moves_both_rates_by_the_same_factor(find: Finder) -> None:
    said, _ = find(updates=20, optimizer="muon", lowest_learning_rate=1e-4, highest_learning_rate=1e-2)
    factor = said["learning_rate"] / said["planned_learning_rate"]
    assert said["muon_learning_rate"] == pytest.approx(0.02 * factor, rel=0.06)


def test_the_model_that_shall_be_tuned_stays_as_it_is(tmp_path: Path, tiny_model_directory: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes, yes"}]}
        for i in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tiny_model_directory.iterdir()}
    torch.manual_seed(7)
    values = {"model": str(tiny_model_directory), "sources": [str(tmp_path / "chats.jsonl")], "updates": 20}
    values |= {"output": str(tmp_path / "found"), "max_length": 32, "held_out": 0, "precision": "fp32"}
    said = find_lr.finetune(build(FindFinetuneRateConfig, values))
    assert said["verb"] == "finetune" and 0 < said["learning_rate"] < 1
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tiny_model_directory.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "found"]


def test_weights_buffers_and_generators_are_put_back_bit_for_bit() -> None:
    model = torch.nn.BatchNorm1d(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(KeyError), left_as_found(model):
        model(torch.randn(4, 3))
        with torch.no_grad():
            model.weight.mul_(2)
        raise KeyError
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), generator)


def points(losses: list[float]) -> list[Point]:
    """Rates of 1e-5, 1e-4.75, ..."""
    return [Point(10 ** (-5 + 0.25 * index), loss, loss) for index, loss in enumerate(losses)]


def test_the_suggestion_lies_where_the_loss_falls_but_below_the_lowest() -> None:
    # Steepest at index 4 (1e-4), lowest at index 7 (10 ** -3.25): a tenth of that is less than where it falls fastest.
    falling = points([6.0, 6.0, 5.9, 5.7, 5.0, 4.4, 4.2, 4.1, 4.3, 6.0])
    found = find_lr.suggest(falling, burst=True)
    assert found.learning_rate == pytest.approx(1e-4) and "still fell" not in found.reason
    # Steepest right before the lowest (at index 6, lowest at 7): kept to a third.
    late = points([6.0, 6.0, 6.0, 6.0, 6.0, 5.9, 5.0, 4.0, 6.0])
    assert find_lr.suggest(late, burst=True).learning_rate == pytest.approx(10**-3.25 / 3, rel=0.05)
    # Steepest far below the lowest: raised to a tenth of it.
    early = points([6.0, 5.0, 4.0, 3.9, 3.85, 3.8, 3.75, 3.7, 3.65, 3.6])
    found = find_lr.suggest(early, burst=False)
    assert found.learning_rate == pytest.approx(10**-2.75 / 10, rel=0.05) and "still fell" in found.reason
    assert "too high" in find_lr.suggest(points([6.0, 6.5, 7.0, 8.0, 9.0]), burst=True).reason


def test_the_lowest_end_wins_and_an_edge_is_named() -> None:
    trials = [Trial(1e-4, [3.0] * 20, 2.9, -1.0), Trial(1e-3, [3.0] * 20, 2.5, -0.5), Trial(1e-2, [9.0], None, None)]
    found = find_lr.compare(trials)
    assert found.learning_rate == 1e-3
    assert "(2.500), falling by 0.5" in found.reason and "0.0001 (2.900)" in found.reason
    assert "beyond" not in found.reason and "highest" in find_lr.compare(trials[:2]).reason
    assert "bursts at each" in find_lr.compare(trials[2:]).reason


def test_smoothing_keeps_a_line_and_calms_a_jump() -> None:
    assert find_lr.smooth([2.0] * 9) == pytest.approx([2.0] * 9)
    assert find_lr.smooth([0.0] * 10 + [1.0] + [0.0] * 10)[10] == pytest.approx(0.2, abs=0.01)
