"""Who may use the server: this machine by its names, and those who have the key, where there is one.

Layers around an HTTP application. They know headers and statuses, nothing of models.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from onecard.errors import ConfigError
from onecard.serve.metrics import Metrics
from onecard.serve.protocol import ApiError

KEY_VARIABLE = "ONECARD_API_KEY"
# The page asks for the key itself; a watchdog need not have it.
_OPEN = ("/", "/health")


def api_key(file: Path | None) -> str:
    """The key that clients must give: the first line of `file`, else of the environment; empty for none."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"The key file {file} cannot be read: {fault}.", "Give a text file with the key.") from fault
    key = lines[0].strip() if lines else ""
    if not key:
        raise ConfigError(f"The key file {file} is empty.", "Put the key on its first line.")
    return key


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LocalNames:
    """Refuses a Host or an Origin that is not this machine.

    So a web page can neither reach the model by pointing its own name here nor keep it busy with blind requests.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Request(scope).headers
            places = {"Host": headers.get("host", "localhost")}  # HTTP/1.0 may leave it out
            if "origin" in headers:
                places["Origin"] = headers["origin"].partition("://")[2] or headers["origin"]
            for name, spelled in places.items():
                host = spelled if spelled.endswith("]") else spelled.rsplit(":", 1)[0]
                if not (host.endswith(".localhost") or is_loopback(host)):
                    fault = ApiError(403, f"The {name} {host!r} is not this machine.", code="foreign_host")
                    await JSONResponse(fault.body(), fault.status)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class KeyRequired:
    """Refuses whoever does not send `Authorization: Bearer KEY`. The comparison takes as long for any wrong key."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                fault = ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
                answer = JSONResponse(fault.body(), fault.status, headers={"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Counted:
    """Counts every answer by its status."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_answer(message["status"])
            await send(message)

        await self._app(scope, receive, noting if scope["type"] == "http" else send)
