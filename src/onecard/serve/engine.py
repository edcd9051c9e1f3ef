"""Answers many requests at once with one model: continuous batching as ordinary Python.

In: prompts as token ids with their parameters, from any thread. Out: events of each request (tokens with their text,
then one finish), in order. One scheduler thread owns the model. A request waits for a free slot; what it has in common
with texts that were read before is taken over, the rest of its prompt is computed in pieces, short ones while others
are answering, so that nobody waits long. All answering requests get one token a step. They join and leave between
steps. In fp32 an answer does not depend on the neighbours; in bf16 on a card the last bits of a logit may (kernels sum
in an order that depends on the number of rows). It does not know HTTP or chat.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.serve.detokenize import Detokenizer, TokenBytes
from onecard.serve.prefixes import PrefixStore
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
from onecard.serve.sampling import Sampler, choose_all, generation_stop_ids, sampling_defaults, token_logprobs
from onecard.serve.structure import Structures

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from onecard.serve.eager import EagerModel
    from onecard.serve.native import NativeModel

PREFILL_CHUNK_TOKENS = 512
# While others are answering, a piece of a prompt may hold up each of their tokens by as much as it takes.
_SHORT_CHUNK_TOKENS = 32


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
    answer: list[int] = field(default_factory=list)
    next_token: int = -1

    def finish(self, reason: FinishReason, error: str = "") -> None:
        text = "" if reason in ("abort", "error") else self.detokenizer.finish()
        self.handle.emit(FinishEvent(reason, text, self.said, error))


class Engine:
    """Serves one model.

    `max_concurrent` requests are answered at the same time and `max_queue` more may wait; prompt and answer together
    have at most `max_length` tokens. Ids that the tokenizer does not know (padded rows of the model) are never chosen.
    `decoder` computes the model's steps (default: through its own modules). Texts that were read before are kept in
    `prefix_bytes` of memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        max_concurrent: int,
        max_length: int,
        max_queue: int = 64,
        *,
        decoder: EagerModel | NativeModel | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        from onecard.serve.eager import EagerModel
        from onecard.tokenizer.template import stop_token_ids

        self.max_concurrent, self.max_length, self.max_queue = max_concurrent, max_length, max_queue
        self.token_bytes = TokenBytes(tokenizer)
        embedding: Any = model.get_input_embeddings()
        self.vocabulary: int = min(self.token_bytes.size, embedding.weight.shape[0])
        self.sampling_defaults = sampling_defaults(model)
        self.stop_ids = frozenset(stop_token_ids(tokenizer)) | generation_stop_ids(model)
        self.structures = Structures(self.token_bytes, self.vocabulary, self.stop_ids)
        self.computed_tokens = 0
        """Tokens of prompts and answers that went through the model."""
        self._model: Any = model
        self._decoder = decoder or EagerModel(model, max_concurrent, max_length)
        self._prefixes = PrefixStore(prefix_bytes)
        self._changed = threading.Condition()
        self._waiting: deque[_Running] = deque()
        self._rows: list[_Running] = []  # those that are answering: slot i belongs to request i
        # Those that have a slot after these, in turn. Only of the first may something be computed already.
        self._prompts: list[_Running] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="onecard-engine", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return len(self._rows) + len(self._prompts)

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
            Sampler(parameters.sampling, ids, self.vocabulary, self._model.device, parameters.structure),
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
                    while self._waiting and self.active < self.max_concurrent:
                        self._prompts.append(self._waiting.popleft())
                try:
                    self._round()
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
        for request in [request for request in self._prompts if request.handle.cancelled]:
            self._drop_prompt(request, "abort")
        self._release([index for index, request in enumerate(self._rows) if request.handle.cancelled], "abort")

    def _drop_prompt(self, request: _Running, reason: FinishReason, error: str = "") -> None:
        if request is self._prompts[0]:
            self._decoder.clear(len(self._rows))
        self._prompts.remove(request)
        request.finish(reason, error)

    def _release(self, indices: Sequence[int], reason: FinishReason | None = None) -> None:
        """Free slots and close the gaps from the end, so that those in use stay dense; what was read is kept."""
        for index in sorted(indices, reverse=True):
            gone, last = self._rows[index], len(self._rows) - 1
            known = [*gone.ids, *gone.answer][: gone.length]
            self._prefixes.keep(known, lambda start, stop, slot=index: self._decoder.read(slot, start, stop))  # type: ignore[misc]
            self._decoder.clear(index)
            if index != last:
                self._decoder.move(last, index, self._rows[last].length)
                self._rows[index] = self._rows[last]
            self._rows.pop()
            if self._prompts and self._prompts[0].length:
                self._decoder.move(last + 1, last, self._prompts[0].length)
            if reason is not None:
                gone.finish(reason)

    def _end_all(self, reason: FinishReason, error: str = "") -> None:
        requests = [*self._rows, *self._prompts]
        self._rows, self._prompts = [], []
        self._decoder.forget()
        self._prefixes.clear()
        for request in requests:
            request.finish(reason, error)

    def _round(self) -> None:
        """One step: a piece of a prompt, or of several, and one more token for all that are answering."""
        if self._decoder.mixes:
            self._step(self._pieces(len(self._prompts)), with_rows=True)
            return
        for piece in self._pieces(1):
            try:
                self._step([piece], with_rows=False)
            except Exception as fault:  # noqa: BLE001 - whatever the model does, the other requests go on
                self._drop_prompt(piece[0], "error", _explain(fault))
        if self._rows:
            self._step([], with_rows=True)

    def _pieces(self, most: int) -> list[tuple[_Running, int]]:
        """The next prompts to compute, each with the place to compute it up to, within what one step may take."""
        room = PREFILL_CHUNK_TOKENS
        if self._rows and self._model.device.type == "cpu":
            room = min(room, _SHORT_CHUNK_TOKENS)
        pieces: list[tuple[_Running, int]] = []
        for place, request in enumerate(self._prompts[:most]):
            if request.length == 0:
                self._take_over(request, len(self._rows) + place)
            stop = min(len(request.ids), request.length + room)
            pieces.append((request, stop))
            room -= stop - request.length
            if room <= 0:
                break
        return pieces

    def _take_over(self, request: _Running, slot: int) -> None:
        """Give a prompt what was computed of its beginning before; its last token is always computed."""
        stored = self._prefixes.find(request.ids[:-1])
        if stored is not None:
            self._decoder.write(slot, 0, stored)
            request.length = request.handle.cached_tokens = stored.shape[2]

    def _step(self, pieces: Sequence[tuple[_Running, int]], *, with_rows: bool) -> None:
        """Compute pieces of prompts and the last token of the answering; whoever is complete has one more token."""
        rows = list(self._rows) if with_rows else []
        tokens = [request.next_token for request in rows]
        slots = list(range(len(rows)))
        positions = [request.length for request in rows]
        complete, wanted = list(rows), list(range(len(rows)))
        for place, (request, stop) in enumerate(pieces):
            tokens += request.ids[request.length : stop]
            slots += [len(self._rows) + place] * (stop - request.length)
            positions += range(request.length, stop)
            if stop == len(request.ids):
                complete.append(request)
                wanted.append(len(tokens) - 1)
        logits_NV = self._decoder.step(tokens, slots, positions, wanted)[:, : self.vocabulary]
        self.computed_tokens += len(tokens)
        for request in rows:
            request.length += 1
        for request, stop in pieces:
            request.length = stop
        joining = complete[len(rows) :]
        self._prompts = self._prompts[len(joining) :]
        self._rows += joining
        if complete:
            first = 0 if with_rows else len(self._rows) - len(joining)
            self._release([first + ended for ended in self._advance(logits_NV, complete)])

    def _advance(self, logits_NV: torch.Tensor, requests: Sequence[_Running]) -> list[int]:
        """Choose and announce the next token of each request; returns the indices of those that ended."""
        chosen = choose_all([request.sampler for request in requests], logits_NV)
        return [
            index
            for index, (request, token) in enumerate(zip(requests, chosen))
            if self._accept(request, token, logits_NV[index])
        ]

    def _accept(self, request: _Running, token: int, logits_V: torch.Tensor) -> bool:
        """Announce one token; True if the answer has ended."""
        structure = request.parameters.structure
        if token < 0:
            damaged = "The model's output is not a number (NaN or infinite): its weights are damaged."
            request.finish("error", structure.fault or damaged if structure is not None else damaged)
            return True
        if token in self.stop_ids and not request.parameters.ignore_eos:
            request.finish("stop")
            return True
        request.sampler.accept(token)
        request.said += 1
        request.answer.append(token)
        request.next_token = token
        top = request.parameters.sampling.top_logprobs
        logprobs = None if top is None else token_logprobs(logits_V, token, top)
        request.handle.emit(TokenEvent(token, request.detokenizer.feed(token), logprobs))
        if request.detokenizer.stopped or (structure is not None and structure.complete):
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
