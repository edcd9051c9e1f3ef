"""Keys, numbers for Prometheus, time limits, and the page to chat on."""

from __future__ import annotations

import html as entities
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from onecard import pipeline
from onecard.config import AskConfig, ServeConfig
from onecard.errors import ConfigError
from onecard.serve import page
from onecard.serve.access import KEY_VARIABLE, api_key
from onecard.serve.client import ServerError, ask
from onecard.serve.metrics import Metrics
from onecard.serve.server import RunningServer, start_server

QUESTION = [{"role": "user", "content": "你好, fox?"}]


@pytest.fixture(scope="module")
def guarded(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    torch.set_num_threads(1)
    file = tmp_path_factory.mktemp("key") / "key.txt"
    file.write_text("geheim-密\nsecond line\n", encoding="utf-8")
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny", api_key_file=file))
    yield server
    server.stop()


def root(server: RunningServer) -> str:
    return server.url.removesuffix("/v1")


def test_who_has_no_key_is_refused(guarded: RunningServer) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 2}
    wrong = ["", "Bearer", "Bearer geheim", "geheim", "Bearer geheim-\u5bc7"]
    for given in wrong:
        headers = [(b"authorization", given.encode())] if given else []
        answer = httpx.post(guarded.url + "/chat/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), given
    for path in ("/v1/models", "/metrics", "/nothing"):
        assert httpx.get(root(guarded) + path).status_code == 401
    assert httpx.get(root(guarded) + "/health").status_code == 200
    right = httpx.post(
        guarded.url + "/chat/completions", json=body, headers=[(b"authorization", "Bearer geheim-密".encode())]
    )
    assert right.status_code == 200


def test_ask_gives_the_key(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(guarded.url, "tiny", "你好", 2, "geheim-密").completion_tokens <= 2
    with pytest.raises(ServerError, match="401"):
        ask(guarded.url, "tiny", "你好", 2)
    monkeypatch.setattr("onecard.serve.client.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="401"):
        ask(guarded.url, "tiny", "你好", 2, "geheim")


@pytest.mark.parametrize("through_openai", [True, False])
def test_a_recipe_asks_its_model_where_the_environment_holds_a_key(
    tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch, through_openai: bool
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "plain")
    if not through_openai:
        monkeypatch.setattr("onecard.serve.client.importlib.util.find_spec", lambda name: None)
    walk = pipeline._Walk.__new__(pipeline._Walk)
    answers = walk._ask(AskConfig(questions=["你好"], max_new_tokens=2), tiny_model_directory)
    assert [answer["question"] for answer in answers] == ["你好"]


def test_openai_s_client_gives_the_key(tiny_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, " plain ")
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny"))
    try:
        for key, expected in (("plain", None), ("other", openai.AuthenticationError)):
            with openai.OpenAI(base_url=server.url, api_key=key, max_retries=0) as client:
                if expected is None:
                    assert [model.id for model in client.models.list()] == ["tiny"]
                else:
                    with pytest.raises(expected):
                        client.models.list()
    finally:
        server.stop()


def test_key_files_that_hold_none_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert api_key(None) == ""
    empty = tmp_path / "empty"
    empty.write_text("\nlater\n")
    with pytest.raises(ConfigError, match="is empty"):
        api_key(empty)
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key(tmp_path / "none")


@pytest.fixture(scope="module")
def running(tiny_model_directory: Path) -> Iterator[RunningServer]:
    torch.set_num_threads(1)
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny", max_concurrent=2))
    yield server
    server.stop()


def measured(server: RunningServer) -> dict[str, float]:
    text = httpx.get(root(server) + "/metrics").text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = {line.split("{")[0].split()[0] for line in lines}
    described = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= described
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_count_what_was_answered(running: RunningServer) -> None:
    before = measured(running)
    body: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 3, "ignore_eos": True}
    usage = httpx.post(running.url + "/chat/completions", json=body).json()["usage"]
    httpx.post(running.url + "/chat/completions", json=body | {"stream": True})
    httpx.post(running.url + "/chat/completions", json=body | {"model": "none"})
    after = measured(running)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert more('onecard_tokens_total{kind="completion"}') == 6
    assert more('onecard_tokens_total{kind="prompt"}') == 2 * usage["prompt_tokens"]
    assert more('onecard_finished_total{reason="length"}') == 2
    assert more('onecard_http_answers_total{status="404"}') == 1
    assert more("onecard_time_to_first_token_seconds_count") == more("onecard_request_seconds_count") == 2
    assert after["onecard_active_requests"] == 0
    assert after["onecard_slots"] == 2
    # The second time the beginning of the prompt was known, in whole pages of 16 tokens.
    assert more('onecard_tokens_total{kind="cached_prompt"}') == (usage["prompt_tokens"] - 1) // 16 * 16


def test_histograms_count_within_each_bound() -> None:
    metrics = Metrics()
    metrics.count_end(time.monotonic() - 0.3, "stop", 5, 0, 2)
    text = metrics.text({"onecard_slots": ("Slots.", 4)})
    assert 'onecard_request_seconds_bucket{le="0.25"} 0\nonecard_request_seconds_bucket{le="0.5"} 1' in text
    assert 'onecard_request_seconds_bucket{le="+Inf"} 1' in text
    assert "# TYPE onecard_slots gauge\nonecard_slots 4\n" in text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_and_frees_its_slot(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine = running.service.engine
    step = engine._decoder.step

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return step(*arguments)

    monkeypatch.setattr(engine._decoder, "step", slowly)
    monkeypatch.setattr(running.service, "time_limit_seconds", 0.4)
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 150, "ignore_eos": True, "stream": stream}
    begun = time.monotonic()
    answer = httpx.post(running.url + "/chat/completions", json=body)
    assert 0.3 < time.monotonic() - begun < 3
    if stream:
        last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
        assert last["error"]["code"] == "time_limit"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "time_limit")
        assert "0.4 seconds" in answer.json()["error"]["message"]
    limit = time.monotonic() + 2
    while engine.active:
        assert time.monotonic() < limit, "the slot was not freed"
        time.sleep(0.01)


def test_who_leaves_is_counted(running: RunningServer) -> None:
    before = measured(running).get('onecard_finished_total{reason="left"}', 0)
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", running.url + "/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    limit = time.monotonic() + 3
    while measured(running).get('onecard_finished_total{reason="left"}', 0) == before:
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_the_page_loads_nothing_and_runs_its_own_script_only(running: RunningServer) -> None:
    answer = httpx.get(root(running) + "/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|src=|@import|url\(", answer.text)
    # The hashes are those of what was sent.
    import base64
    import hashlib

    for tag in ("script", "style"):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert inside is not None
        wanted = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{wanted}'" in policy


def test_a_model_s_name_is_never_html() -> None:
    name = '"><script>alert(1)</script>&amp; 模型'
    made = page.html(name, asks_key=True)
    assert made.count("<script>") == 1
    held = re.search(r'data-settings="([^"]*)"', made)
    assert held is not None
    assert json.loads(entities.unescape(held[1])) == {"model": name, "key": True}
