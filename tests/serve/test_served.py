"""Several models by name: classifiers, vectors and adapters, each asked by its own route."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from onecard.config import ServeConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.evaluate.predict import Classifier
from onecard.model import lora
from onecard.model.encoder import readable_tokens
from onecard.model.load import load_model, load_tokenizer
from onecard.serve.served import open_served
from onecard.serve.server import RunningServer, start_server

TEXTS = ["The fox.", "话说天下大势，分久必合。", "a", "the lazy dog said so at length. " * 3]


@pytest.fixture(scope="module")
def encoder_directory(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    from transformers import BertConfig, BertModel

    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("served") / "bert"
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def classifier_directory(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_directory: Path) -> Path:
    """As `onecard classify` writes it, the temperature found on held-out texts included."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = load_tokenizer(tiny_tokenizer_directory)
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("served") / "moods"
    config: Any = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, id2label={0: "good", 1: "坏", 2: "none"},
        problem_type="single_label_classification", pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.class_temperature = 0.1
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter_directory(tmp_path_factory: pytest.TempPathFactory, tiny_model_directory: Path) -> Path:
    """Random adapters on the tiny model, large enough that answers differ."""
    from peft import LoraConfig, get_peft_model

    directory = tmp_path_factory.mktemp("served") / "adapter"
    torch.manual_seed(3)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    with lora.quiet():
        adapted = get_peft_model(load_model(tiny_model_directory), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_model_directory)
    adapted.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def running(
    tiny_model_directory: Path, encoder_directory: Path, classifier_directory: Path, adapter_directory: Path
) -> Iterator[RunningServer]:
    torch.set_num_threads(1)
    server = start_server(
        ServeConfig(
            model=tiny_model_directory,
            name="tiny",
            more=[encoder_directory, classifier_directory],
            adapter=[f"other={adapter_directory}"],
            embeddings=True,
            port=0,
            max_concurrent=2,
        )
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as made:
        yield made


def refused(running: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(running.url + path, json=body, timeout=30)
    assert answer.status_code in (400, 404), answer.text
    return {"status": answer.status_code, **answer.json()["error"]}


def test_all_models_are_listed_and_an_unknown_one_names_them(running: RunningServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "bert", "moods", "other"]
    assert client.models.retrieve("moods").to_dict()["labels"] == ["good", "坏", "none"]
    fault = refused(running, "/completions", {"model": "x", "prompt": "a"})
    assert fault["status"] == 404
    assert fault["code"] == "model_not_found"
    assert "'tiny', 'bert', 'moods', 'other'" in fault["message"]


def test_vectors_of_an_encoder_are_those_of_transformers(client: openai.OpenAI, encoder_directory: Path) -> None:
    from transformers import AutoModel

    made = client.embeddings.create(model="bert", input=TEXTS)  # in base64, as the client asks
    model, tokenizer = AutoModel.from_pretrained(encoder_directory).eval(), load_tokenizer(encoder_directory)
    for entry, text in zip(made.data, TEXTS):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).last_hidden_state
        wanted = torch.nn.functional.normalize(hidden[0].mean(0), dim=0)
        assert torch.allclose(torch.tensor(entry.embedding), wanted, atol=1e-6)
    assert made.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    ids = tokenizer(TEXTS[0])["input_ids"]
    again = client.embeddings.create(model="bert", input=ids, encoding_format="float")
    assert again.data[0].embedding == pytest.approx(made.data[0].embedding, abs=1e-6)


def test_vectors_of_a_language_model_are_the_mean_of_its_last_states(
    client: openai.OpenAI, tiny_model_directory: Path
) -> None:
    model, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    made = client.embeddings.create(model="tiny", input=TEXTS)
    for entry, text in zip(made.data, TEXTS):
        with torch.no_grad():
            hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        wanted = torch.nn.functional.normalize(hidden[0].mean(0), dim=0)
        assert torch.allclose(torch.tensor(entry.embedding), wanted, atol=1e-6)


def test_texts_that_cannot_be_read_are_refused(running: RunningServer) -> None:
    fault = refused(running, "/embeddings", {"model": "bert", "input": ["a", "fox " * 200]})
    assert fault["code"] == "context_length_exceeded"
    assert "input[1] has more than 128 tokens" in fault["message"]
    for wrong in ([], [[]], [99999], [1.5], {"a": 1}, ["a", 1]):
        assert refused(running, "/embeddings", {"model": "bert", "input": wrong})["param"].startswith("input")
    assert refused(running, "/embeddings", {"model": "bert", "input": "a", "dimensions": 4})["param"] == "dimensions"


def test_classes_are_those_that_predict_gives(running: RunningServer, classifier_directory: Path) -> None:
    wanted = Classifier(classifier_directory, device="cpu")(TEXTS)
    answer = httpx.post(running.url + "/classify", json={"model": "moods", "input": TEXTS}).json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert len({entry["label"] for entry in answer["data"]}) > 1
    for entry, one in zip(answer["data"], wanted):
        assert entry["label"] == one["label"]
        assert entry["probabilities"] == pytest.approx(one["probabilities"], abs=1e-6)
        assert sum(entry["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert answer["truncated"] == 0
    single = httpx.post(running.url + "/classify", json={"model": "moods", "input": "fox " * 200}).json()
    assert single["truncated"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"model": "bert", "messages": [{"role": "user", "content": "a"}]}),
        ("/completions", {"model": "moods", "prompt": "a"}),
        ("/embeddings", {"model": "moods", "input": "a"}),
        ("/classify", {"model": "tiny", "input": "a"}),
        ("/classify", {"model": "bert", "input": "a"}),
    ],
)
def test_a_route_of_another_kind_says_what_the_model_does(
    running: RunningServer, path: str, body: dict[str, Any]
) -> None:
    fault = refused(running, path, body)
    assert (fault["status"], fault["param"], fault["code"]) == (400, "model", "unsupported_model")
    assert "/v1/" in fault["message"]


def test_an_adapter_answers_as_peft_does_and_its_base_as_before(
    client: openai.OpenAI, tiny_model_directory: Path, adapter_directory: Path
) -> None:
    from peft import PeftModel

    base, tokenizer = load_model(tiny_model_directory), load_tokenizer(tiny_model_directory)
    ids = tokenizer("The fox", return_tensors="pt")["input_ids"]
    said: dict[str, str] = {}
    for name in ("tiny", "other"):
        with lora.quiet(), torch.inference_mode():
            model = base if name == "tiny" else PeftModel.from_pretrained(base, adapter_directory)
            answer = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
        wanted = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        made = client.completions.create(model=name, prompt=ids[0].tolist(), temperature=0, max_tokens=12)
        said[name] = made.choices[0].text
        assert said[name] == wanted
    assert said["tiny"] != said["other"]


def test_names_are_told_apart_and_adapters_are_adapters(tiny_model_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would both be named"):
        start_server(ServeConfig(model=tiny_model_directory, more=[tiny_model_directory], port=0))
    for spelled in ("x", "=a", "x=", f"x={tmp_path}"):
        with pytest.raises(ConfigError, match="adapter"):
            start_server(ServeConfig(model=tiny_model_directory, adapter=[spelled], port=0))


def test_a_server_of_classes_only_has_no_page_and_stays_up(classifier_directory: Path) -> None:
    server = start_server(ServeConfig(model=classifier_directory, port=0))
    try:
        root = server.url.removesuffix("/v1")
        assert httpx.get(root + "/").status_code == 404
        assert json.loads(httpx.get(root + "/health").text) == {"status": "ok", "active": 0, "waiting": 0}
        assert "onecard_slots 0" in httpx.get(root + "/metrics").text
    finally:
        server.stop()


def test_texts_wait_in_a_queue_with_limits(classifier_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going, go_on = threading.Event(), threading.Event()
    answer = Classifier.__call__

    def slowly(self: Classifier, texts: list[str]) -> Any:
        going.set()
        assert go_on.wait(30)
        return answer(self, texts)

    monkeypatch.setattr(Classifier, "__call__", slowly)
    config = ServeConfig(model=classifier_directory, name="moods", port=0, max_queue=1, time_limit_seconds=1.0)
    server = start_server(config)
    try:
        found: list[httpx.Response] = []

        def ask() -> None:
            found.append(httpx.post(server.url + "/classify", json={"model": "moods", "input": "a"}, timeout=30))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert going.wait(30)
        threads[1].start()
        deadline = time.monotonic() + 30
        while len(server.service._pools[id(server.service.models[0])][1]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ask()
        assert (found[0].status_code, found[0].json()["error"]["code"]) == (429, "queue_full")
        for thread in threads:
            thread.join()
        assert [one.json()["error"]["code"] for one in found[1:]] == ["time_limit"] * 2
        go_on.set()
        ask()
        assert found[-1].status_code == 200
    finally:
        go_on.set()
        server.stop()


def test_the_longest_text_is_what_is_asked_for(classifier_directory: Path, encoder_directory: Path) -> None:
    longest = [
        open_served(path, "x", embeddings=False, max_length=wanted).card()["max_model_len"]
        for path in (classifier_directory, encoder_directory)
        for wanted in ("auto", 20, 10_000)
    ]
    assert longest == [64, 20, 64, 128, 20, 128]


def test_positions_after_the_padding_are_those_that_can_be_read() -> None:
    from transformers import RobertaConfig, RobertaModel

    model = RobertaModel(
        RobertaConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=34, pad_token_id=1,
        )
    ).eval()  # fmt: skip
    assert readable_tokens(model, 34) == 32
    with torch.inference_mode():
        model(input_ids=torch.full((1, 32), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, 33), 5))


@pytest.mark.parametrize(
    ("file", "said", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "lasttoken"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "b.Dense"}], "Dense"),
    ],
)
def test_vectors_that_are_made_otherwise_are_refused(
    encoder_directory: Path, tmp_path: Path, file: str, said: Any, named: str
) -> None:
    made = tmp_path / "bert"
    shutil.copytree(encoder_directory, made)
    (made / file).parent.mkdir(exist_ok=True)
    (made / file).write_text(json.dumps(said))
    with pytest.raises(ArtifactError, match=named):
        open_served(made, "x", embeddings=False, max_length="auto")
