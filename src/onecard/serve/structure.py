"""Holds an answer to a structure: JSON of any kind, JSON of a schema, or the call of a tool.

In: the structure that a request asks for, as a grammar. Out: before each token, which tokens keep to it; an end-of-turn
token does only where the structure is complete. llguidance reads the grammar; a token is its bytes as the reader sees
them, so what fits is what is shown. Compiling is bounded in size and effort, and its results are kept for a while.
It does not know requests or HTTP.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onecard.errors import OnecardError

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher

    from onecard.serve.detokenize import TokenBytes

LARGEST_GRAMMAR_BYTES = 64 << 10
_KEPT_GRAMMARS = 32
# JSON allows blanks without end between its parts, and a small model in doubt would write them: a space or an indented
# line is what programs write.
_BLANKS = r"( |\n[ \t]{0,24})?"
# Names and marks are written in whatever tokens the model likes best, not in those that a tokenizer would take.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Where one of these stands beside properties, others than those may be meant.
_SAY_WHAT_ELSE = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "$ref", "anyOf", "oneOf",
}  # fmt: skip

Schema = Mapping[str, Any]


class StructureRefusedError(OnecardError):
    """A structure cannot be compiled: a schema is wrong, too large, met by nothing, or uses what is not supported."""


def json_grammar(schema: Schema) -> str:
    """JSON that meets a schema."""
    return f"start: {_json(schema)}"


def call_grammar(tools: Sequence[tuple[str, Schema]], otherwise: Schema | None = None) -> str:
    """One call of one of the tools (names, and schemas of their arguments), or JSON that meets `otherwise`."""
    calls = []
    for name, schema in tools:
        before = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        calls.append(" ".join((_quoted(before), _json(schema), _quoted("}\n</tool_call>"))))
    if otherwise is not None:
        calls.append(_json(otherwise))
    return "start: " + "\n  | ".join(calls)


def _json(schema: Schema) -> str:
    if len(json.dumps(schema)) > LARGEST_GRAMMAR_BYTES:
        raise _too_large()
    settings = {"x-guidance": {"whitespace_pattern": _BLANKS}}
    return "%json " + json.dumps({**closed(schema), **settings}, ensure_ascii=False)


def closed(schema: Schema) -> Schema:
    """The schema without properties that it does not name, where it leaves open whether there may be any.

    Whatever meets the result meets `schema`; a small model would go on adding properties until its context is full.
    Where parts of a schema look at each other's properties (`allOf`; `anyOf`, `oneOf` or `$ref` beside properties) all
    stays as it is.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(part: Any) -> bool:
    """Whether several parts of a schema speak about the properties of one object."""
    if isinstance(part, list):
        return any(map(_combines, part))
    if not isinstance(part, dict):
        return False
    several = part.keys() & {"$ref", "anyOf", "oneOf"} and part.keys() & {"properties", "required"}
    return "allOf" in part or bool(several) or any(map(_combines, part.values()))


def _closed(schema: Schema) -> Schema:
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            made[key] = {name: _closed_if_object(one) for name, one in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            made[key] = [_closed_if_object(one) for one in value]
        else:
            made[key] = _closed_if_object(value) if key == "items" else value
    names, needed = schema.get("properties"), schema.get("required", [])
    said = any(key in schema for key in _SAY_WHAT_ELSE)
    if isinstance(names, dict) and names and isinstance(needed, list) and not said and all(n in names for n in needed):
        made["additionalProperties"] = False
    return made


def _too_large() -> StructureRefusedError:
    return StructureRefusedError(f"The schema is larger than {LARGEST_GRAMMAR_BYTES >> 10} KiB.", "Give a smaller one.")


def _closed_if_object(schema: Any) -> Any:
    return _closed(schema) if isinstance(schema, dict) else schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Structure:
    """The structure of one answer, as far as it was said."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next: V booleans, on the CPU; none if there is a `fault`."""
        import torch

        # One byte a token: 0 where it does not fit.
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        return torch.zeros_like(found[: self._vocabulary]) if self.fault else found[: self._vocabulary]

    def accept(self, token: int) -> None:
        """Take note that `token`, which was allowed, was said."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the structure has ended: nothing can follow."""
        return self._matcher.is_stopped() and not self.fault

    @property
    def fault(self) -> str:
        """Why nothing can follow although the structure is not complete; empty if that is not so."""
        if self._matcher.is_error() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            return f"The answer cannot be held to its structure any longer ({_reason(self._matcher)})."
        return ""


class Structures:
    """Compiles structures for one model. Thread-safe; what was asked for lately is not compiled again."""

    def __init__(self, token_bytes: TokenBytes, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._token_bytes, self._vocabulary = token_bytes, vocabulary
        self._stop_ids = sorted(token for token in stop_ids if token < vocabulary)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> Structure:
        """The structure of one answer. StructureRefusedError says why there is none."""
        if len(grammar.encode(errors="replace")) > LARGEST_GRAMMAR_BYTES:
            raise _too_large()
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = self._matcher(grammar)
                if len(self._known) > _KEPT_GRAMMARS:
                    self._known.popitem(last=False)
            self._known.move_to_end(grammar)
            return Structure(self._known[grammar].deep_copy(), self._vocabulary)

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = self._tokenizer or self._make_tokenizer()
        made = LLMatcher(self._tokenizer, _HEAD + grammar, limits=LLParserLimits(verbose_errors=False), log_level=0)
        if not made.is_error():
            made.compute_bitmask()  # a schema that refers to itself only, and the like, fails here
        if made.is_error() or made.is_stopped():
            raise StructureRefusedError(f"The schema cannot be compiled: {_reason(made)}.", "Change the schema.")
        return made

    def _make_tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._token_bytes, self._vocabulary, self._stop_ids)),
            eos_token=self._stop_ids or None,
            slices=LLTokenizer.json_slices(),
        )


class _Vocabulary:
    """The tokens as llguidance reads them. It wants a token of the end; one more than there are stands for none."""

    bos_token_id = None

    def __init__(self, token_bytes: TokenBytes, size: int, stop_ids: Sequence[int]) -> None:
        self.tokens = [token_bytes(token) for token in range(size)] + [b""]
        self.eos_token_id = stop_ids[0] if stop_ids else size
        self.special_token_ids = sorted(token for token in token_bytes.special_ids if token < size)

    def __call__(self, _: str | bytes) -> list[int]:
        raise AssertionError("nothing is forced, so no text is encoded")


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, in one line, without the source around it."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    if not lines or lines[0].startswith("NoExtension"):
        return "nothing meets it"
    if lines[0].endswith("regex parse error:"):
        return next((line for line in lines if line.startswith("error:")), lines[0]).removeprefix("error: ")
    return lines[0].rpartition("failed to compile JSON schema: ")[2].rstrip(".")[:300]
