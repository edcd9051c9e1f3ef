"""Saved activations in the memory of the host: out while the forward pass runs on, back a layer before they are needed.

All copies run on a stream of their own beside the computation, and every hand-over between the two streams is an event
that the other one waits for, on the card; the processor waits for nothing. What was saved last is still on the card
when the backward pass begins with it.
It does not know of layers: a window of bytes, about a layer's worth, bounds what lies on the card in passing.
The copies of a card have not been run on one yet; their order is tested with copies that take note.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

# Until a forward pass has told how much a layer saves.
FIRST_WINDOW_BYTES = 256 << 20


class Mover(Protocol):
    """Starts copies that run beside the computation; a ticket is what the computation waits for before it goes on."""

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]: ...

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]: ...

    def wait(self, ticket: Any) -> None: ...


class CudaMover:
    """Copies between a card and pinned memory on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]:
        """The caller keeps `flat` until the computation has waited for the ticket, so its memory is not used anew."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())  # what is copied must have been computed
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
            return host, self._stream.record_event()

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """The memory is taken on the stream of the computation: the copy waits for what that still does there."""
        made = torch.empty(host.shape, dtype=host.dtype, device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            made.copy_(host, non_blocking=True)
            return made, self._stream.record_event()

    def wait(self, ticket: Any) -> None:
        """The computation goes on after the copy."""
        torch.cuda.current_stream().wait_event(ticket)


class Parked:
    """A flat tensor on the host, or on its way."""

    def __init__(self, owner: HostMemory, number: int, flat: Tensor) -> None:
        self._owner, self.number = owner, number
        self.size_bytes = flat.numel() * flat.element_size()
        self.here: Tensor | None = flat
        self.host, self.ticket = owner.mover.to_host(flat)
        self.uses = 1

    def again(self) -> None:
        """Kept once more: what comes back stays for so many uses."""
        self.uses += 1

    def unpack(self) -> Tensor:
        """The tensor on the card."""
        tensor = self._owner.fetch(self)
        self.uses -= 1
        self.here = tensor if self.uses > 0 else None
        return tensor


class HostMemory:
    """Packs flat tensors into the memory of the host."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.window_bytes = FIRST_WINDOW_BYTES
        self._parked: list[weakref.ref[Parked]] = []
        self._leaving: deque[weakref.ref[Parked]] = deque()
        self._leaving_bytes = self._total_bytes = 0
        # What was sent for and is not used yet; kept here so that no memory is given up while a copy writes into it.
        self._coming: dict[int, tuple[Tensor, Any]] = {}

    def begin(self, layers: int) -> None:
        """A new forward pass of a model of so many layers."""
        for _, ticket in self._coming.values():
            self.mover.wait(ticket)
        self._coming.clear()
        if self._total_bytes:
            self.window_bytes = max(1, self._total_bytes // layers)
        self._parked.clear()
        self._leaving.clear()
        self._leaving_bytes = self._total_bytes = 0

    def pack(self, flat: Tensor) -> Parked:
        """Start the copy; the tensor itself is given up when more than the window has been saved after it."""
        made = Parked(self, len(self._parked), flat)
        reference = weakref.ref(made)
        self._parked.append(reference)
        self._leaving.append(reference)
        self._leaving_bytes += made.size_bytes
        self._total_bytes += made.size_bytes
        while self._leaving_bytes > self.window_bytes and len(self._leaving) > 1:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                self._leaving_bytes -= oldest.size_bytes
                self.mover.wait(oldest.ticket)
                oldest.here = None
        return made

    def fetch(self, parked: Parked) -> Tensor:
        """The tensor on the card, and send for those that were saved just before it."""
        if parked.here is not None:
            tensor = parked.here
        else:
            coming = self._coming.pop(parked.number) if parked.number in self._coming else None
            tensor, ticket = coming or self.mover.to_device(parked.host)
            self.mover.wait(ticket)
        self._send_for(parked.number)
        return tensor

    def _send_for(self, before: int) -> None:
        ahead = 0
        for number in range(min(before, len(self._parked)) - 1, -1, -1):
            parked = self._parked[number]()
            if parked is None or parked.here is not None or parked.uses < 1:
                continue
            ahead += parked.size_bytes
            if ahead > self.window_bytes:
                break
            if number not in self._coming:
                self._coming[number] = self.mover.to_device(parked.host)
