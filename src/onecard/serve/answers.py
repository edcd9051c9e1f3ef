"""The wire format of answers: the JSON values of OpenAI's chat and text completions, whole or as streamed chunks.

In: texts, tokens with their log-probabilities, calls of tools, and how the answer ended. It does not know requests.
"""

from __future__ import annotations

import struct
import time
import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onecard.serve.detokenize import TokenBytes
from onecard.serve.requests import TokenEvent


def token_spelling(token_bytes: TokenBytes, token_id: int) -> tuple[str, list[int]]:
    """How a token is shown beside its probability: text, with parts of characters as \\x.., and its bytes."""
    raw = token_bytes(token_id, special=True)
    return raw.decode("utf-8", "backslashreplace"), list(raw)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Counted tokens; the end-of-turn token is not among them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class Form:
    """Builds the JSON of one answer: `whole` at once, or `chunk` by chunk."""

    model: str
    token_bytes: TokenBytes
    chat: bool

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._text_offset = 0

    def whole(
        self,
        text: str,
        tokens: Sequence[TokenEvent],
        reason: str,
        counts: Mapping[str, int],
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
            said = {"message": message | ({"tool_calls": list(calls)} if calls else {})}
        choice = {"index": 0, **said, "logprobs": self.logprobs(tokens), "finish_reason": reason}
        return self._envelope([choice], streamed=False) | {"usage": dict(counts)}

    def chunk(
        self,
        delta: Mapping[str, Any] | None = None,
        *,
        text: str = "",
        tokens: Sequence[TokenEvent] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        """One piece of a stream: new text (or, in a chat, a delta), or the reason of the end."""
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"delta": dict(delta) if delta is not None else {"content": text} if text or tokens else {}}
        choice = {"index": 0, **said, "logprobs": self.logprobs(tokens), "finish_reason": reason}
        return self._envelope([choice], streamed=True)

    def usage_chunk(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """The last piece of a stream that was asked to say its usage."""
        return self._envelope([], streamed=True) | {"usage": dict(counts)}

    def _envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def logprobs(self, tokens: Sequence[TokenEvent]) -> dict[str, Any] | None:
        """Log-probabilities, one entry a token; None where they are not wanted."""
        scored = [(event, event.logprobs) for event in tokens if event.logprobs is not None]
        if not scored:
            return None
        if self.chat:
            return {
                "content": [
                    self._entry(event.token_id, found.logprob)
                    | {"top_logprobs": [self._entry(token, logprob) for token, logprob in found.top]}
                    for event, found in scored
                ],
                "refusal": None,
            }
        offsets = []
        for event, _ in scored:
            offsets.append(self._text_offset)
            self._text_offset += len(event.text)
        return {
            "tokens": [self._spelled(event.token_id) for event, _ in scored],
            "token_logprobs": [found.logprob for _, found in scored],
            "top_logprobs": [{self._spelled(token): logprob for token, logprob in found.top} for _, found in scored],
            "text_offset": offsets,
        }

    def _spelled(self, token_id: int) -> str:
        return token_spelling(self.token_bytes, token_id)[0]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled, raw = token_spelling(self.token_bytes, token_id)
        return {"token": spelled, "logprob": logprob, "bytes": raw}


def embeddings(model: str, vectors: Sequence[list[float]], tokens: int, *, base64: bool) -> dict[str, Any]:
    """The answer to /v1/embeddings; in base64 a vector is its little-endian fp32 numbers."""
    spelled: list[Any] = list(vectors)
    if base64:
        spelled = [b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(spelled)]
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": data, "usage": counts}
