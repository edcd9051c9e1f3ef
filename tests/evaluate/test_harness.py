"""Tasks of lm-evaluation-harness: refused where they would run code or cannot be read; asked of the model exactly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard.config import EvaluateConfig
from onecard.errors import ConfigError, DataError, MissingExtra
from onecard.evaluate import harness
from onecard.evaluate.evaluate import evaluate
from onecard.evaluate.scoring import Passage, costs, costs_and_greedy
from onecard.model.load import load_model, load_tokenizer

TASK = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {test: sums.jsonl}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_a_task_is_looked_at_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no task file"):
        harness.check_tasks([tmp_path / "none.yaml"], allow_functions=False)
    (tmp_path / "base.yaml").write_text("process_docs: !function mine.change\n", encoding="utf-8")
    (tmp_path / "task.yaml").write_text("include: base.yaml\ntask: x\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="base.yaml runs Python functions"):
        harness.check_tasks([tmp_path / "task.yaml"], allow_functions=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"onecard\[harness\]"):
        harness.check_tasks([tmp_path / "task.yaml"], allow_functions=True)


def test_greedy_is_what_the_logits_say(tiny_model_directory: Path) -> None:
    model = load_model(tiny_model_directory)
    ids = [1, 20, 30]
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    likeliest = Passage(ids, [False, False, False, True, True, True])
    one_off = Passage([*ids[:5], (ids[5] + 1) % 300], [False, False, False, True, True, True])
    not_asked = Passage(one_off.ids, [False, False, False, True, True, False])
    found = costs_and_greedy(model, [one_off, likeliest, not_asked], 12)
    assert [greedy for _, greedy in found] == [False, True, True]
    assert [nats for nats, _ in found] == pytest.approx(costs(model, [one_off, likeliest, not_asked], 12), rel=1e-6)


def test_answers_end_at_the_first_stop() -> None:
    def request(text: str, **settings: Any) -> Any:
        return SimpleNamespace(args=(text, settings))

    asked: list[tuple[list[str], int]] = []

    def write(texts: Any, longest: int) -> list[str]:
        asked.append((list(texts), longest))
        return [f"{text} one. two\nthree" for text in texts]

    requests = [request("a", until=["\n", "."]), request("b", until="\n", max_gen_toks=5), request("c")]
    assert harness._written(requests, write) == ["a one", "b one. two", "c one. two\nthree"]
    assert asked == [(["a", "c"], 256), (["b"], 5)]


def test_metrics_are_named_with_their_filter() -> None:
    values = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "em_stderr,strict": "N/A"}
    assert harness._metrics(values) == {
        "acc": {"value": 0.5, "standard_error": 0.1},
        "em (strict)": {"value": 1.0, "standard_error": None},
    }


def test_a_task_is_run_with_local_files(tiny_model_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra harness is not installed")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK, encoding="utf-8")
    rows = [{"question": f"{n} + 1 =", "choices": [f" {n + 1}", " no"], "answer": n % 2} for n in range(6)]
    (tmp_path / "tasks" / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        before = tokenizer.encode(row["question"])
        nats = []
        for choice in row["choices"]:
            ids = tokenizer.encode(str(row["question"]) + choice)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            nats.append(-sum(float(logits[at - 1, ids[at]]) for at in range(len(before), len(ids))))
        by_length = [cost / len(choice) for cost, choice in zip(nats, row["choices"])]
        right["acc"] += nats.index(min(nats)) == row["answer"]
        right["acc_norm"] += by_length.index(min(by_length)) == row["answer"]
    config = EvaluateConfig(
        model=tiny_model_directory,
        corpus=None,
        harness=[tmp_path / "tasks" / "sums.yaml"],
        output=tmp_path / "out",
    )
    found = evaluate(config)["harness"]["model"]["sums"]
    assert {name: one["value"] for name, one in found.items()} == {name: n / 6 for name, n in right.items()}
    assert "lm-evaluation-harness" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    limited = config.model_copy(update={"harness_limit": 1, "overwrite": True})
    assert evaluate(limited)["harness"]["model"]["sums"]["acc"]["value"] in (0.0, 1.0)
    (tmp_path / "tasks" / "sums.jsonl").unlink()
    with pytest.raises(DataError, match="cannot run it"):
        evaluate(config.model_copy(update={"overwrite": True}))
