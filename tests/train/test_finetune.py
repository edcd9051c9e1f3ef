"""The verb finetune from chats to a model directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Stop, lines, run, steps, weights

from onecard.config import FinetuneConfig
from onecard.data import packing
from onecard.data.tokens import TokenStore
from onecard.errors import ArtifactError, ConfigError, DataError
from onecard.model.load import load_model, load_tokenizer
from onecard.settings import build
from onecard.tokenizer.template import encode_chat
from onecard.train import finetune as verb
from onecard.train import loop, session
from onecard.train.finetune import finetune


def write_chats(path: Path, *, count: int = 12, answer: str = "Yes") -> Path:
    rows = [{"prompt": f"Question {i}?", "completion": f"{answer} {i}."} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
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
    }
    return made | changes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring, no figures."""
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)


def tuned(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    return finetune(build(FinetuneConfig, settings(folder, model, **changes)))


def test_what_was_tuned_stops_at_the_end_of_a_turn_everywhere(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_chats(tmp_path / "chats.jsonl")
    ids = torch.arange(20)[None]
    in_memory: dict[str, Any] = {}
    original = session.save_model

    def spy(model: Any, tokenizer: Any, *arguments: Any, **others: Any) -> None:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            in_memory["logits"] = model.eval()(ids).logits
        original(model, tokenizer, *arguments, **others)
        in_memory["eos"] = tokenizer.eos_token  # the caller's own is left as it was

    monkeypatch.setattr(session, "save_model", spy)
    result = tuned(tmp_path, tiny_model_directory)
    made = tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(str(made))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, in_memory["logits"])
    base = load_tokenizer(tiny_model_directory)
    end_of_turn = base.convert_tokens_to_ids("<|im_end|>")
    assert base.eos_token == in_memory["eos"] != "<|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(str(made))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == end_of_turn
    for name in ("config.json", "generation_config.json"):
        stops = json.loads((made / name).read_text())["eos_token_id"]
        assert stops == [end_of_turn, base.eos_token_id]
    question = [{"role": "user", "content": "Question 1?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("Question 1?<|im_end|>\n<|im_start|>assistant\n")
    assert result["rows"]["read"] == 12
    assert result["rows"]["kept"] == 12
    assert 0 < result["rows"]["held_out"] < 12


def test_labels_are_the_answers_and_their_ends_even_if_pad_is_eos(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(tmp_path / "chats.jsonl", count=3)
    batches: list[packing.RowBatch] = []
    original = loop.gather

    def spy(*arguments: Any, **others: Any) -> packing.RowBatch:
        made = original(*arguments, **others)
        if isinstance(arguments[0], packing.PackedRows):  # not the rows of a forecast
            batches.append(made)
        return made

    monkeypatch.setattr(loop, "gather", spy)
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    written = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(written | {"pad_token": "<|im_end|>"}))
    tokenizer = load_tokenizer(base)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id == end_of_turn
    tuned(tmp_path, base, held_out=0.0, max_steps=2)
    answers = set()
    for batch in batches:
        labels = batch.labels[batch.labels != packing.IGNORED].tolist()
        text = tokenizer.decode(labels)
        answers |= set(text.split("<|im_end|>"))
        documents = int((batch.position_ids == 0).sum()) - int(batch.tokens < 64)
        assert labels.count(end_of_turn) == documents
        assert batch.input_ids[-1] == end_of_turn
        assert batch.labels[-1] == packing.IGNORED
    assert answers == {"", "Yes 0.", "Yes 1.", "Yes 2."}


def chat_length(model: Path, question: str, answer: str) -> tuple[int, int]:
    tokenizer = load_tokenizer(model)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    encoded = encode_chat(tokenizer, messages)
    return len(encoded.ids), encoded.assistant_mask.index(True)


def test_an_answer_that_is_cut_off_is_dropped_and_one_label_is_enough(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    rows = [{"prompt": "?" * 200, "completion": "No."}, {"prompt": "Why?", "completion": "Because " * 40}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = chat_length(tiny_model_directory, "Why?", "Because " * 40)[1]
    made = tuned(tmp_path, tiny_model_directory, held_out=0.0, max_length=prompt + 1)
    assert made["rows"] | {"tokens": 0} == {
        "read": 2,
        "kept": 1,
        "held_out": 0,
        "dropped": {"answer_beyond_max_length": 1},
        "truncated": 1,
        "tokens": 0,
        "learned_tokens": 1,
    }
    rejected = lines(tmp_path / "run" / "rejected-00000.jsonl")
    assert [(row["reason"], row["line"]) for row in rejected] == [("answer_beyond_max_length", 1)]
    model = load_model(tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    # The one label was learned.
    base = load_model(tiny_model_directory)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters()))


def test_no_row_left_is_an_error_and_may_be_mended(tmp_path: Path, tiny_model_directory: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(DataError, match="No row is left to train on .answer_beyond_max_length 12"):
        tuned(tmp_path, tiny_model_directory, max_length=8)
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(DataError, match="All 12 rows are held out"):
        tuned(tmp_path, tiny_model_directory, held_out=1.0)
    assert tuned(tmp_path, tiny_model_directory, max_steps=1)["updates"] == 1


def test_rejections_with_damage_and_odd_file_names_are_written(tmp_path: Path, tiny_model_directory: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    write_chats(folder / "a.jsonl")
    (folder / os.fsdecode("对话.gif".encode("gbk"))).write_bytes(b"")
    (folder / "b.json").write_bytes(b'{"prompt": "' + "这是一个好的句子，我们都知道".encode() * 3 + b'\xff"')
    tuned(tmp_path, tiny_model_directory, sources=[str(folder)], max_steps=1)
    rows = [json.loads(line) for line in (tmp_path / "run/rejected-00000.jsonl").read_text("utf-8").splitlines()]
    assert [row["reason"] for row in rows] == ["bad_json", "unsupported_file"]
    assert rows[0]["text"].endswith('知道\ufffd"')
    assert rows[1]["file"].endswith("\ufffd.gif")


def test_rows_longer_than_the_model_s_positions_are_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(ConfigError, match="max_length 257 is more than the 256 positions") as fault:
        tuned(tmp_path, tiny_model_directory, max_length=257)
    assert "at most 256" in fault.value.remedy
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    write_chats(tmp_path / "chats.jsonl")
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    config = LlamaConfig.from_pretrained(str(base), vocab_size=100)
    LlamaForCausalLM(config).save_pretrained(str(base))
    with pytest.raises(ArtifactError, match="do not belong together"):
        tuned(tmp_path, base)


def test_a_model_without_chat_template_is_refused(tmp_path: Path, tiny_model_directory: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    base = tmp_path / "base"
    shutil.copytree(tiny_model_directory, base)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        tuned(tmp_path, base)


def test_samples_answer_and_stop(tmp_path: Path, tiny_model_directory: Path) -> None:
    """Overfitted on one answer, the sample is that answer: it ends by itself at the end of the turn."""
    rows = [{"prompt": "Who?", "completion": "You."}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned(tmp_path, tiny_model_directory, held_out=0.0, max_steps=60, evaluate_every=60, save_every=60)
    last = lines(tmp_path / "run" / "samples.jsonl")[-1]
    assert last["text"] == "You."


@pytest.mark.parametrize(
    "stop",
    [Stop("update", 3, signal.SIGTERM), Stop("finish", 6, signal.SIGKILL)],
    ids=str,
)
def test_a_stopped_run_ends_like_one_that_was_not(tmp_path: Path, tiny_model_directory: Path, stop: Stop) -> None:
    write_chats(tmp_path / "chats.jsonl")
    tuned(tmp_path, tiny_model_directory, output=str(tmp_path / "whole"))
    changes = settings(tmp_path, tiny_model_directory)
    assert run("finetune", changes, stop)[0] == (130 if stop.number == signal.SIGTERM else -signal.SIGKILL)
    assert run("finetune", changes)[0] == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert steps(tmp_path / "run") == list(range(1, 7))


def test_a_damaged_token_store_is_made_again(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(tmp_path / "chats.jsonl")
    original = verb.train

    def fail(task: Any) -> Any:
        monkeypatch.setattr(loop.Loop, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        return original(task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(verb, "train", fail)
        tuned(tmp_path, tiny_model_directory)
    monkeypatch.undo()
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    shutil.rmtree(tmp_path / "run" / "tokens" / "held_out")
    (tmp_path / "run" / "tokens" / "train" / "tokens.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"tokens\.bin"):
        TokenStore(tmp_path / "run" / "tokens" / "train")
    assert tuned(tmp_path, tiny_model_directory)["rows"]["read"] == 12


def test_settings_that_nothing_uses_are_named(
    tmp_path: Path, tiny_model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(tmp_path / "chats.jsonl")
    tuned(tmp_path, tiny_model_directory, target_modules=["q_proj"], held_out=0.0, early_stopping=2, max_steps=1)
    said = capsys.readouterr().err
    assert "target_modules is not used" in said and "lora_alpha" not in said
    assert "early_stopping is not used" in said and "keep_best" not in said


def test_a_base_whose_weights_are_no_numbers_is_refused_before_the_first_update(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    write_chats(tmp_path / "chats.jsonl")
    model = load_model(tiny_model_directory)
    name, weight = next((name, weight) for name, weight in model.named_parameters() if "up_proj" in name)
    with torch.no_grad():
        weight[0, 0] = float("nan")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_directory, broken)
    model.save_pretrained(broken)
    with pytest.raises(ArtifactError, match=name):
        tuned(tmp_path, broken)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
