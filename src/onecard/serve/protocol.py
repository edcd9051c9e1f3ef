"""The wire format: OpenAI's chat and text completions, as requests to check and answers to build.

In: the bytes of a request's body. Out: a checked request, or an ApiError that names what is wrong; and the JSON values
of answers and of streamed chunks. Types are strict (a string is not a number). Fields that nobody knows are ignored,
since clients send extras; known ones that this server does not honour are refused by name. It does not know the
engine's threads or HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onecard.serve.detokenize import TokenBytes
from onecard.serve.requests import GenerationParameters, TokenEvent
from onecard.serve.sampling import SamplingParameters

_LARGEST_SEED = 2**63 - 1
# A count beyond any context; keeps numbers printable.
_LARGEST_COUNT = 2**31


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape. `parameter` names the field of the request, if one is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.parameter, self.code = status, message, kind, parameter, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.code},
        }


def unsupported(parameter: str, advice: str) -> ApiError:
    """A field that means something and is not honoured here."""
    return ApiError(
        400, f"{parameter} is not supported by this server: {advice}", parameter=parameter, code="unsupported_parameter"
    )


# --- requests -----------------------------------------------------------------------------------------------------

StopString = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(ge=1, le=_LARGEST_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class _Request(_Strict):
    """Fields that both kinds of request have; top_k, min_p, repetition_penalty and ignore_eos are beyond OpenAI's."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_LARGEST_COUNT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-_LARGEST_SEED, le=_LARGEST_SEED)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    n: int | None = None

    def answer_limit(self) -> tuple[int | None, str]:
        """The longest answer wanted and the field that says so."""
        return self.max_tokens, "max_tokens"

    def wanted_logprobs(self) -> tuple[int | None, str]:
        """How many alternatives a token wants (None: no log-probabilities) and the field that says so."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what is not honoured."""
        if self.n is not None and self.n != 1:
            raise ApiError(400, f"n is {self.n}; this server gives one answer a request.", parameter="n")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true.", parameter="stream_options")

    def generation(self, defaults: SamplingParameters, vocabulary: int) -> GenerationParameters:
        """The engine's parameters; what the request leaves open comes from `defaults`. Raises ApiError."""
        top, top_name = self.wanted_logprobs()
        if top is not None and not 0 <= top <= vocabulary:
            raise ApiError(
                400, f"{top_name} is {top}; it goes from 0 to {vocabulary}, the vocabulary.", parameter=top_name
            )
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationParameters(
            max_tokens=self.answer_limit()[0],
            sampling=replace(defaults, **given, logit_bias=self._bias(vocabulary), seed=self.seed, top_logprobs=top),
            stop=tuple(stop for stop in stops if stop),
            ignore_eos=bool(self.ignore_eos),
        )

    def _bias(self, vocabulary: int) -> dict[int, float]:
        made = {}
        for key, value in (self.logit_bias or {}).items():
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
            if not 0 <= token < vocabulary:
                raise ApiError(
                    400,
                    f"logit_bias: {key[:20]!r} is not a token id of this model (0 to {vocabulary - 1}).",
                    parameter="logit_bias",
                )
            if not -100 <= value <= 100:
                raise ApiError(400, f"logit_bias: {value} is outside -100 to 100.", parameter="logit_bias")
            made[token] = value
        return made


class TextPart(_Strict):
    """One part of a message's content; pictures and sound are refused."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn. `content` may be left out where an assistant only calls tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as a chat template reads it."""
        made = self.model_dump(exclude_none=True)
        made["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            made["content"] = "".join(part.text for part in self.content)
        return made


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def answer_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().answer_limit()

    def wanted_logprobs(self) -> tuple[int | None, str]:
        return ((self.top_logprobs or 0) if self.logprobs else None), "top_logprobs"

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", parameter="top_logprobs")
        if self.functions:
            raise unsupported("functions", "use tools.")
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", 'only "auto" and "none" are.')
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise unsupported("response_format", "only text is; ask for JSON in the prompt.")
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "only text is.")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return (self.tools or None) if self.tool_choice != "none" else None


class CompletionRequest(_Request):
    """POST /v1/completions: the prompt is one text, or one list of token ids."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def wanted_logprobs(self) -> tuple[int | None, str]:
        return self.logprobs, "logprobs"

    def check(self) -> None:
        super().check()
        if self.echo:
            raise unsupported("echo", "the answer does not repeat the prompt.")
        if self.suffix:
            raise unsupported("suffix", "a text is only continued.")
        if self.best_of not in (None, 1):
            raise unsupported("best_of", "one answer is made.")
        if isinstance(self.prompt, list) and len(self.prompt) != 1 and not isinstance(self.only_prompt, list):
            raise ApiError(400, f"prompt has {len(self.prompt)} texts; send one a request.", parameter="prompt")

    @property
    def only_prompt(self) -> str | list[int]:
        """The one prompt of the request, taken out of its list."""
        if isinstance(self.prompt, str):
            return self.prompt
        if all(isinstance(item, int) for item in self.prompt):
            return [item for item in self.prompt if isinstance(item, int)]
        first = self.prompt[0]
        assert not isinstance(first, int)
        return first


AnyRequest = TypeVar("AnyRequest", bound=_Request)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Check a body; ApiError 400 names the field (or says where the JSON is broken)."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as fault:
        raise _explained(fault) from None
    request.check()
    return request


def _explained(fault: ValidationError) -> ApiError:
    errors = fault.errors(include_input=False, include_url=False, include_context=False)
    # A field of several kinds (text or list) has errors for each kind; the deepest is of the kind that was meant.
    first = max(errors, key=lambda error: len(error["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    name = _field_name(first["loc"])
    if not name:
        return ApiError(400, "The body is not a JSON object.")
    alike = [error for error in errors if len(error["loc"]) == len(first["loc"]) and _field_name(error["loc"]) == name]
    what = " or ".join(dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in alike))
    if first["msg"].startswith("Input should be "):
        return ApiError(400, f"{name} should be {what}.", parameter=name)
    what = what.removeprefix("Value error, ")
    return ApiError(400, f"{name}: {what[0].lower()}{what[1:]}.", parameter=name)


def _field_name(location: Sequence[str | int]) -> str:
    """messages[0].content from pydantic's location, in which the kinds of a union stand too."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "constrained"):
            name += f".{part}" if name else part
    return name


# --- answers ------------------------------------------------------------------------------------------------------


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
