"""The verb distill: a student follows its teacher, and nothing but it where that is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import cut, during, lines, weights

from onecard.config import DistillConfig
from onecard.errors import ConfigError, DataError
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import build
from onecard.tokenizer.difference import first_difference
from onecard.tokenizer.template import encode_chat
from onecard.train import distill as verb
from onecard.train import session
from onecard.train.distill import distill


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no figures."""
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_model_directory: Path) -> Path:
    """The tiny model with other weights, which say something."""
    made = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_model_directory, made)
    model = load_model(made)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    model.save_pretrained(made)
    return made


def learned(folder: Path, model: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Question {i}?", "completion": f"Yes {i}."} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made: dict[str, Any] = {
        "model": str(model), "teacher": str(teacher), "sources": [str(folder / "chats.jsonl")],
        "output": str(folder / "run"), "max_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1,
        "max_steps": 4, "held_out": 0.2, "compile": False, "precision": "fp32", "optimizer": "adamw",
        "distillation_weight": 1.0,
    }  # fmt: skip
    return distill(build(DistillConfig, made | changes))


def test_who_is_the_teacher_has_nothing_to_learn(tmp_path: Path, tiny_model_directory: Path) -> None:
    learned(tmp_path, tiny_model_directory, tiny_model_directory)
    first = lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(0, abs=1e-5)
    assert first["cross_entropy"] > 1  # what stands there was not learned either
    before, after = load_model(tiny_model_directory), load_model(tmp_path / "run")
    for one, other in zip(before.parameters(), after.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("packing", [True, False])
def test_the_first_loss_is_the_mixture_by_hand(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path, packing: bool
) -> None:
    learned(
        tmp_path, tiny_model_directory, teacher, packing=packing, held_out=0.0, max_steps=1,
        distillation_weight=0.7, distillation_temperature=2.0, batch_size=12,
    )  # fmt: skip
    tokenizer = load_tokenizer(tiny_model_directory)
    student, guide = load_model(tiny_model_directory).double(), load_model(teacher).double()
    divergence = cross_entropy = tokens = 0.0
    for line in (tmp_path / "chats.jsonl").read_text().splitlines():
        row = json.loads(line)
        chat = encode_chat(
            tokenizer,
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}],
        )
        ids, mask = torch.tensor(chat.ids), torch.tensor(chat.assistant_mask)[1:]
        with torch.no_grad():
            own, told = (model(ids[None]).logits[0, :-1][mask] for model in (student, guide))
        hot = (told / 2).log_softmax(-1)
        divergence += float((hot.exp() * (hot - (own / 2).log_softmax(-1))).sum())
        cross_entropy -= float(own.log_softmax(-1).gather(1, ids[1:][mask, None]).sum())
        tokens += int(mask.sum())
    [first] = lines(tmp_path / "run" / "metrics.jsonl")
    assert first["divergence"] == pytest.approx(divergence / tokens, rel=1e-4)
    assert first["cross_entropy"] == pytest.approx(cross_entropy / tokens, rel=1e-4)
    assert first["loss"] == pytest.approx((0.7 * 4 * divergence + 0.3 * cross_entropy) / tokens, rel=1e-4)


def test_a_student_moves_towards_its_teacher(tmp_path: Path, tiny_model_directory: Path, teacher: Path) -> None:
    result = learned(tmp_path, tiny_model_directory, teacher, max_steps=12, learning_rate=5e-3)
    losses = [step["loss"] for step in lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0]
    assert result["teacher"] == str(teacher)
    manifest = json.loads((tmp_path / "run" / "onecard.json").read_text())
    assert any(str(teacher) in str(parent) for parent in manifest["parents"])


def test_a_teacher_of_other_tokens_is_refused_with_the_first_that_differs(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    found = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    merged = found["model"]["merges"].pop()  # the last: no other is made of it
    index = found["model"]["vocab"].pop("".join(merged))
    found["model"]["vocab"]["zzz"] = index
    (other / "tokenizer.json").write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"id {index} is") as caught:
        learned(tmp_path, tiny_model_directory, other)
    assert "zzz" in caught.value.what
    assert first_difference(load_tokenizer(teacher), load_tokenizer(tiny_model_directory)) is None


def test_answers_of_the_teacher_are_learned(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onecard.model import generation

    tokenizer = load_tokenizer(teacher)
    said = tokenizer.encode("Perhaps.", add_special_tokens=False)

    def generate(model: Any, prompts: list[list[int]], **_: Any) -> list[generation.Generated]:
        # The second is cut off, and left out.
        return [generation.Generated(said, "length" if place == 1 else "stop") for place in range(len(prompts))]

    monkeypatch.setattr(generation, "generate", generate)
    result = learned(
        tmp_path, tiny_model_directory, teacher, answers="teacher", distillation_weight=0.0, held_out=0.0, max_steps=1
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / verb.ANSWERS).read_text().splitlines()]
    assert len(rows) == result["rows"]["kept"] == 11
    assert rows[1]["messages"] == [
        {"role": "user", "content": "Question 2?"},
        {"role": "assistant", "content": "Perhaps."},
    ]
    monkeypatch.setattr(generation, "generate", lambda *_, **__: [generation.Generated([], "length")] * 12)
    with pytest.raises(DataError, match="ended by itself"):
        learned(tmp_path, tiny_model_directory, teacher, answers="teacher", output=str(tmp_path / "none"))


def test_what_the_teacher_cannot_be_asked_is_counted_and_tools_stay(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from onecard.model import generation

    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    template = other / "chat_template.jinja"
    refusing = "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{%- endif %}"
    template.write_text(refusing + template.read_text(encoding="utf-8"), encoding="utf-8")
    said = load_tokenizer(teacher).encode("Perhaps.", add_special_tokens=False)
    monkeypatch.setattr(
        generation, "generate", lambda model, prompts, **_: [generation.Generated(said, "stop")] * len(prompts)
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    rows = [
        {"messages": chat, "tools": tools},
        {"messages": [{"role": "system", "content": "Be kind."}, *chat]},
        {"messages": chat[:1]},
        {"messages": [{"role": "user", "content": "Where?"}, chat[1]]},
    ]
    source = tmp_path / "asked.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    learned(
        tmp_path, tiny_model_directory, other, sources=[str(source)], answers="teacher", distillation_weight=0.0,
        held_out=0.0, max_steps=1, max_length=256,
    )  # fmt: skip
    answered = [json.loads(line) for line in (tmp_path / "run" / verb.ANSWERS).read_text().splitlines()]
    assert answered[0] == {"messages": [chat[0], {"role": "assistant", "content": "Perhaps."}], "tools": tools}
    assert [set(row) for row in answered] == [{"messages", "tools"}, {"messages"}]
    unasked = [json.loads(line) for line in (tmp_path / "run" / verb.UNASKED).read_text().splitlines()]
    assert [(row["reason"], row["line"]) for row in unasked] == [("refused_by_template", 2), ("user_last", 3)]
    assert "2 rows are not asked (1 refused_by_template, 1 user_last)" in capfd.readouterr().err


def test_noise_on_the_embeddings_of_a_student(tmp_path: Path, tiny_model_directory: Path, teacher: Path) -> None:
    made = {}
    for alpha in (0.0, 20.0):
        folder = tmp_path / str(alpha)
        folder.mkdir()
        learned(folder, tiny_model_directory, teacher, neftune_alpha=alpha, max_steps=2)
        made[alpha] = weights(folder / "run")
    assert made[0.0] != made[20.0]


def test_a_run_that_learns_nothing_of_the_teacher_is_refused(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path
) -> None:
    with pytest.raises(ConfigError, match="nothing is learned"):
        learned(tmp_path, tiny_model_directory, teacher, distillation_weight=0.0)


def test_resumed_and_uninterrupted_students_are_the_same(
    tmp_path: Path, tiny_model_directory: Path, teacher: Path
) -> None:
    folders = [tmp_path / "whole", tmp_path / "halved"]
    for folder in folders:
        folder.mkdir()
    learned(folders[0], tiny_model_directory, teacher, save_every=2)
    with pytest.MonkeyPatch.context() as patch:
        during(patch, 4, cut)
        with pytest.raises(RuntimeError, match="power cut"):
            learned(folders[1], tiny_model_directory, teacher, save_every=2)
    learned(folders[1], tiny_model_directory, teacher, save_every=2)
    assert weights(folders[0] / "run") == weights(folders[1] / "run")
