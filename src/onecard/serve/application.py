"""The HTTP application around the served models: its routes, and errors in OpenAI's shape.

GET / (a page to chat on), /health, /metrics, /openapi.json, /v1/models; POST /v1/chat/completions, /v1/completions,
/v1/embeddings and /v1/classify. No foreign web page may use it: there is no CORS, and while only this machine is
served, a Host must be a local name. No text is logged. It does not know tensors, ports or signals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from onecard import __version__
from onecard.serve import answers, page, protocol
from onecard.serve.access import Counted, KeyRequired, LocalNames
from onecard.serve.answering import CLIENT_LEFT, answer
from onecard.serve.description import describe
from onecard.serve.engine import Engine
from onecard.serve.metrics import Metrics
from onecard.serve.protocol import ApiError, ChatRequest, ClassifyRequest, CompletionRequest, EmbeddingRequest
from onecard.serve.served import Classes, Language, Served, Vectors

BODY_LIMIT_BYTES = 4 << 20
# A larger body is read to here and thrown away, so that the client sees the answer and not a broken connection.
_DISCARD_LIMIT_BYTES = 64 << 20


@dataclass
class Service:
    """The served models, and what all routes share."""

    models: Sequence[Served]
    local_only: bool
    created: int = field(default_factory=lambda: int(time.time()))
    answered: int = 0
    key: str = ""
    """What clients must give; empty: nothing."""
    time_limit_seconds: float | None = None
    max_queue: int = 64
    """Texts-in requests that may wait for one classifier, or one model of vectors."""
    metrics: Metrics = field(default_factory=Metrics)
    _pools: dict[int, tuple[ThreadPoolExecutor, list[Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the first language model, or of the first of all."""
        return next((model.name for model in self.models if isinstance(model, Language)), self.models[0].name)

    @property
    def engines(self) -> list[Engine]:
        """Those of all language models."""
        return [model.engine for model in self.models if isinstance(model, Language)]

    @property
    def engine(self) -> Engine:
        """That of the first language model."""
        return self.engines[0]

    async def ask(self, model: Classes | Vectors, inputs: Any) -> Any:
        """What a model makes of texts, one request after another in a thread of its own, which no chat waits for.

        ApiError 429 where as many wait as may, 504 where it takes longer than the time limit (it goes on unheard).
        """
        pool, waiting = self._pools.setdefault(id(model), (ThreadPoolExecutor(1, "onecard-texts"), []))
        if len(waiting) > self.max_queue:
            raise ApiError(
                429, f"{self.max_queue} requests wait. Ask again later.", kind="rate_limit_error", code="queue_full"
            )
        future = pool.submit(model, inputs)
        waiting.append(future)
        future.add_done_callback(waiting.remove)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.time_limit_seconds)
        except TimeoutError:
            fault = f"The answer took longer than {self.time_limit_seconds:g} seconds."
            raise ApiError(504, fault, kind="server_error", code="time_limit") from None

    def close(self) -> None:
        """End what is running."""
        for pool, _ in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for model in self.models:
            model.close()

    def find(self, name: str) -> Served:
        """The model of a name; ApiError 404 with the names that there are."""
        for model in self.models:
            if model.name == name:
                return model
        there = ", ".join(repr(model.name) for model in self.models)
        raise ApiError(
            404,
            f"There is no model {name[:100]!r} here; this server has {there}.",
            parameter="model",
            code="model_not_found",
        )

    def language(self, name: str) -> Language:
        """The language model of a name; ApiError 404, or 400 for another kind."""
        model = self.find(name)
        if not isinstance(model, Language):
            raise _other_kind(model)
        return model

    def classes(self, name: str) -> Classes:
        """The classifier of a name; ApiError 404, or 400 for another kind."""
        model = self.find(name)
        if not isinstance(model, Classes):
            raise _other_kind(model)
        return model

    def vectors(self, name: str) -> Vectors:
        """What turns texts into vectors by a name; ApiError 404, or 400 for another kind."""
        model = self.find(name)
        if isinstance(model, Language) and model.vectors is not None:
            return model.vectors
        if not isinstance(model, Vectors):
            advice = " Start the server with --embeddings for vectors." if isinstance(model, Language) else ""
            raise _other_kind(model, advice)
        return model


def _other_kind(model: Served, advice: str = "") -> ApiError:
    return ApiError(400, f"The model {model.name!r} {model.does}.{advice}", parameter="model", code="unsupported_model")


# --- the application ----------------------------------------------------------------------------------------------


def make_app(service: Service) -> FastAPI:
    """The routes over the served models. FastAPI's own pages are left out: they load scripts from elsewhere."""
    app = FastAPI(title="onecard", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", **_busy(service)}

    @app.get("/")
    async def chat_page() -> Response:
        if not service.engines:
            raise ApiError(404, "No model here answers chats, so there is no page to chat on.")
        return HTMLResponse(page.html(service.name, asks_key=bool(service.key)), headers=page.HEADERS)

    @app.get("/openapi.json")
    async def description() -> dict[str, Any]:
        return describe(__version__, asks_key=bool(service.key))

    @app.get("/metrics")
    async def metrics() -> Response:
        engines, busy = service.engines, _busy(service)
        slots, tokens = sum(e.max_concurrent for e in engines), sum(e.computed_tokens for e in engines)
        now = {
            "onecard_active_requests": ("Requests that hold a slot.", busy["active"]),
            "onecard_waiting_requests": ("Requests that wait for one.", busy["waiting"]),
            "onecard_slots": ("Requests that can be answered at the same time.", slots),
            "onecard_computed_tokens": ("Tokens that went through the models so far.", tokens),
        }
        return PlainTextResponse(service.metrics.text(now), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, model) for model in service.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _card(service, service.find(name))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        wanted = protocol.parse(ChatRequest, await _read_body(request))
        model = service.language(wanted.model)
        ids = await asyncio.to_thread(model.encode_chat, wanted)
        structure = await asyncio.to_thread(model.structure, wanted)
        return await answer(service, model, request, wanted, ids, "messages", structure)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        wanted = protocol.parse(CompletionRequest, await _read_body(request))
        model = service.language(wanted.model)
        ids = await asyncio.to_thread(model.encode_completion, wanted)
        return await answer(service, model, request, wanted, ids, "prompt")

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> dict[str, Any]:
        wanted = protocol.parse(EmbeddingRequest, await _read_body(request))
        found, tokens = await service.ask(service.vectors(wanted.model), wanted.inputs)
        service.answered += 1
        return answers.embeddings(wanted.model, found, tokens, base64=wanted.encoding_format == "base64")

    @app.post("/v1/classify")
    async def classify(request: Request) -> dict[str, Any]:
        wanted = protocol.parse(ClassifyRequest, await _read_body(request))
        found, cut = await service.ask(service.classes(wanted.model), wanted.inputs)
        service.answered += 1
        data = [{"index": index, **one} for index, one in enumerate(found)]
        return {"object": "list", "model": wanted.model, "data": data, "truncated": cut}

    @app.exception_handler(ApiError)
    async def api_error(_: Request, fault: ApiError) -> Response:
        headers = {"Retry-After": "1"} if fault.status in (429, 503) else None
        return JSONResponse(fault.body(), fault.status, headers=headers)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, fault: HTTPException) -> Response:
        body = ApiError(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}.").body()
        return JSONResponse(body, fault.status_code, headers=fault.headers)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def bug(_: Request, fault: Exception) -> Response:
        return JSONResponse(ApiError(500, f"A bug: {type(fault).__name__}.", kind="server_error").body(), 500)

    # The last is asked first.
    if service.key:
        app.add_middleware(KeyRequired, key=service.key)
    if service.local_only:
        app.add_middleware(LocalNames)
    app.add_middleware(Counted, metrics=service.metrics)
    return app


def _busy(service: Service) -> dict[str, int]:
    engines = service.engines
    return {"active": sum(e.active for e in engines), "waiting": sum(e.waiting for e in engines)}


def _card(service: Service, model: Served) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "onecard",
        **model.card(),
    }


async def _read_body(request: Request) -> bytes:
    """The whole body; ApiError 413 beyond the limit."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= BODY_LIMIT_BYTES:
            body += chunk
        elif size > _DISCARD_LIMIT_BYTES:
            break
    if size > BODY_LIMIT_BYTES:
        raise ApiError(413, f"The body is larger than {BODY_LIMIT_BYTES >> 20} MiB.", code="body_too_large")
    return bytes(body)
