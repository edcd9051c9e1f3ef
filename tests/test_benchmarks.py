"""The measurements run: the checks for a card on a processor, the arguments they pass on, the results file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in ("dense", "dpo", "engines", "gpu", "measurement", "memory", "run", "sft", "start"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("check", ["attention", "loss"])
def test_what_a_card_computes_is_judged_against_fp64(benchmark: Any, check: str) -> None:
    found = benchmark("gpu").CHECKS[check]("cpu", True)
    assert len(found) >= 9
    assert all(case["correct"] for case in found.values()), found
    # fp32 on a processor is far better than the limit, which is for the TF32 of a card: a wrong reference would show.
    assert all(case["error"] < 1e-5 for name, case in found.items() if name.endswith("fp32"))


def test_gradients_of_a_packed_update_are_those_of_transformers_in_fp64(benchmark: Any) -> None:
    gpu = benchmark("gpu")
    wanted_loss, wanted = gpu.exact_gradients(True)
    loss, made = gpu.gradients("cpu", True, "fp32", checkpointing="full")
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert gpu.compared(made, wanted) < 1e-5
    made["model.norm.weight"] *= 1.5
    assert gpu.compared(made, wanted) > 1e-4, "a wrong gradient is seen"


def test_a_wrong_value_is_not_correct(benchmark: Any) -> None:
    gpu = benchmark("gpu")
    assert gpu.judged(0.01, "bf16") == {"error": 0.01, "limit": 0.03, "correct": True}
    assert not gpu.judged(0.04, "bf16")["correct"]
    assert not gpu.judged(float("nan"), "bf16")["correct"]


def test_every_measurement_of_a_card_has_arguments_that_are_known(benchmark: Any, monkeypatch: Any) -> None:
    gpu, dense = benchmark("gpu"), benchmark("dense")
    asked: list[Any] = []
    monkeypatch.setattr(dense, "run", lambda arguments, *_, **__: asked.append(arguments))
    monkeypatch.setattr(dense, "published_model", lambda name, length: (_embedding(), 1.0))
    for tiny in (True, False):
        for words, seconds, published in gpu.speeds(tiny, 100.0).values():
            monkeypatch.setattr(sys, "argv", ["dense.py", *words.split()])
            dense.main()
            assert seconds > 0
            assert published in ("", asked[-1].published)
    assert {arguments.engine for arguments in asked} == {"onecard", "trainer"}
    assert all(arguments.published is None or arguments.published in gpu.PUBLISHED for arguments in asked)


def _embedding() -> Any:
    import torch

    table = torch.nn.Embedding(5, 2)
    table.get_input_embeddings = lambda: table  # type: ignore[assignment]
    return table


def test_a_part_that_fails_or_hangs_loses_only_itself(benchmark: Any) -> None:
    gpu = benchmark("gpu")
    assert "boom" in gpu.process(["-c", "raise SystemExit('boom')"], 20)["fault"]
    assert gpu.process(["-c", "import time; time.sleep(60)"], 0.5) == {"fault": "not done after 0 s"}
    assert gpu.process(["-c", "print('words'); print('{\"a\": 1}')"], 20) == {"a": 1}


def test_each_part_replaces_its_own_section(benchmark: Any) -> None:
    run = benchmark("run")
    text = "# Words\n\n<!-- make bench begin -->\n<!-- make bench end -->\nafter\n"
    text = run.replaced(text, "dense", ["one"])
    text = run.replaced(text, "sft", ["two"])
    text = run.replaced(text, "dense", ["three", "four"])
    assert text == (
        "# Words\n\n<!-- make bench begin -->\n<!-- dense begin -->\nthree\nfour\n<!-- dense end -->\n\n"
        "<!-- sft begin -->\ntwo\n<!-- sft end -->\n\n<!-- make bench end -->\nafter\n"
    )


def test_medians_leave_out_the_first_updates(benchmark: Any) -> None:
    updates = benchmark("measurement").Updates(seconds=[9.0, 9.0, 2.0, 1.0, 4.0], tokens=[4, 4, 4, 4, 4])
    assert updates.tokens_per_second(2) == 2.0
    assert updates.tokens_per_second(9) == 1.0
