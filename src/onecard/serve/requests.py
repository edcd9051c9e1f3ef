"""What passes between those who ask and the engine: a request's parameters, its events, its handle, and refusals.

It does not know models or HTTP.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from onecard.errors import OnecardError
from onecard.serve.sampling import SamplingParameters, TokenLogprobs

if TYPE_CHECKING:
    from onecard.serve.structure import Structure

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefusedError(OnecardError):
    """The engine does not take a request: PromptRefusedError, QueueFullError or EngineClosedError."""


class PromptRefusedError(RequestRefusedError):
    """The prompt is empty, has foreign ids, or leaves no room for the answer (`too_long`); `parameter` is at fault."""

    def __init__(self, what: str, remedy: str, parameter: str = "prompt", *, too_long: bool = False) -> None:
        super().__init__(what, remedy)
        self.parameter, self.too_long = parameter, too_long


class QueueFullError(RequestRefusedError):
    """As many requests wait as may."""


class EngineClosedError(RequestRefusedError):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class GenerationParameters:
    """What one request wants. `max_tokens` None: up to the end of the context.

    `stop` ends the answer before any of these strings. `ignore_eos` goes on after an end-of-turn token.
    `continues_text` says that the answer continues the prompt's text rather than begins a new one. An answer with a
    `structure` (which is of this answer alone) keeps to it, and ends where it is complete.
    """

    max_tokens: int | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    continues_text: bool = False
    structure: Structure | None = None


@dataclass(frozen=True)
class TokenEvent:
    """A token was chosen; `text` is what may be shown now (often empty: a character or a stop string is unfinished)."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class FinishEvent:
    """The answer ended; `text` is what was held back. End-of-turn tokens are not counted: they are not in the text."""

    reason: FinishReason
    text: str
    completion_tokens: int
    error: str = ""


Event = TokenEvent | FinishEvent


class Handle:
    """One request in the engine: iterate it for its events, the last of which is a FinishEvent."""

    def __init__(self, prompt_tokens: int, listener: Callable[[Event], None] | None, wake: Callable[[], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        """Tokens of the prompt that did not have to be computed again."""
        self.cancelled = False
        self.finished = False
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener = listener or self._events.put
        self._wake = wake

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, FinishEvent):
                return

    def cancel(self) -> None:
        """The client left: the slot is free before the next step. Safe from any thread, at any time, repeatedly."""
        self.cancelled = True
        self._wake()

    def emit(self, event: Event) -> None:
        """Announce an event; the engine calls this."""
        self.finished = self.finished or isinstance(event, FinishEvent)
        try:
            self._listener(event)
        except RuntimeError:  # the listener's event loop is closed: nobody listens any more
            self.cancelled = True
