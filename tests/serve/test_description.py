"""The description tells of every route and field, and requests made from it are answered or refused, never a fault."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from onecard.config import ServeConfig
from onecard.serve.application import make_app
from onecard.serve.server import RunningServer, start_server


@pytest.fixture(scope="module")
def running(tiny_model_directory: Path) -> Iterator[RunningServer]:
    torch.set_num_threads(1)
    server = start_server(ServeConfig(model=tiny_model_directory, port=0, name="tiny", max_concurrent=4))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def described(running: RunningServer) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(running.url.removesuffix("/v1") + "/openapi.json").json()
    return answer


def test_every_route_is_described_and_nothing_else(running: RunningServer, described: dict[str, Any]) -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in make_app(running.service).routes
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in described["paths"].items() for method in methods}


def test_fields_are_those_that_are_checked(described: dict[str, Any]) -> None:
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert {"response_format", "tool_choice", "messages", "top_k"} <= set(fields)
    assert "schema" in described["components"]["schemas"]["JsonSchema"]["properties"]
    text = json.dumps(described)
    for name in described["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text


class Maker:
    """Bodies from the description: mostly right, at times of another kind or out of range."""

    ODD: tuple[Any, ...] = (
        None, True, -1, 0, 2**40, 10**400, 1e300, "", "x", "\x00\ud800", [], [[]], [None], {}, {"type": "function"},
    )  # fmt: skip

    def __init__(self, described: dict[str, Any], seed: int) -> None:
        self.schemas, self.random = described["components"]["schemas"], random.Random(seed)

    def body(self, name: str) -> Any:
        return self.value({"$ref": f"#/components/schemas/{name}"}, depth=0)

    def value(self, schema: dict[str, Any], depth: int) -> Any:
        if depth and self.random.random() < 0.01:
            return self.random.choice(self.ODD)
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(self.random.choice(schema["anyOf"]), depth + 1)
        if "enum" in schema or "const" in schema:
            return self.random.choice(schema.get("enum") or [schema["const"]])
        return getattr(self, "_" + schema.get("type", "any"))(schema, depth)

    def _object(self, schema: dict[str, Any], depth: int) -> Any:
        if "properties" not in schema:
            return self.random.choice([{}, {"type": "object"}, {"1": 1.5}, {"function": {"name": "f"}}, {"a": [{}]}])
        wanted = {*schema.get("required", []), "content"}
        return {
            name: "tiny" if name == "model" else self.value(inner, depth + 1)
            for name, inner in schema["properties"].items()
            if name in wanted or self.random.random() < 0.05
        }

    def _array(self, schema: dict[str, Any], depth: int) -> Any:
        return [self.value(schema.get("items", {}), depth + 1) for _ in range(self.random.randint(0, 2) or 1)]

    def _string(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.choice(["a", "狐 fox", "\n", "<|im_start|>", "👍" * 3, "\x00"])

    def _integer(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.randint(schema.get("minimum", 0), min(schema.get("maximum", 12), 12))

    def _number(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.uniform(schema.get("minimum", -1), schema.get("maximum", 1))

    def _boolean(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.random() < 0.5

    def _null(self, schema: dict[str, Any], depth: int) -> Any:
        return None

    def _any(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.choice(self.ODD)


@pytest.mark.parametrize(
    ("path", "name"), [("/chat/completions", "ChatRequest"), ("/completions", "CompletionRequest")]
)
def test_random_bodies_are_answered_or_refused(
    running: RunningServer, described: dict[str, Any], path: str, name: str
) -> None:
    statuses = []
    with httpx.Client(timeout=30) as client:
        for seed in range(150):
            body = Maker(described, seed).body(name)
            if isinstance(body, dict):
                body["max_tokens"] = 4
            answer = client.post(running.url + path, content=json.dumps(body).encode())
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 404), (seed, body, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            elif body.get("stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "server_error" not in answer.text
        engine, end = running.service.engine, time.monotonic() + 5
        while engine.active and time.monotonic() < end:  # an answer is sent a moment before its slot is free
            time.sleep(0.01)
        assert client.get(running.url.removesuffix("/v1") + "/health").json()["active"] == 0
    assert statuses.count(200) > 15
    assert statuses.count(400) > 15
