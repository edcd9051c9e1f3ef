"""What the server offers, as an OpenAPI description: every route, and every field that a request may have.

Out: the JSON of /openapi.json. Fields come from the models that check requests, so the two cannot differ.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from onecard.serve.protocol import ChatRequest, ClassifyRequest, CompletionRequest, EmbeddingRequest

_JSON = "application/json"
# An event of a stream holds one chunk as JSON, or [DONE].
_SCHEMAS: dict[str, dict[str, str]] = {_JSON: {"type": "object"}, "text/event-stream": {"type": "object"}}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "description": "A served model."}
# Method, path, what it does, the body, what it answers with.
_ROUTES: list[tuple[str, str, str, type[BaseModel] | None, tuple[str, ...]]] = [
    ("get", "/", "A page to chat on.", None, ("text/html",)),
    ("get", "/health", "Whether the server lives, and how busy it is.", None, (_JSON,)),
    ("get", "/metrics", "Numbers for Prometheus.", None, ("text/plain",)),
    ("get", "/openapi.json", "This description.", None, (_JSON,)),
    ("get", "/v1/models", "What is served.", None, (_JSON,)),
    ("get", "/v1/models/{name}", "One model.", None, (_JSON,)),
    ("post", "/v1/chat/completions", "Answers a conversation.", ChatRequest, (_JSON, "text/event-stream")),
    ("post", "/v1/completions", "Continues a text.", CompletionRequest, (_JSON, "text/event-stream")),
    ("post", "/v1/embeddings", "Turns texts into vectors.", EmbeddingRequest, (_JSON,)),
    ("post", "/v1/classify", "Names the classes of texts.", ClassifyRequest, (_JSON,)),
]
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(version: str, *, asks_key: bool) -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    bodies = [body for *_, body, _ in _ROUTES if body is not None]
    _, found = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for method, path, summary, body, kinds in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, kinds)
    components: dict[str, Any] = {"schemas": {**found["$defs"], "Error": _ERROR}}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "onecard", "version": version},
        "paths": paths,
        "components": components,
    }
    if asks_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _operation(path: str, summary: str, body: type[BaseModel] | None, kinds: tuple[str, ...]) -> dict[str, Any]:
    content = {kind: {"schema": _SCHEMAS.get(kind, {"type": "string"})} for kind in kinds}
    error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "What was asked for.", "content": content},
            "4XX": {"description": "The request is at fault; `param` says where.", **error},
            "5XX": {"description": "The server or its model is at fault.", **error},
        },
    }
    if "{name}" in path:
        operation["parameters"] = [_NAME]
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation
