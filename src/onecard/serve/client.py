"""Asks a served model one question over HTTP, as a user's own program would.

In: the address, the name of the model, a question. Out: the answer's text, why it ended, its length and the time. It
uses the `openai` package where it is installed, else the standard library; both speak the same protocol. It does not
know engines: any OpenAI-compatible server will do.
"""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from onecard.errors import OnecardError

_TIMEOUT_SECONDS = 600.0
_NO_KEY = "none"  # the openai package refuses to be without one


class ServerError(OnecardError):
    """A server does not answer, or refuses."""


@dataclass(frozen=True)
class Answer:
    """What the server said; `seconds` from the question to the last character."""

    text: str
    finish_reason: str
    completion_tokens: int
    seconds: float


def ask(url: str, model: str, question: str, max_tokens: int, key: str = "") -> Answer:
    """Put one question to a chat model; `url` with or without /v1, `key` where the server asks for one.

    ServerError if no answer comes.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    request = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    started = time.monotonic()
    # The package sends keys of ASCII only.
    send = _through_openai if importlib.util.find_spec("openai") and key.isascii() else _through_urllib
    answer = send(base, request, key or _NO_KEY)
    choice = answer["choices"][0]
    return Answer(
        text=choice["message"]["content"] or "",
        finish_reason=choice["finish_reason"],
        completion_tokens=answer["usage"]["completion_tokens"],
        seconds=time.monotonic() - started,
    )


def _through_openai(base: str, request: dict[str, Any], key: str) -> dict[str, Any]:
    import openai

    # A proxy of the environment is for the internet, not for this machine; and nothing is tried twice unseen.
    transport = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=base, api_key=key, timeout=_TIMEOUT_SECONDS, max_retries=0, http_client=transport
    ) as client:
        try:
            answer: dict[str, Any] = client.chat.completions.create(**request).model_dump()
        except openai.APIConnectionError as fault:
            raise _unreachable(base, str(fault)) from None
        except openai.APIStatusError as fault:
            raise _refused(fault.status_code, fault.message) from None
    return answer


def _through_urllib(base: str, request: dict[str, Any], key: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    written = f"Bearer {key}".encode().decode("latin-1")  # which http.client makes the same bytes of
    headers = {"Content-Type": "application/json", "Authorization": written}
    message = urllib.request.Request(  # noqa: S310 - the address is the user's
        f"{base}/chat/completions", json.dumps(request).encode(), headers
    )
    try:
        with opener.open(message, timeout=_TIMEOUT_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as fault:
        with fault:
            raise _refused(fault.code, _message(fault.read())) from None
    except OSError as fault:
        raise _unreachable(base, str(fault)) from None
    return answer


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _unreachable(base: str, why: str) -> ServerError:
    return ServerError(f"No server answers at {base} ({why.rstrip('.')}).", "Start it: onecard serve DIR.")


def _refused(status: int, message: str) -> ServerError:
    return ServerError(f"The server refused ({status}): {message}", "Change the question as it says.")
