"""Answers keep to a structure: a model that knows nothing answers many times, and every answer is read strictly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from onecard.config import ServeConfig
from onecard.model.load import load_model, load_tokenizer
from onecard.serve.engine import Engine
from onecard.serve.requests import FinishEvent, GenerationParameters, Handle
from onecard.serve.sampling import Sampler, SamplingParameters, choose_all
from onecard.serve.server import RunningServer, start_server
from onecard.serve.structure import StructureRefusedError, Structures, call_grammar, closed, json_grammar


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["é\n", '"quoted" \\ 话', "plain"]
    sizes: Annotated[list[Annotated[int, Field(ge=-3, le=120)]], Field(min_length=1, max_length=3)]


class Thing(BaseModel):
    """Its own reader: pydantic checks what llguidance was to hold to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=8)]
    parts: Annotated[list[Part], Field(max_length=2)]
    flags: Annotated[list[Annotated[list[bool], Field(max_length=2)]], Field(max_length=2)]
    rest: None | Annotated[str, Field(pattern="^[a-c]{2}$")]


SCHEMA = Thing.model_json_schema()


@pytest.fixture(scope="module")
def engine(tiny_model_directory: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    made = Engine(load_model(tiny_model_directory), load_tokenizer(tiny_model_directory), 6, 1024)
    yield made
    made.close()


def answer(handle: Handle) -> tuple[str, str]:
    """Its text and why it ended."""
    events = list(handle)
    last = events[-1]
    assert isinstance(last, FinishEvent)
    return "".join(event.text for event in events), last.reason


def wanted(engine: Engine, grammar: str, **sampling: Any) -> GenerationParameters:
    return GenerationParameters(
        sampling=SamplingParameters(**sampling), structure=engine.structures.compile(grammar), max_tokens=240
    )


def test_every_answer_of_a_random_model_meets_the_schema(engine: Engine) -> None:
    grammar, prompt = json_grammar(SCHEMA), [20, 21, 22]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 2.0, "top_p": 0.9},
        {"top_k": 3, "min_p": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {30: 100.0}},
    ]
    handles = [
        engine.submit(prompt, wanted(engine, grammar, seed=seed, **ways[seed % len(ways)])) for seed in range(60)
    ]
    answers = [answer(handle) for handle in handles]
    for text, reason in answers:
        assert reason == "stop", text
        Thing.model_validate_json(text)
    assert len({text for text, _ in answers}) > 50
    # Something of everything was said, so that each was held to its form.
    read = [Thing.model_validate_json(text) for text, _ in answers]
    assert {part.kind for thing in read for part in thing.parts} == {"é\n", '"quoted" \\ 话', "plain"}
    assert {thing.rest is None for thing in read} == {True, False}
    assert any(len(thing.flags) == 2 and thing.flags[0] for thing in read)
    assert any("\\" in text.split('"parts"')[0] for text, _ in answers)  # an escape within the name


def test_greedy_answers_and_free_neighbours(engine: Engine) -> None:
    """A free request says the same beside held ones; a held one the same beside others and alone."""
    free = GenerationParameters(sampling=SamplingParameters(temperature=0), max_tokens=60)
    prompt = [40, 41, 42, 43]
    alone = answer(engine.submit(prompt, free))
    held = answer(engine.submit(prompt, wanted(engine, json_grammar(SCHEMA), temperature=0)))
    Thing.model_validate_json(held[0])
    together = [
        engine.submit(prompt, free if turn % 2 else wanted(engine, json_grammar(SCHEMA), temperature=0))
        for turn in range(6)
    ]
    assert [answer(handle) for handle in together] == [held, alone] * 3


def test_an_answer_that_is_cut_off_says_so(engine: Engine) -> None:
    endless = wanted(engine, json_grammar({"type": "string", "minLength": 1000}), seed=1)
    text, reason = answer(engine.submit([20], replace(endless, max_tokens=30)))
    assert reason == "length"
    assert text.startswith('"')
    assert "�" not in text[:-1]
    # The last token that completes it is not a cut.
    text, reason = answer(
        engine.submit([20], replace(wanted(engine, json_grammar({"const": 7}), seed=1), max_tokens=1))
    )
    assert (text, reason) == ("7", "stop")


def test_the_end_comes_only_where_the_structure_may_end(engine: Engine) -> None:
    structure = engine.structures.compile(json_grammar({"type": "integer"}))
    stops = sorted(engine.stop_ids)
    assert stops
    assert not structure.allowed()[stops].any()
    (one,) = [token for token in range(engine.vocabulary) if engine.token_bytes(token) == b"1"]
    structure.accept(one)
    assert structure.allowed()[stops].all()
    assert not structure.complete  # another digit could follow
    structure.accept(stops[0])
    assert structure.complete
    assert not structure.fault


def test_ignoring_the_end_does_not_leave_the_structure(engine: Engine) -> None:
    for seed in range(5):
        asked = wanted(engine, json_grammar({"type": "integer"}), seed=seed, logit_bias={min(engine.stop_ids): 100.0})
        text, reason = answer(engine.submit([20], replace(asked, ignore_eos=True)))
        assert reason == "stop"
        int(text)


def test_the_fast_path_of_greedy_requests_is_not_taken(engine: Engine) -> None:
    structure = engine.structures.compile(json_grammar({"enum": [True]}))
    sampler = Sampler(SamplingParameters(temperature=0), [], engine.vocabulary, "cpu", structure)
    assert not sampler.is_plain
    logits = torch.arange(engine.vocabulary, dtype=torch.float32)[None]
    (token,) = choose_all([sampler], logits)
    assert b"true".startswith(engine.token_bytes(token))
    allowed = structure.allowed()
    assert token == int(allowed.nonzero().max())


def test_tokens_that_cannot_write_the_answer_end_it_with_the_reason() -> None:
    """Two tokens, `[` and `1`: the array can never be closed."""

    class Bytes:
        special_ids = frozenset[int]()

        def __call__(self, token: int) -> bytes:
            return [b"[", b"1"][token]

    structures = Structures(Bytes(), 2, [])  # type: ignore[arg-type]
    structure = structures.compile(json_grammar({"type": "array", "items": {"const": 1}, "maxItems": 1}))
    for token in (0, 1):
        assert structure.allowed().tolist() == [token == 0, token == 1]
        structure.accept(token)
    assert not structure.allowed().any()
    sampler = Sampler(SamplingParameters(temperature=0), [], 2, "cpu", structure)
    assert choose_all([sampler], torch.ones(1, 2)) == [-1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "nothing"}, "Invalid type: nothing"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing meets it"),
    ({"$ref": "https://example.org/schema"}, "not present"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"enum": ["x" * 100] * 1000}, "larger than 64 KiB"),
    ({"allOf": [{"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b*"} for i in range(40)]}] * 6}, "too large"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_a_schema_that_cannot_be_compiled_says_why(engine: Engine, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(StructureRefusedError) as fault:
        engine.structures.compile(json_grammar(schema))
    assert reason in fault.value.what
    assert "\n" not in fault.value.what
    assert len(fault.value.what) < 400


def test_objects_are_closed_where_the_schema_leaves_it_open() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shut = {**inner, "additionalProperties": False}
    assert closed(inner) == shut
    assert closed({"type": "array", "items": inner}) == {"type": "array", "items": shut}
    assert closed({"anyOf": [inner, True]}) == {"anyOf": [shut, True]}
    outer = {"properties": {"properties": inner}, "$defs": {"x": inner}}
    assert closed(outer) == {"properties": {"properties": shut}, "$defs": {"x": shut}, "additionalProperties": False}
    for said in (
        {"type": "object"},
        {**inner, "additionalProperties": {"type": "string"}},
        {**inner, "required": ["b"]},
        {**inner, "minProperties": 2},
        {"properties": {"a": True}, "anyOf": [True]},
        {"allOf": [inner, {"properties": {"b": inner}}]},
        # The branches speak about the object that the rest speaks about.
        {"properties": {"kind": True}, "required": ["kind"], "anyOf": [inner, {"properties": {"b": True}}]},
        {"$ref": "#/$defs/x", "properties": {"kind": True}, "$defs": {"x": inner}},
    ):
        assert closed(said) == said


def test_a_call_is_of_an_offered_tool_and_meets_its_parameters(engine: Engine) -> None:
    defined = {"$defs": {"size": {"enum": [1, 2]}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/size"}}}
    closed = {"required": ["n"], "additionalProperties": False}
    grammar = call_grammar([('lo"ok', defined | closed), ("看", defined | closed)], otherwise={"const": "no"})
    begin, end = "<tool_call>\n", "\n</tool_call>"
    found = set()
    for seed in range(12):
        text, reason = answer(engine.submit([20], wanted(engine, grammar, seed=seed)))
        assert reason == "stop"
        if text == '"no"':
            found.add(text)
            continue
        assert text.startswith(begin)
        assert text.endswith(end)
        call = json.loads(text.removeprefix(begin).removesuffix(end))
        assert call["arguments"] in ({"n": 1}, {"n": 2})
        found.add(call["name"])
    assert found == {'lo"ok', "看", '"no"'}


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A context that tools fit into: with rotary positions no weight depends on it."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model_directory, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    server = start_server(ServeConfig(model=directory, port=0, name="tiny", max_concurrent=4))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as made:
        yield made


QUESTION: list[Any] = [{"role": "user", "content": "fox?"}]


def test_openais_client_reads_a_structured_answer(client: openai.OpenAI) -> None:
    for seed in range(5):
        made = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Thing, seed=seed)
        assert isinstance(made.choices[0].message.parsed, Thing)


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for seed in range(5):
        settings: Any = {"model": "tiny", "messages": QUESTION, "response_format": form, "seed": seed}
        whole = client.chat.completions.create(**settings)
        text = whole.choices[0].message.content
        Thing.model_validate_json(text)
        pieces = [
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**settings, stream=True)
        ]
        assert "".join(pieces) == text
        assert len([piece for piece in pieces if piece]) > 5


def test_any_object(client: openai.OpenAI) -> None:
    for seed in range(8):
        made = client.chat.completions.create(
            model="tiny", messages=QUESTION, response_format={"type": "json_object"}, seed=seed, max_tokens=60
        )
        text, reason = made.choices[0].message.content or "", made.choices[0].finish_reason
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert reason == "length"


def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"at": {"enum": ["fox", "狐"]}}, "required": ["at"]}
    parameters["additionalProperties"] = False
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("a", "b")]
    named: Any = {"type": "function", "function": {"name": "b"}}
    for choice in ("required", named):
        for stream in (False, True):
            settings: Any = {"model": "tiny", "messages": QUESTION, "tools": tools, "tool_choice": choice, "seed": 3}
            made: Any = client.chat.completions.create(**settings, stream=stream)
            if stream:
                chunks = list(made)
                (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
                reason = chunks[-1].choices[0].finish_reason
            else:
                (call,), reason = made.choices[0].message.tool_calls, made.choices[0].finish_reason
            assert reason == "tool_calls"
            assert call.function.name in (("b",) if choice is named else ("a", "b"))
            assert json.loads(call.function.arguments)["at"] in ("fox", "狐")


SCHEMA_FIELD = "response_format.json_schema.schema"


def schema_format(described: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (schema_format({"name": "x"}), SCHEMA_FIELD),
        (schema_format({"name": "x", "schema": {"type": "nothing"}}), SCHEMA_FIELD),
        (schema_format({"name": "x", "schema": {"enum": ["x" * 100_000]}}), SCHEMA_FIELD),
        (schema_format({"name": "x", "schema": {"type": "integer", "minimum": 5, "maximum": 3}}), SCHEMA_FIELD),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_what_cannot_be_held_to_is_refused(running: RunningServer, changed: dict[str, Any], name: str) -> None:
    answered = httpx.post(running.url + "/chat/completions", json={"model": "tiny", "messages": QUESTION} | changed)
    assert answered.status_code == 400
    error = answered.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name
    assert name in error["message"]
