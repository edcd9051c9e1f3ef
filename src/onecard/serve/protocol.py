"""The wire format of requests: OpenAI's chat and text completions.

In: the bytes of a request's body. Out: a checked request, or an ApiError that names what is wrong. Types are strict (a
string is not a number). Fields that nobody knows are ignored, since clients send extras; known ones that this server
does not honour are refused by name. It does not know the engine's threads or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onecard.serve.requests import GenerationParameters
from onecard.serve.sampling import SamplingParameters
from onecard.serve.structure import Schema, call_grammar, json_grammar

_LARGEST_SEED = 2**63 - 1
# A count beyond any context; keeps numbers printable.
_LARGEST_COUNT = 2**31
_MOST_TEXTS = 2048


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


class _Body(_Strict):
    """The body of a request."""

    model: str

    def check(self) -> None:
        """Refuse what is not honoured."""


class _Request(_Body):
    """Fields that both kinds of request have; top_k, min_p, repetition_penalty and ignore_eos are beyond OpenAI's."""

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


class JsonSchema(_Strict):
    """A schema that an answer keeps to, whether `strict` or not."""

    name: Annotated[str, Field(max_length=1000)] = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What an answer is: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def wanted(self) -> Schema | None:
        """The schema of the answer; None for free text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class NamedFunction(_Strict):
    """The name of a function."""

    name: str


class NamedTool(_Strict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: list[Any] | None = None
    response_format: ResponseFormat | None = None
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
        if self.tool_choice == "required" and not self.tools:
            raise ApiError(400, 'tool_choice is "required", but there are no tools.', parameter="tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in [found for found, _ in self._functions()]:
                raise ApiError(400, f"tool_choice: no tool is named {name[:100]!r}.", parameter="tool_choice")
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "only text is.")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return (self.tools or None) if self.tool_choice != "none" else None

    @property
    def grammar(self) -> str | None:
        """What the answer is held to, for `structure`; None where it is free."""
        wanted = None if self.response_format is None else self.response_format.wanted
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return call_grammar([tool for tool in self._functions() if tool[0] == name])
        if self.tool_choice == "required":
            return call_grammar(self._functions())
        if wanted is None:
            return None
        return call_grammar(self._functions(), otherwise=wanted) if self.offered_tools else json_grammar(wanted)

    @property
    def structure_name(self) -> str:
        """The field that `grammar` comes from, to name it in errors."""
        if self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool):
            return "tools"
        return "response_format.json_schema.schema"

    def _functions(self) -> list[tuple[str, Schema]]:
        """Names of the tools, and the schemas of their arguments."""
        found: list[tuple[str, Schema]] = []
        for index, tool in enumerate(self.tools or []):
            function = tool.get("function")
            parameters = (function.get("parameters") or {}) if isinstance(function, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ApiError(400, f"tools[{index}].function.name is missing.", parameter="tools")
            if not isinstance(parameters, dict):
                raise ApiError(400, f"tools[{index}].function.parameters is not an object.", parameter="tools")
            found.append((function["name"], {"type": "object", **parameters}))
        return found


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


class EmbeddingRequest(_Body):
    """POST /v1/embeddings: one text or several, or token ids."""

    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_TEXTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=_MOST_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def check(self) -> None:
        if self.dimensions is not None:
            raise unsupported("dimensions", "vectors are as long as the model makes them.")

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One entry for each vector."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[token for token in self.input if isinstance(token, int)]]
        return self.input


class ClassifyRequest(_Body):
    """POST /v1/classify: one text or several."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=_MOST_TEXTS)]

    @property
    def inputs(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


AnyRequest = TypeVar("AnyRequest", bound=_Body)


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
