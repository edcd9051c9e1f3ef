"""Answers many requests at once with one model: continuous batching as ordinary Python.

In: prompts as token ids with their parameters, from any thread. Out: events of each request (tokens with their text,
then one finish), in order. One scheduler thread owns the model. A request waits for a free slot, its prompt is computed
in chunks (one prompt at a time, between the steps of those that are already answering), then all answering requests get
one token a step. They join and leave between steps. In fp32 an answer does not depend on the neighbours; in bf16 the
last bits of a logit may (kernels sum in an order that depends on the number of rows). It does not know HTTP or chat.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.errors import ConfigError
from onecard.serve.detokenize import Detokenizer, TokenBytes
from onecard.serve.requests import (
    EngineClosedError,
    Event,
    FinishEvent,
    FinishReason,
    GenerationParameters,
    Handle,
    PromptRefusedError,
    QueueFullError,
    TokenEvent,
)
from onecard.serve.sampling import Sampler, SamplingParameters, token_logprobs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PREFILL_CHUNK_TOKENS = 512


@dataclass
class _Running:
    """A request with its state; `length` positions of it are in the cache."""

    handle: Handle
    ids: list[int]
    limit: int
    parameters: GenerationParameters
    sampler: Sampler
    detokenizer: Detokenizer
    length: int = 0
    said: int = 0
    next_token: int = -1

    def finish(self, reason: FinishReason, error: str = "") -> None:
        text = "" if reason in ("abort", "error") else self.detokenizer.finish()
        self.handle.emit(FinishEvent(reason, text, self.said, error))


class Engine:
    """Serves one model.

    `max_concurrent` requests are answered at the same time and `max_queue` more may wait; prompt and answer together
    have at most `max_length` tokens. Ids that the tokenizer does not know (padded rows of the model) are never chosen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        max_concurrent: int,
        max_length: int,
        max_queue: int = 64,
    ) -> None:
        from onecard.serve.cache import AttentionMasks, SlotCache
        from onecard.tokenizer.template import stop_token_ids

        self.max_concurrent, self.max_length, self.max_queue = max_concurrent, max_length, max_queue
        self.token_bytes = TokenBytes(tokenizer)
        embedding: Any = model.get_input_embeddings()
        self.vocabulary: int = min(self.token_bytes.size, embedding.weight.shape[0])
        self.sampling_defaults = sampling_defaults(model)
        self.stop_ids = frozenset(stop_token_ids(tokenizer)) | _generation_stop_ids(model)
        self._model: Any = model
        self._masks = AttentionMasks(model)
        self._cache = SlotCache(max_concurrent, max_length)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in accepted else "cache"
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._changed = threading.Condition()
        self._waiting: deque[_Running] = deque()
        self._rows: list[_Running] = []  # row i of the cache belongs to request i
        self._prefilling: _Running | None = None  # its row is len(self._rows)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="onecard-engine", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return len(self._rows) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def submit(
        self,
        ids: Sequence[int],
        parameters: GenerationParameters | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> Handle:
        """Hand in a prompt; thread-safe.

        `listener`, if given, gets the events (in the engine's thread) and the handle cannot be iterated.
        Raises PromptRefusedError (with the numbers), QueueFullError or EngineClosedError.
        """
        parameters = parameters or GenerationParameters()
        limit = self._check(ids, parameters)
        handle = Handle(len(ids), listener, self._wake)
        request = _Running(
            handle,
            list(ids),
            limit,
            parameters,
            Sampler(parameters.sampling, ids, self.vocabulary, self._model.device),
            Detokenizer(self.token_bytes, parameters.stop, continues=parameters.continues_text),
        )
        with self._changed:
            if self._closing:
                raise EngineClosedError("The server is shutting down.", "Ask again later.")
            # Free slots count too: a burst is refused only when slots and queue are both full.
            if self.active + self.waiting >= self.max_concurrent + self.max_queue:
                raise QueueFullError(
                    f"{self.max_concurrent} requests are being answered and {self.max_queue} wait.", "Ask again later."
                )
            self._waiting.append(request)
            self._changed.notify()
        return handle

    def close(self) -> None:
        """End every request with `abort` and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _check(self, ids: Sequence[int], parameters: GenerationParameters) -> int:
        """How many tokens the answer may have."""
        if not ids:
            raise PromptRefusedError("The prompt is empty.", "Give some text.")
        foreign = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if foreign is not None:
            raise PromptRefusedError(
                f"The prompt has the token id {foreign}; ids go from 0 to {self.vocabulary - 1}.",
                "Encode it with this model's tokenizer.",
            )
        room = self.max_length - len(ids)
        if room < 1:
            raise PromptRefusedError(
                f"The prompt has {len(ids)} tokens; the context holds {self.max_length}, the answer included.",
                "Shorten the prompt.",
                too_long=True,
            )
        wanted = parameters.max_tokens
        if wanted is not None and wanted > room:
            raise PromptRefusedError(
                f"The prompt has {len(ids)} tokens and max_tokens is {wanted}: together {len(ids) + wanted}, "
                f"but the context holds {self.max_length}.",
                f"Shorten the prompt or ask for at most {room} tokens.",
                "max_tokens",
                too_long=True,
            )
        return wanted or room

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # --- the scheduler's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._closing or self.active or self.waiting):
                        self._changed.wait()
                    if self._closing:
                        break
                    self._drop_cancelled()
                    if self._prefilling is None and self._waiting and len(self._rows) < self.max_concurrent:
                        self._prefilling = self._waiting.popleft()
                try:
                    if self._prefilling is not None:
                        self._prefill(self._prefilling)
                    if self._rows:
                        self._decode()
                except Exception as fault:  # noqa: BLE001 - the server outlives a failed step (such as out of memory)
                    self._end_all("error", _explain(fault))
        self._end_all("abort")
        for request in self._waiting:
            request.finish("abort")
        self._waiting.clear()

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._waiting if request.handle.cancelled]:
            self._waiting.remove(request)
            request.finish("abort")
        if self._prefilling is not None and self._prefilling.handle.cancelled:
            self._drop_prefilling("abort")
        self._release([index for index, request in enumerate(self._rows) if request.handle.cancelled], "abort")

    def _drop_prefilling(self, reason: FinishReason, error: str = "") -> None:
        assert self._prefilling is not None
        request, self._prefilling = self._prefilling, None
        self._cache.clear(len(self._rows))
        request.finish(reason, error)

    def _release(self, indices: Sequence[int], reason: FinishReason | None = None) -> None:
        """Free rows and close the gaps from the end, so that rows in use stay dense."""
        for index in sorted(indices, reverse=True):
            gone, last = self._rows[index], len(self._rows) - 1
            self._cache.clear(index)
            if index != last:
                self._cache.move(last, index, self._rows[last].length)
                self._rows[index] = self._rows[last]
            self._rows.pop()
            if self._prefilling is not None:
                self._cache.move(last + 1, last, self._prefilling.length)
            if reason is not None:
                gone.finish(reason)

    def _end_all(self, reason: FinishReason, error: str = "") -> None:
        requests = [*self._rows, *([self._prefilling] if self._prefilling else [])]
        self._rows, self._prefilling = [], None
        self._cache.forget()
        for request in requests:
            request.finish(reason, error)

    def _prefill(self, request: _Running) -> None:
        """Compute the next chunk of a prompt; after the last one the request has its first token and joins the rows."""
        import torch

        start, stop = request.length, min(request.length + PREFILL_CHUNK_TOKENS, len(request.ids))
        try:
            tokens = torch.tensor([request.ids[start:stop]], device=self._model.device)
            positions = torch.arange(start, stop, device=self._model.device)[None]
            logits_NV = self._forward(len(self._rows), tokens, positions, stop)
        except Exception as fault:  # noqa: BLE001 - whatever the model does, the other requests go on
            self._drop_prefilling("error", _explain(fault))
            return
        request.length = stop
        if stop == len(request.ids):
            self._prefilling = None
            self._rows.append(request)
            row = len(self._rows) - 1
            if self._advance(logits_NV, [request]):
                self._release([row])

    def _decode(self) -> None:
        """Give every answering request one more token."""
        import torch

        device = self._model.device
        tokens = torch.tensor([[request.next_token] for request in self._rows], device=device)
        positions = torch.tensor([[request.length] for request in self._rows], device=device)
        longest = max(request.length for request in self._rows) + 1
        logits_NV = self._forward(0, tokens, positions, longest)
        for request in self._rows:
            request.length += 1
        self._release(self._advance(logits_NV, self._rows))

    def _forward(self, first: int, tokens_NQ: torch.Tensor, positions_NQ: torch.Tensor, longest: int) -> torch.Tensor:
        """Logits after the last token of each row, over the ids that the tokenizer knows: [N, V]."""
        self._cache.begin(first, positions_NQ, longest)
        answer = self._model(
            input_ids=tokens_NQ,
            position_ids=positions_NQ,
            attention_mask=self._masks.make(positions_NQ, longest, self._model.dtype),
            use_cache=True,
            **{self._cache_argument: self._cache},
            **self._keep_last,
        )
        logits_NV: torch.Tensor = answer.logits[:, -1, : self.vocabulary]
        return logits_NV

    def _advance(self, logits_NV: torch.Tensor, requests: Sequence[_Running]) -> list[int]:
        """Choose and announce the next token of each request; returns the indices of those that ended."""
        import torch

        chosen = torch.stack([request.sampler.choose(logits_NV[i]) for i, request in enumerate(requests)]).tolist()
        return [
            index
            for index, (request, token) in enumerate(zip(requests, chosen))
            if self._accept(request, int(token), logits_NV[index])
        ]

    def _accept(self, request: _Running, token: int, logits_V: torch.Tensor) -> bool:
        """Announce one token; True if the answer has ended."""
        if token < 0:
            request.finish("error", "The model's output is not a number (NaN or infinite): its weights are damaged.")
            return True
        if token in self.stop_ids and not request.parameters.ignore_eos:
            request.finish("stop")
            return True
        request.sampler.accept(token)
        request.said += 1
        request.next_token = token
        top = request.parameters.sampling.top_logprobs
        logprobs = None if top is None else token_logprobs(logits_V, token, top)
        request.handle.emit(TokenEvent(token, request.detokenizer.feed(token), logprobs))
        if request.detokenizer.stopped:
            request.finish("stop")
        elif request.said == request.limit:
            request.finish("length")
        return request.handle.finished


def _explain(fault: Exception) -> str:
    import torch

    console.warn(f"a step of the model failed: {type(fault).__name__}: {fault}")
    if isinstance(fault, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "The device ran out of memory. Ask for less at the same time (--max-concurrent, --max-length)."
    return f"The model failed ({type(fault).__name__})."


def sampling_defaults(model: PreTrainedModel) -> SamplingParameters:
    """What generation_config.json says of sampling: `do_sample` false is greedy; what it leaves out changes nothing."""
    config: Any = model.generation_config
    if getattr(config, "do_sample", None) is False:
        return SamplingParameters(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: getattr(config, name, None) for name in names}
    return SamplingParameters(**{name: value for name, value in found.items() if value is not None})


def _generation_stop_ids(model: Any) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def serving_dtype(precision: str, device: str) -> torch.dtype:
    """The number format of the weights: what `precision` says; auto is fp32 on a CPU and bf16 on a CUDA card."""
    import torch

    if precision == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def context_length(model: PreTrainedModel, wanted: int | str) -> int:
    """The longest context in tokens: what the model was made for, or less if `wanted`. ConfigError if it cannot."""
    config: Any = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(wanted, int):
        if limit is not None and wanted > limit:
            raise ConfigError(
                f"max_length is {wanted}, but the model knows positions up to {limit}.",
                f"Give at most {limit}, or leave it out.",
            )
        return wanted
    return int(limit or 2048)


def open_engine(
    path: Path, *, max_concurrent: int, max_length: int | str = "auto", max_queue: int = 64, precision: str = "auto"
) -> tuple[Engine, PreTrainedTokenizerFast]:
    """Load a model directory onto the best device here and start an engine; ArtifactError or ConfigError otherwise."""
    import torch

    from onecard.model.load import check_tokenizer_fits, load_model, load_tokenizer, model_directory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model_directory(path)  # says what is missing before anything is read
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype=serving_dtype(precision, device), device=device)
    check_tokenizer_fits(tokenizer, model, path)
    length = context_length(model, max_length)
    return Engine(model, tokenizer, max_concurrent, length, max_queue), tokenizer
