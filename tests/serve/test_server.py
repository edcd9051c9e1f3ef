"""The HTTP interface: through the application, through a real server with OpenAI's own client, and as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from onecard.config import ServeConfig
from onecard.errors import ArtifactError, MachineError
from onecard.model.load import load_tokenizer
from onecard.serve.application import Service, make_app
from onecard.serve.client import ServerError, ask
from onecard.serve.engine import Engine
from onecard.serve.protocol import ChatRequest, CompletionRequest
from onecard.serve.served import Language
from onecard.serve.server import RunningServer, start_server
from onecard.tokenizer.template import encode_chat

QUESTION = [{"role": "user", "content": "你好, fox?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_directory: Path) -> Any:
    torch.set_num_threads(1)
    return load_tokenizer(tiny_model_directory)


@pytest.fixture(scope="module")
def running(tiny_model_directory: Path) -> Iterator[RunningServer]:
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny", max_concurrent=3))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as made:
        yield made


def post(running: RunningServer, body: Any, path: str = "/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(running.url + path, content=content, timeout=30)


def language(running: RunningServer) -> Language:
    (model,) = running.service.models
    assert isinstance(model, Language)
    return model


def chat_body(**settings: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": QUESTION, "max_tokens": 8, **settings}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- a scripted model behind the application ----------------------------------------------------------------------


@pytest.fixture
def scripted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start an application whose model says given ids; returns a function that posts to it."""
    from test_engine import ScriptedModel

    # The scripted model knows the end of a prompt only when it comes in one piece.
    monkeypatch.setattr("onecard.serve.engine._SHORT_CHUNK_TOKENS", 512)

    engines: list[Engine] = []

    def begin(ids: list[int], *, slots: int = 2, queue: int = 2) -> Any:
        model = ScriptedModel(ids, len(tokenizer))
        model.config.get_text_config().max_position_embeddings = 1024
        engines.append(Engine(model, tokenizer, slots, 1024, queue))  # type: ignore[arg-type]
        service = Service([Language("tiny", engines[-1], tokenizer)], local_only=True)

        async def send(bodies: list[dict[str, Any]], path: str, headers: dict[str, str]) -> list[httpx.Response]:
            transport = httpx.ASGITransport(app=make_app(service), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", timeout=20) as client:
                tasks = [asyncio.create_task(client.post(path, json=body, headers=headers)) for body in bodies]
                if not model.gate.is_set():
                    await asyncio.sleep(0.3)
                    model.gate.set()
                return list(await asyncio.gather(*tasks))

        def post_all(*bodies: dict[str, Any], path: str = "/chat/completions", **headers: str) -> list[httpx.Response]:
            return asyncio.run(send(list(bodies), path, headers))

        post_all.model = model  # type: ignore[attr-defined]
        return post_all

    yield begin
    for engine in engines:
        engine.close()


def test_chunks_join_to_the_whole_and_every_token_has_its_logprob(tokenizer: Any, scripted: Callable[..., Any]) -> None:
    ids = tokenizer.encode("Hello World Foo", add_special_tokens=False)
    send = scripted([*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    settings = {"temperature": 0, "max_tokens": 50, "logprobs": True, "top_logprobs": 2}
    whole, streamed = send(chat_body(**settings), chat_body(**settings, stream=True))
    choice = whole.json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello World Foo"}
    assert choice["finish_reason"] == "stop"
    assert whole.json()["usage"]["completion_tokens"] == len(ids)
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hello World Foo"
    assert len(entries) == len(ids)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    events = events_of(streamed)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Hello World Foo"
    assert sum(len((event["choices"][0]["logprobs"] or {"content": []})["content"]) for event in events) == len(ids)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_a_stop_string_is_cut_out_of_stream_and_whole(tokenizer: Any, scripted: Callable[..., Any]) -> None:
    send = scripted(tokenizer.encode("Hello World Foo", add_special_tokens=False))
    settings = {"temperature": 0, "max_tokens": 50}
    for stop in ("World", ["nothing", "World"]):
        whole, streamed = send(chat_body(**settings, stop=stop), chat_body(**settings, stop=stop, stream=True))
        assert whole.json()["choices"][0]["message"]["content"] == "Hello "
        assert whole.json()["choices"][0]["finish_reason"] == "stop"
        events = events_of(streamed)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Hello "


def test_tool_calls_are_found_and_a_cut_one_carries_length(tokenizer: Any, scripted: Callable[..., Any]) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"at": "狐"}}\n</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    send = scripted([*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    settings = {"temperature": 0, "tools": tools, "max_tokens": 100}
    whole, streamed, cut = send(
        chat_body(**settings),
        chat_body(**settings, stream=True),
        chat_body(**settings | {"max_tokens": 10}),
    )
    # Its prompt has another length, and the scripted model counts from the end of the last prompt it saw.
    (plain,) = send(chat_body(**settings, tool_choice="none"))
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    call = choice["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "狐"}
    deltas = [event["choices"][0]["delta"] for event in events_of(streamed)]
    assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta] == [0]
    assert not any(delta.get("content") for delta in deltas)
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert cut.json()["choices"][0]["message"]["content"].startswith("<tool_call>")
    assert plain.json()["choices"][0]["message"]["content"] == text


def test_a_full_queue_is_429_and_the_others_are_answered(scripted: Callable[..., Any]) -> None:
    send = scripted([40], slots=1, queue=1)
    send.model.gate.clear()
    answers = send(*[chat_body(max_tokens=2) for _ in range(4)])
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"


def test_a_broken_model_is_a_500_that_says_so(scripted: Callable[..., Any]) -> None:
    send = scripted([40])
    send.model.script = []
    whole, streamed = send(chat_body(), chat_body(stream=True))
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    assert "error" in events_of(streamed)[-1]


def test_a_foreign_host_is_refused_while_only_this_machine_is_served(scripted: Callable[..., Any]) -> None:
    send = scripted([40])
    assert send(chat_body(), Host="evil.example")[0].status_code == 403
    assert send(chat_body(), Host="notlocalhost:80")[0].status_code == 403
    assert send(chat_body(), Host="127.0.0.1:8000")[0].status_code == 200
    assert send(chat_body(), Host="[::1]:8000")[0].status_code == 200
    for origin in ("http://evil.example", "http://localhost.evil.example:8000", "null"):
        assert send(chat_body(), Origin=origin)[0].status_code == 403
    assert send(chat_body(), Origin="http://localhost:8000")[0].status_code == 200


# --- OpenAI's client against a real server ------------------------------------------------------------------------


def test_stream_equals_whole_under_a_seed(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "seed": 5, "temperature": 1.2}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_one_bos_over_chat_and_completion(client: openai.OpenAI, running: RunningServer, tokenizer: Any) -> None:
    chat = language(running).encode_chat(ChatRequest(model="tiny", messages=QUESTION))  # type: ignore[arg-type]
    completion = language(running).encode_completion(CompletionRequest(model="tiny", prompt="你好<|startoftext|>"))
    assert chat.count(tokenizer.bos_token_id) == completion.count(tokenizer.bos_token_id) == 1
    assert chat == encode_chat(tokenizer, QUESTION, add_generation_prompt=True).ids
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat)


def test_completions_with_logprobs(client: openai.OpenAI, running: RunningServer) -> None:
    answer = client.completions.create(model="tiny", prompt="The quick", max_tokens=6, logprobs=3, temperature=0)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.top_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs or []) == len(found.text_offset or []) == 6
    # Greedy: the chosen token is the likeliest.
    assert all(max(top.values()) == logprob for top, logprob in zip(found.top_logprobs, found.token_logprobs or []))
    streamed = client.completions.create(model="tiny", prompt=["The quick"], max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    by_ids = client.completions.create(
        model="tiny",
        prompt=language(running).encode_completion(CompletionRequest(model="tiny", prompt="The quick")),
        max_tokens=6,
        temperature=0,
    )
    assert by_ids.choices[0].text == answer.choices[0].text


def test_the_client_sees_errors_as_openai_raises_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="context holds 256") as fault:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 300}])
    assert (fault.value.param, fault.value.code) == ("messages", "context_length_exceeded")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_ask_through_either_client(running: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used for this machine
    answers = [ask(running.url, "tiny", "你好", 5)]
    monkeypatch.setattr("onecard.serve.client.importlib.util.find_spec", lambda name: None)
    answers.append(ask(running.url.removesuffix("/v1"), "tiny", "你好", 5))
    for answer in answers:
        assert answer.completion_tokens <= 5
        assert answer.finish_reason in ("length", "stop")
        assert answer.seconds > 0
    with pytest.raises(ServerError, match="404"):
        ask(running.url, "other", "你好", 5)
    with pytest.raises(ServerError, match="No server"):
        ask("http://127.0.0.1:9", "tiny", "你好", 5)


# --- bad requests -------------------------------------------------------------------------------------------------

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 8.5}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 1000}, "max_completion_tokens"),
    ({"n": 2}, "n"),
    ({"logprobs": True, "top_logprobs": 10_000}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize(("change", "parameter"), BAD_CHATS)
def test_a_bad_parameter_is_a_400_that_names_it(running: RunningServer, change: dict[str, Any], parameter: str) -> None:
    response = post(running, chat_body(**change))
    error = response.json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (parameter, "invalid_request_error")
    assert error["message"].startswith(parameter)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 99999}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_a_bad_completion_is_a_400_that_names_it(
    running: RunningServer, change: dict[str, Any], parameter: str
) -> None:
    response = post(running, {"model": "tiny", "max_tokens": 2, **change}, "/completions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b'{"model":"\\ud83d"}',
     b'{"model":' + b"9" * 6000 + b"}", b'{"temperature":NaN}', b'{"model":"tiny","messages":[[[]]]}', b"\x00" * 100],
)  # fmt: skip
def test_malformed_bodies_are_400(running: RunningServer, body: bytes) -> None:
    for path in ("/chat/completions", "/completions"):
        response = post(running, body, path)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


def test_other_statuses_have_the_same_shape(running: RunningServer) -> None:
    big = post(running, chat_body(messages=[{"role": "user", "content": "a" * (5 << 20)}]))
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    assert httpx.get(running.url + "/nothing").status_code == 404
    wrong_method = httpx.get(running.url + "/chat/completions")
    assert (wrong_method.status_code, "error" in wrong_method.json()) == (405, True)
    assert httpx.get(running.url.removesuffix("/v1") + "/docs").status_code == 404


def test_extras_and_nulls_of_real_clients_are_accepted(running: RunningServer) -> None:
    extras = {"user": "me", "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True, "n": 1, "stop": ""}
    nulls = dict.fromkeys(("temperature", "seed", "logit_bias", "stream", "tools", "response_format", "top_logprobs"))
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]  # fmt: skip
    response = post(running, {**chat_body(**extras, **nulls), "messages": messages})
    assert response.status_code == 200, response.text


# --- clients that leave, and the end ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine = running.service.engine
    step = engine._decoder.step

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)  # a whole answer would take ten seconds
        return step(*arguments)

    monkeypatch.setattr(engine._decoder, "step", slowly)
    host, port = running.url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps(chat_body(max_tokens=200, ignore_eos=True, stream=stream)).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        limit = time.monotonic() + 5
        while engine.active == 0:
            assert time.monotonic() < limit
            time.sleep(0.005)
    left = time.monotonic()
    while engine.active:
        assert time.monotonic() - left < 2, "the slot was not freed"
        time.sleep(0.005)


def test_stopping_lets_a_running_answer_finish(tiny_model_directory: Path) -> None:
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny"))
    with httpx.stream(
        "POST", server.url + "/chat/completions", json=chat_body(max_tokens=150, ignore_eos=True, stream=True)
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        server._server.should_exit = True
        rest = [line for line in lines if line]
    server.stop()
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/models")


def test_a_taken_port_and_a_missing_model_are_told(tmp_path: Path, tiny_model_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=str(port)):
            start_server(ServeConfig(model=tiny_model_directory, port=port))
    with pytest.raises(ArtifactError, match="no model"):
        start_server(ServeConfig(model=tmp_path / "none", port=0))


@pytest.mark.slow
def test_the_process_ends_with_status_0_after_its_answers(tiny_model_directory: Path) -> None:
    command = [sys.executable, "-m", "onecard.cli", "serve", str(tiny_model_directory), "--port", "0", "--name", "tiny"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with httpx.stream(
            "POST", url + "/chat/completions", json=chat_body(max_tokens=150, ignore_eos=True, stream=True), timeout=30
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
