"""One answer over HTTP: submitted, streamed (SSE) or whole, limited in time, and ended where the client leaves.

In: a checked request and the token ids of its prompt. Out: the HTTP answer. It does not know routes or the model.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from onecard.serve import answers
from onecard.serve.answers import Form
from onecard.serve.metrics import Metrics
from onecard.serve.protocol import ApiError, ChatRequest, CompletionRequest
from onecard.serve.requests import (
    EngineClosedError,
    Event,
    FinishEvent,
    Handle,
    PromptRefusedError,
    QueueFullError,
    TokenEvent,
)
from onecard.serve.structure import Structure
from onecard.serve.tools import ToolCalls

if TYPE_CHECKING:
    from onecard.serve.application import Service
    from onecard.serve.served import Language

CLIENT_LEFT = 499
_TIME_IS_UP = "The answer was not finished within"


@dataclass
class _Stream:
    """A submitted request with its events on this event loop; what they were is counted, and their time is limited."""

    handle: Handle
    events: asyncio.Queue[Event]
    metrics: Metrics
    limit_seconds: float | None
    begun: float = field(default_factory=time.monotonic)

    async def __aiter__(self) -> AsyncIterator[Event]:
        said, reason, handle = 0, "left", self.handle
        try:
            while reason == "left":
                event = await self._next()
                if isinstance(event, FinishEvent):
                    reason = event.reason
                else:
                    said += 1
                    if said == 1:
                        self.metrics.count_first_token(self.begun)
                yield event
        finally:
            self.metrics.count_end(self.begun, reason, handle.prompt_tokens, handle.cached_tokens, said)

    async def _next(self) -> Event:
        if self.limit_seconds is None:
            return await self.events.get()
        try:
            async with asyncio.timeout(max(0.0, self.begun + self.limit_seconds - time.monotonic())):
                return await self.events.get()
        except TimeoutError:
            self.handle.cancel()
            return FinishEvent("error", "", 0, f"{_TIME_IS_UP} {self.limit_seconds:g} seconds.")


async def answer(
    service: Service,
    model: Language,
    request: Request,
    wanted: ChatRequest | CompletionRequest,
    ids: list[int],
    prompt_name: str,
    structure: Structure | None = None,
) -> Response:
    """Hand a request in and give its answer as it comes, or whole.

    ApiError where it is refused: `prompt_name` is the field that holds the prompt.
    """
    engine = model.engine
    generation = wanted.generation(engine.sampling_defaults, engine.vocabulary)
    is_chat = isinstance(wanted, ChatRequest)
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def listen(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        handle = engine.submit(ids, replace(generation, continues_text=not is_chat, structure=structure), listen)
    except PromptRefusedError as fault:
        name = prompt_name if fault.parameter == "prompt" else wanted.answer_limit()[1]
        code = "context_length_exceeded" if fault.too_long else None
        raise ApiError(400, f"{name}: {fault.what} {fault.remedy}", parameter=name, code=code) from None
    except QueueFullError as fault:
        raise ApiError(429, f"{fault.what} {fault.remedy}", kind="rate_limit_error", code="queue_full") from None
    except EngineClosedError as fault:
        raise ApiError(503, f"{fault.what} {fault.remedy}", kind="server_error") from None
    service.answered += 1
    form = Form(model.name, engine.token_bytes, is_chat)
    tools = ToolCalls() if isinstance(wanted, ChatRequest) and wanted.offered_tools else None
    stream = _Stream(handle, events, service.metrics, service.time_limit_seconds)
    if wanted.stream:
        options = wanted.stream_options
        with_usage = options is not None and bool(options.include_usage)
        return _EventStream(handle, _server_sent_events(stream, form, tools, with_usage))
    return await _whole(request, stream, form, tools)


class _EventStream(StreamingResponse):
    """A stream of server-sent events; however it ends, the slot is given back."""

    def __init__(self, handle: Handle, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()


async def _server_sent_events(
    stream: _Stream, form: Form, tools: ToolCalls | None, with_usage: bool
) -> AsyncIterator[str]:
    def line(value: dict[str, Any]) -> str:
        if with_usage:
            value.setdefault("usage", None)
        return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"

    if form.chat:
        yield line(form.chunk({"role": "assistant", "content": ""}))
    async for event in stream:
        text, calls = tools.feed(event.text) if tools else (event.text, [])
        scored = [event] if isinstance(event, TokenEvent) and event.logprobs is not None else []
        if isinstance(event, FinishEvent) and tools:
            text += tools.finish()
        if text or scored:
            yield line(form.chunk(text=text, tokens=scored))
        if calls:
            yield line(form.chunk({"tool_calls": calls}))
        if isinstance(event, FinishEvent):
            if event.reason in ("abort", "error"):
                yield line(_failure(event).body())
            else:
                yield line(form.chunk(reason=_finish_reason(event, tools)))
                if with_usage:
                    counts = answers.usage(stream.handle.prompt_tokens, event.completion_tokens)
                    yield line(form.usage_chunk(counts))
    yield "data: [DONE]\n\n"


async def _whole(request: Request, stream: _Stream, form: Form, tools: ToolCalls | None) -> Response:
    collecting = asyncio.ensure_future(_collect(stream))
    leaving = asyncio.ensure_future(_until_client_leaves(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_LEFT)
        events = collecting.result()
    finally:
        stream.handle.cancel()
        collecting.cancel()
        leaving.cancel()
    last = events[-1]
    assert isinstance(last, FinishEvent)
    if last.reason in ("abort", "error"):
        raise _failure(last)
    text = "".join(event.text for event in events)
    if tools:
        text = tools.feed(text)[0] + tools.finish()
    return JSONResponse(
        form.whole(
            text,
            [event for event in events if isinstance(event, TokenEvent)],
            _finish_reason(last, tools),
            answers.usage(stream.handle.prompt_tokens, last.completion_tokens),
            [{key: value for key, value in call.items() if key != "index"} for call in tools.found] if tools else [],
        )
    )


async def _collect(stream: _Stream) -> list[Event]:
    return [event async for event in stream]


async def _until_client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _finish_reason(event: FinishEvent, tools: ToolCalls | None) -> str:
    """A finished call is `tool_calls`; an answer that was cut off is `length`, whatever was in it."""
    return "tool_calls" if tools and tools.found and event.reason == "stop" else event.reason


def _failure(event: FinishEvent) -> ApiError:
    if event.reason == "abort":
        return ApiError(503, "The server is shutting down.", kind="server_error", code="shutting_down")
    if event.error.startswith(_TIME_IS_UP):
        return ApiError(504, event.error, kind="server_error", code="time_limit")
    return ApiError(500, event.error, kind="server_error", code="model_failed")
