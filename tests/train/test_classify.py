"""The verbs classify and predict from labelled rows to the class of a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import lines, weights
from torch.nn import functional as F

from onecard.config import ClassifyConfig, PredictConfig
from onecard.data.packing import PackedRows, gather
from onecard.data.tokens import Encoded, write_store
from onecard.errors import ConfigError, DataError
from onecard.evaluate.predict import Classifier, predict
from onecard.model import attention
from onecard.model.classifier import encode_texts, load_classifier, logits_of
from onecard.model.load import load_tokenizer
from onecard.settings import build
from onecard.train import session
from onecard.train.classification import Classify
from onecard.train.classify import classify

GOOD, BAD = ["lovely", "很好", "warm"], ["awful", "太差", "cold"]


def write_rows(path: Path, count: int = 60) -> Path:
    rows = []
    for i in range(count):
        words, label = ((GOOD, "good"), (BAD, "bad"))[i % 2]
        rows.append({"text": f"Room {i}: {words[i % 3]} and {words[(i + 1) % 3]}.", "label": label})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def made(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(model),
        "sources": [str(folder / "rows.jsonl")],
        "output": str(folder / "run"),
        "max_length": 64,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "evaluate_every": 10,
        "save_every": 5,
        "held_out": 0.3,
        "learning_rate": 3e-3,
        "compile": False,
        "precision": "fp32",
    }
    return classify(build(ClassifyConfig, settings | changes))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_time_updates", lambda *_: 0.01)
    monkeypatch.setattr("onecard.report.Page.figure", lambda *_, **__: None)
    write_rows(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def encoder_directory(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    """A BERT of two layers with random weights, [CLS] and [SEP] around every text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [*GOOD, *BAD, "Room 1 2 3 4 5 6 7 8 9 0 : and ."]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    kind: Any = PreTrainedTokenizerFast
    fast = kind(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    directory = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    settings: Any = BertConfig
    BertModel(
        settings(
            vocab_size=len(fast),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
        )
    ).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_two_classes_are_learned_and_saved_with_their_names(
    tmp_path: Path, tiny_model_directory: Path, encoder_directory: Path, kind: str
) -> None:
    base = tiny_model_directory if kind == "decoder" else encoder_directory
    result = made(tmp_path, base, max_steps=80, evaluate_every=40, save_every=80)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["held_out_loss"] < 0.3 < rows[0]["loss"]
    assert result["accuracy"]["value"] > 0.9
    assert result["labels"] == ["bad", "good"]
    written = json.loads((tmp_path / "run" / "classification.json").read_text())
    assert np.sum(written["confusion"]) == written["texts"] == result["texts"] > 10
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["class_temperature"] == written["temperature"]
    assert not (tmp_path / "run" / "model" / "generation_config.json").exists()
    says = Classifier(tmp_path / "run")(["It is awful and 太差.", "A warm room, lovely."])
    assert [each["label"] for each in says] == ["bad", "good"]
    assert sum(says[0]["probabilities"].values()) == pytest.approx(1, abs=1e-6)
    assert says[0]["probability"] == max(says[0]["probabilities"].values())


def test_packed_and_padded_texts_have_the_loss_and_gradients_of_each_alone(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    documents = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]
    store = write_store(tmp_path / "store", [Encoded("s", ids) for ids in documents], vocabulary=384, tokenizer_hash="")
    classes, weights_C = [0, 2, 1, 2], [0.5, 1.0, 2.0]
    store.write_values(np.array(classes, dtype=float)[:, None])
    exact = load_classifier(tiny_model_directory, ["a", "b", "c"]).double()
    losses = []
    for ids, wanted in zip(documents, classes):
        hidden = exact.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        losses.append(weights_C[wanted] * F.cross_entropy(exact.score(hidden[:, -1]), torch.tensor([wanted])))
    meant = torch.stack(losses).mean()
    meant.backward()
    for padded in (False, True):
        torch.manual_seed(1)
        model = load_classifier(tiny_model_directory, ["a", "b", "c"])
        model.load_state_dict(exact.float().state_dict())
        exact.double()
        assert padded or attention.switch(model, writes=False)
        objective = Classify(several=False, weights=weights_C, padded=padded)
        rows = PackedRows(store, 8)
        batch = gather(rows, list(range(sum(rows.per_source))), pad_id=0)
        assert objective.count(batch) == 4
        loss = objective.loss(model.train(), batch, scale=1 / 4, device="cpu", row_tokens=8)
        loss.backward()
        assert loss.item() == pytest.approx(meant.item(), rel=1e-5)
        for name, parameter in exact.named_parameters():
            got = dict(model.named_parameters())[name].grad
            if parameter.grad is None:
                assert got is None
                continue
            assert torch.allclose(got.double(), parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_text_has_the_same_logits_whatever_stands_beside_it(tmp_path: Path, tiny_model_directory: Path) -> None:
    """Also where padding is the end of text, and a text spells that token."""
    base = tmp_path / "base"
    tokenizer = load_tokenizer(tiny_model_directory)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    for name in ("config.json", "model.safetensors"):
        (base / name).write_bytes((tiny_model_directory / name).read_bytes())
    made(tmp_path, base, max_steps=2)
    model, tokenizer = load_classifier(tmp_path / "run"), load_tokenizer(tmp_path / "run")
    texts = [f"cold{tokenizer.eos_token}", "a much longer text, warm and lovely, about a room", "x"]
    documents, cut = encode_texts(tokenizer, texts, 64)
    assert cut == 0
    assert tokenizer.eos_token_id not in documents[0]
    together = logits_of(model, documents)
    for number, ids in enumerate(documents):
        assert torch.allclose(logits_of(model, [ids])[0], together[number], atol=1e-5)
        assert torch.allclose(logits_of(model, [ids, documents[1]])[0], together[number], atol=1e-5)


def test_the_order_of_the_labels_does_not_depend_on_the_process(tmp_path: Path, tiny_model_directory: Path) -> None:
    made(tmp_path, tiny_model_directory, max_steps=2)
    here = Classifier(tmp_path / "run")(["cold room"])[0]["probabilities"]
    code = (
        "import json, sys; from pathlib import Path; from onecard.evaluate.predict import Classifier;"
        "print(json.dumps(Classifier(Path(sys.argv[1]))(['cold room'])[0]['probabilities']))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    there = json.loads(done.stdout.splitlines()[-1])
    assert list(there) == list(here)
    assert there == pytest.approx(here, abs=1e-5)


def test_several_labels_each_have_a_probability_and_a_threshold(tmp_path: Path, tiny_model_directory: Path) -> None:
    rows = []
    for i in range(60):
        labels = [name for name, yes in (("warm", i % 2), ("loud", i % 3 == 0)) if yes]
        rows.append({"text": f"Room {i} " + (" ".join(labels) or "plain"), "labels": labels})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = made(tmp_path, tiny_model_directory, several_labels=True, max_steps=60, class_weights="balanced")
    assert result["macro_f1"]["value"] > 0.8
    says = Classifier(tmp_path / "run")(["Room 3 warm loud", "Room 8 plain"])
    assert says[0]["label"] == ["loud", "warm"]
    assert says[1]["label"] == []
    assert says[1]["probability"] == []


def test_adapters_learn_the_head_too_and_load_in_peft(tmp_path: Path, tiny_model_directory: Path) -> None:
    from peft import PeftModel

    result = made(tmp_path, tiny_model_directory, lora_rank=4, max_steps=30)
    assert result["accuracy"]["value"] > 0.9
    base = load_classifier(tiny_model_directory, ["bad", "good"])
    # What the library says about its neighbours is not ours to mend.
    warnings.simplefilter("ignore")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    merged = load_classifier(tmp_path / "run")
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        one = loaded.base_model.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]
        one = loaded.base_model.model.score(one)
        other = merged.score(merged.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1])
    assert torch.allclose(one, other, atol=1e-5)


def test_a_run_that_was_cut_goes_on_to_the_same_weights(
    tmp_path: Path, tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onecard.train.loop import Loop

    made(tmp_path, tiny_model_directory, output=str(tmp_path / "whole"))
    original = Loop.update

    def cut(self: Loop, number: int) -> Any:
        if self.step == 7:
            raise RuntimeError("power cut")
        return original(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "update", cut)
        with pytest.raises(RuntimeError, match="power cut"):
            made(tmp_path, tiny_model_directory)
    made(tmp_path, tiny_model_directory)
    assert weights(tmp_path / "whole") == weights(tmp_path / "run")


def test_rows_are_dropped_with_a_reason(tmp_path: Path, tiny_model_directory: Path) -> None:
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows += [{"text": rows[0]["text"], "label": "bad"}]  # said to be good above
    rows += [rows[1], {"text": "no label here"}, {"label": "good"}, {"text": " ", "label": "good"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = made(tmp_path, tiny_model_directory, max_steps=1)["rows"]
    assert found["dropped"] == {
        "missing_label": 1,
        "missing_text": 1,
        "empty_text": 1,
        "conflicting_labels": 2,
        "exact_duplicate": 1,
    }
    assert found["read"] == 65
    assert found["kept"] == 59


def test_one_class_alone_and_models_that_cannot_are_refused_in_words(
    tmp_path: Path, tiny_model_directory: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a b c", "label": "good"}) + "\n")
    with pytest.raises(DataError, match="the same label"):
        made(tmp_path, tiny_model_directory)
    with pytest.raises(ConfigError, match="is no classifier"):
        Classifier(tiny_model_directory)


def test_a_file_for_each_class_needs_no_label_field(tmp_path: Path, tiny_model_directory: Path) -> None:
    for name, words in (("good", GOOD), ("bad", BAD)):
        text = "\n".join(f"{words[i % 3]} room number {i}" for i in range(20))
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [{"path": str(tmp_path / f"{name}.txt"), "name": name, "split": "line"} for name in ("good", "bad")]
    found = made(tmp_path, tiny_model_directory, sources=sources, max_steps=1)["rows"]
    assert found["labels"] == ["bad", "good"]
    assert found["kept"] == 40


def test_a_column_may_say_what_is_held_out(tmp_path: Path, tiny_model_directory: Path) -> None:
    rows = [
        {"text": f"Number {n} is {word}.", "label": word, "part": part}
        for n, part in enumerate(["train"] * 6 + ["dev", "test"] + ["?"])
        for word in ("good", "bad")
    ]
    (tmp_path / "parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [str(tmp_path / "parts.jsonl")]
    found = made(tmp_path, tiny_model_directory, max_steps=1, sources=parts, split_field="part")["rows"]
    assert found["held_out"] == 4
    assert found["dropped"] == {"unknown_split": 2}
    assert found["texts_of_label"] == {"bad": 6, "good": 6}


def test_predict_writes_a_line_for_each_row_and_compares(tmp_path: Path, tiny_model_directory: Path) -> None:
    made(tmp_path, tiny_model_directory)
    rows = [{"text": "lovely room", "label": "good"}, {"note": "nothing"}, {"text": "太差", "label": "bad"}]
    rows.append({"text": "cold" + " and cold" * 80, "label": "never heard of"})
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PredictConfig.model_validate(
        {"model": tmp_path / "run", "sources": [str(tmp_path / "new.jsonl")], "output": tmp_path / "out"}
    )
    result = predict(config)
    written = lines(tmp_path / "out" / "predictions.jsonl")
    assert [(row["text"], row["line"]) for row in written] == [("lovely room", 1), ("太差", 3), (rows[3]["text"], 4)]
    assert [row["label"] for row in written[:2]] == ["good", "bad"]
    assert (result["read"], result["predicted"], result["rejected"]) == (4, 3, {"missing_text": 1})
    assert result["truncated"] == 1  # of more than 64 tokens
    assert result["compared"] == 2
    assert result["accuracy"]["value"] == 1.0
