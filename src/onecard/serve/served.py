"""What a server serves by name: language models, classifiers, and models that turn texts into vectors.

In: directories. Out: for each, what its routes need. Each has its own engine and memory, and they do not see each
other. It does not know HTTP beyond the errors that it answers with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from onecard.errors import OnecardError
from onecard.serve import protocol
from onecard.serve.protocol import ApiError, ChatRequest, CompletionRequest
from onecard.serve.structure import Structure, StructureRefusedError
from onecard.tokenizer.template import encode_chat, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from onecard.evaluate.predict import Classifier
    from onecard.serve.engine import Engine


@dataclass
class Vectors:
    """Turns texts into vectors."""

    does: ClassVar[str] = "turns texts into vectors (/v1/embeddings)"
    name: str
    model: Any
    tokenizer: PreTrainedTokenizerFast
    longest: int
    first_token: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, inputs: Sequence[str] | Sequence[list[int]]) -> tuple[list[list[float]], int]:
        """A vector for each text, or list of token ids; and how many tokens were read. ApiError 400 names a bad one."""
        from onecard.model.classifier import encode_texts
        from onecard.model.encoder import vectors

        with self._lock:
            documents: list[list[int]] = []
            for number, one in enumerate(inputs):
                cut, ids = 0, one
                if isinstance(one, str):
                    (ids,), cut = encode_texts(self.tokenizer, [one], self.longest)
                assert isinstance(ids, list)
                self._check(number, ids, bool(cut))
                documents.append(ids)
            found = vectors(self.model, documents, first_token=self.first_token)
        return found.tolist(), sum(map(len, documents))

    def _check(self, number: int, ids: list[int], cut: bool) -> None:
        if cut or len(ids) > self.longest:
            raise ApiError(
                400,
                f"input[{number}] has more than {self.longest} tokens, which is what this model reads. Shorten it.",
                parameter="input",
                code="context_length_exceeded",
            )
        rows = self.model.get_input_embeddings().weight.shape[0]
        if not ids or max(ids) >= rows:
            what = f"has a token id beyond {rows - 1}" if ids else "is empty"
            raise ApiError(400, f"input[{number}] {what}.", parameter="input")

    def card(self) -> dict[str, Any]:
        """What /v1/models says of it besides its name."""
        return {"max_model_len": self.longest, "task": "embeddings"}

    def close(self) -> None:
        """Nothing is running."""


@dataclass
class Classes:
    """Names the classes of texts."""

    does: ClassVar[str] = "names the classes of texts (/v1/classify)"
    name: str
    classifier: Classifier
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, texts: list[str]) -> tuple[list[dict[str, Any]], int]:
        """Of each text its label and probabilities; and how many were longer than what the model reads."""
        with self._lock:
            before = self.classifier.cut
            return self.classifier(texts), self.classifier.cut - before

    def card(self) -> dict[str, Any]:
        """What /v1/models says of it besides its name."""
        return {"max_model_len": self.classifier.longest, "task": "classify", "labels": self.classifier.labels}

    def close(self) -> None:
        """Nothing is running."""


@dataclass
class Language:
    """Answers chats and continues texts; `vectors` where it was asked for embeddings too."""

    does: ClassVar[str] = "answers chats and continues texts (/v1/chat/completions, /v1/completions)"
    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerFast
    vectors: Vectors | None = None
    # Encoding changes the tokenizer's settings for a moment; two threads at once would fail.
    _encoding: threading.Lock = field(default_factory=threading.Lock)

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        tools = request.offered_tools
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise protocol.unsupported("tools", "this model's chat template does not know them.")
        messages = [message.plain() for message in request.messages]
        try:
            with self._encoding:
                return encode_chat(self.tokenizer, messages, tools=tools, add_generation_prompt=True).ids
        except OnecardError as fault:
            raise ApiError(400, f"messages: {fault.what} {fault.remedy}", parameter="messages") from None

    def structure(self, request: ChatRequest) -> Structure | None:
        """What the answer is held to; ApiError 400 if it cannot be compiled."""
        try:
            grammar = request.grammar
            return None if grammar is None else self.engine.structures.compile(grammar)
        except StructureRefusedError as fault:
            name = request.structure_name
            raise ApiError(400, f"{name}: {fault.what} {fault.remedy}", parameter=name) from None

    def encode_completion(self, request: CompletionRequest) -> list[int]:
        """Token ids of a prompt: as given, or BOS and the text."""
        prompt = request.only_prompt
        if isinstance(prompt, list):
            return prompt
        with self._encoding:
            return encode_prompt(self.tokenizer, prompt)

    def card(self) -> dict[str, Any]:
        """What /v1/models says of it besides its name."""
        return {"max_model_len": self.engine.max_length}

    def close(self) -> None:
        """End what is running."""
        self.engine.close()


Served = Language | Classes | Vectors


def open_served(path: Path, name: str, *, embeddings: bool, **settings: Any) -> Served:
    """Open a directory as what it is; `settings` are those of `open_engine`.

    `embeddings`: a language model answers /v1/embeddings too, for which its weights are held a second time.
    """
    from onecard.model.load import load_architecture
    from onecard.serve.opening import open_engine

    kinds = getattr(load_architecture(path), "architectures", None) or []
    if any("ForSequenceClassification" in kind for kind in kinds):
        from onecard.evaluate.predict import Classifier

        classifier = Classifier(path)
        classifier.longest = _at_most(classifier.longest, settings["max_length"])
        return Classes(name, classifier)
    if kinds and not any("CausalLM" in kind or "LMHead" in kind or "ConditionalGeneration" in kind for kind in kinds):
        return _open_vectors(path, name, settings["max_length"])
    # First what may be refused: an engine has a thread.
    vectors = _open_vectors(path, name, settings["max_length"]) if embeddings else None
    engine, tokenizer = open_engine(path, **settings)
    return Language(name, engine, tokenizer, vectors)


def _at_most(longest: int, wanted: int | str) -> int:
    """An encoder of few tokens may stand beside a language model of many."""
    return min(longest, wanted) if isinstance(wanted, int) else longest


def _open_vectors(path: Path, name: str, max_length: int | str) -> Vectors:
    from onecard.machine.calibrate import default_device
    from onecard.model.encoder import load_encoder, readable_tokens, reads_the_first_token
    from onecard.model.load import load_tokenizer
    from onecard.serve.opening import context_length

    first_token = reads_the_first_token(path)
    model = load_encoder(path).to(default_device())
    longest = _at_most(readable_tokens(model, context_length(model.config, "auto")), max_length)
    return Vectors(name, model, load_tokenizer(path), longest, first_token)
