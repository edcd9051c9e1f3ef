"""Answers that go round in circles: what counts as that, which cause is named, and what is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onecard import artifact
from onecard.config import DiagnoseConfig
from onecard.data.split import question_is_held_out
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.model.load import load_model, load_tokenizer
from onecard.serve.diagnose import diagnose
from onecard.serve.diagnosis import SETTINGS, Answered, Measures, causes, loops, recommended, verdict
from onecard.serve.engine import Engine
from onecard.serve.sampling import SamplingParameters, sampling_defaults
from onecard.settings import build
from onecard.tokenizer.template import encode_chat


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我爱你。" * 8, True),
        ("哈哈哈哈哈哈哈哈", True),
        ("好的好的", False),  # too short to be a loop
        ("The cat sat. " * 9, True),
        ("1. Take flour. 2. Take water. 3. Take salt. 4. Knead it well. 5. Let it rest. 6. Bake it.", False),
        ("话说天下大势，分久必合，合久必分：周末七国分争，并入于秦。", False),
        ("", False),
    ],
)
def test_what_is_a_loop(text: str, expected: bool) -> None:
    assert loops(text) is expected


def measures(now: float, best: float = 0.0, **changes: Any) -> Measures:
    """Forty questions: so many answers loop as it samples now, and so many with a penalty."""
    settings = [Answered(one.name, now, 0.9, now, 0.5) for one in SETTINGS]
    settings[4] = replace(settings[4], looping=best)
    return Measures(**{"questions": 40, "held_out": True, "settings": settings, "end_token": "<|im_end|>", **changes})


def test_the_cause_is_what_was_measured() -> None:
    names = [
        [cause.name for cause in causes(found)]
        for found in (
            measures(0.02),
            measures(0.5, 0.05),
            measures(0.5, 0.5),
            measures(0.5, 0.5, references_looping=0.3),
            measures(0.5, 0.5, most_common=0.4, most_common_answer="I do not know."),
            measures(0.5, 0.1, end_is_first=0.1, end_probability=0.001, truncated=0.5),
            measures(0.0, 0.0, end_is_written=False),
        )
    ]
    assert names == [
        [],
        ["sampling"],
        ["the model"],
        ["the training data"],
        ["the training data"],
        ["the end of answers", "sampling"],
        ["stop tokens"],
    ]
    cut = causes(measures(0.5, 0.5, end_is_first=0.1, truncated=0.5))[0]
    assert "50% of its rows were cut" in cut.what and "max_length" in cut.remedy
    assert verdict(measures(0.02)) == "Answers do not loop: 2% of 40 held-out questions."
    assert verdict(measures(0.5, 0.05)) == "50% of the answers to 40 held-out questions loop. The cause: sampling."


def test_the_setting_that_changes_least_is_recommended() -> None:
    assert recommended(measures(0.0)).setting == "as it is now"
    found = measures(0.5, 0.05)
    assert recommended(found).setting == "greedy, repetition_penalty 1.1"
    # One answer more of forty is no difference; a better answer is.
    found.settings[5] = replace(found.settings[5], looping=0.025, likeness=0.5)
    assert recommended(found).setting == "greedy, repetition_penalty 1.1"
    found.settings[5] = replace(found.settings[5], likeness=0.6)
    assert recommended(found).setting == "temperature 0.7, top_p 0.9, repetition_penalty 1.1"


def test_a_greedy_model_keeps_its_penalty() -> None:
    config = SimpleNamespace(do_sample=False, temperature=0.7, repetition_penalty=1.1)
    found = sampling_defaults(SimpleNamespace(generation_config=config))  # type: ignore[arg-type]
    assert found == SamplingParameters(temperature=0, repetition_penalty=1.1)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes, number {i} it is."} for i in range(6)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_model_is_measured_and_its_report_written(
    tmp_path: Path, tiny_model_directory: Path, chats: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_directory, model)
    before = artifact.read_manifest(model) if (model / artifact.MANIFEST).is_file() else None
    settings = {
        "model": str(model), "questions": [str(chats)], "question_count": 4, "max_new_tokens": 24,
        "output": str(tmp_path / "out"), "write": True,
    }  # fmt: skip
    result = diagnose(build(DiagnoseConfig, settings))
    assert [row["setting"] for row in result["settings"]] == [one.name for one in SETTINGS]
    assert result["held_out"] is None and result["questions"] == 4
    # What the model thinks of the end, beside a computation of one row at a time.
    tokenizer, made = load_tokenizer(model), load_model(model)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    ends = []
    for row in report["answers"]:
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["reference"]}]
        ids = encode_chat(tokenizer, chat).ids
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        place = len(ids) - 1 - ids[::-1].index(end)
        with torch.inference_mode():
            ends.append(float(made(torch.tensor([ids])).logits[0, place - 1].softmax(-1)[end]))
    assert result["end_token"] == "<|im_end|>"
    assert result["end_probability"] == pytest.approx(sorted(ends)[1] / 2 + sorted(ends)[2] / 2, rel=1e-4)
    # What was recommended is what is served from now on.
    chosen = next(one for one in SETTINGS if one.name == result["recommended"])
    if chosen.sampling is not None:
        assert sampling_defaults(load_model(model)) == chosen.sampling
    written = json.loads((model / "generation_config.json").read_text())
    eos = written["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (eos if isinstance(eos, list) else [eos])
    if before is not None:
        assert artifact.verify(model).content_hash == before.content_hash
    assert "Do the answers go round in circles?" in (tmp_path / "out" / "report.html").read_text()
    assert result["verdict"] in capfd.readouterr().out
    again = diagnose(build(DiagnoseConfig, settings | {"output": str(tmp_path / "again")}))
    assert again["end_is_written"]


def test_a_run_is_asked_what_it_held_out(tmp_path: Path, tiny_model_directory: Path, chats: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model_directory, run / "model")
    held_out = [i for i in range(6) if question_is_held_out(3, 0.5, [{"role": "user", "content": f"Question {i}?"}])]
    assert 0 < len(held_out) < 6
    asked = {"sources": [{"path": str(chats)}], "seed": 3, "held_out": 0.5}
    artifact.write_manifest(
        run, "run", settings={"asked": asked}, parents=[chats], result={"rows": {"kept": 4, "truncated": 1}}
    )
    settings = {"model": str(run), "max_new_tokens": 2, "output": str(tmp_path / "out")}
    result = diagnose(build(DiagnoseConfig, settings))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["question"] for row in report["answers"]] == [f"Question {i}?" for i in held_out]
    assert (result["held_out"], result["truncated"]) == (True, 0.25)


def test_a_model_that_is_made_of_a_file_is_not_written_to(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for model in (adapter, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match="holds no generation_config"):
            diagnose(build(DiagnoseConfig, {"model": str(model), "output": str(tmp_path / "out"), "write": True}))


def test_rows_that_are_not_known_are_asked_for(tmp_path: Path, tiny_model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="not known") as caught:
        diagnose(build(DiagnoseConfig, {"model": str(tiny_model_directory), "output": str(tmp_path / "out")}))
    assert "--questions" in caught.value.remedy


def test_questions_that_fill_the_context_are_counted(
    tmp_path: Path, tiny_model_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": text, "completion": "Yes."} for text in ("short", "long " * 200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(tiny_model_directory), "questions": [str(path)], "max_new_tokens": 2,
        "output": str(tmp_path / "o"),
    }  # fmt: skip
    assert diagnose(build(DiagnoseConfig, settings))["questions"] == 1
    assert "1 questions are left out: they fill the context of 256 tokens" in capfd.readouterr().err
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match="leaves room"):
        diagnose(build(DiagnoseConfig, settings | {"output": str(tmp_path / "p")}))


def test_a_model_that_fails_is_not_measured_as_silent(
    tmp_path: Path, tiny_model_directory: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_accept", lambda self, request, *_: bool(request.finish("error", "NaN")) or True)
    settings = {"model": str(tiny_model_directory), "questions": [str(chats)], "output": str(tmp_path / "out")}
    with pytest.raises(ArtifactError, match="NaN"):
        diagnose(build(DiagnoseConfig, settings))
