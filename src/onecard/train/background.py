"""Checkpoints in the background: the loop waits for a copy of the tensors, a thread does the files.

At most one checkpoint is being written. The next one, and whatever ends the run, waits for it; what went wrong in it is
raised where the loop looks next. What is written is the state at the time of the copy, whatever the loop does then.
The copies stay on the host between checkpoints, as large as one: where they would take more than half of what is free
there, the loop waits for the files instead. Copies from a card have not been run on one yet.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard import console
from onecard.errors import OnecardError
from onecard.train import checkpoint, tensor_files
from onecard.train.checkpoint import Keep
from onecard.train.metrics import RunLog

# Of the memory that is free on the host, the copies take no more than this.
MOST_OF_FREE_MEMORY = 0.5
# The allocator of pinned memory rounds up to powers of two.
PINNED_ROUNDING = 2


class Saver:
    """Writes the checkpoints of a run."""

    def __init__(self, run: Path, log: RunLog) -> None:
        self._run, self._log = run, log
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._step = 0
        self._copies: dict[str, Tensor] = {}
        # Shape, type, and whether it comes from a card, of what is copied.
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._said = False
        # Where the loop began, and what is the best up to there, once somebody asks.
        self._reached = 0
        self._best: tuple[int, float] | None = None
        # How long the loop was kept waiting, for copies and for files.
        self.waited_seconds = 0.0

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._writing is not None and not self._writing.done()

    @property
    def best(self) -> tuple[int, float]:
        """Update and loss on held-out rows of the best checkpoint up to now; -1 and infinity if there is none."""
        if self._best is None:
            found = checkpoint.best(self._run, at_most=self._reached)
            self._best = (-1, math.inf) if found is None else (found[0], found[2])
        return self._best

    def is_best(self, held_out_loss: float | None) -> bool:
        """Whether no checkpoint of the run has a loss on held-out rows as low as this."""
        return held_out_loss is not None and held_out_loss < self.best[1]

    def reach(self, step: int) -> None:
        """The loop stands after update `step`: only checkpoints up to there are of its past."""
        self.finish()
        self._reached, self._best = step, None

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        keep: Keep,
        held_out_loss: float | None = None,
        wait: bool = False,
    ) -> None:
        """Save the state after update `step`; with `wait` the checkpoint is whole when this returns.

        What went wrong with the one before is raised here, and with `wait` what goes wrong with this one.
        """
        started = time.monotonic()
        self.finish()
        if keep.best and held_out_loss is not None and self.is_best(held_out_loss):
            self._best = (step, held_out_loss)
        best_step = self.best[0] if keep.best else -1
        copied = None if wait else self._copied(tensors)
        self._step = step
        if copied is None:
            self._write(step, tensors, state, keep, held_out_loss, best_step, None)
        else:
            ready = None
            if any(tensor.is_cuda for tensor in tensors.values()):
                ready = torch.cuda.current_stream().record_event()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._writing = self._thread.submit(
                self._write, step, copied, copy.deepcopy(state), keep, held_out_loss, best_step, ready
            )
        self.waited_seconds += time.monotonic() - started

    def look(self) -> None:
        """Raise what went wrong in the background; never waits."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is being written, and raise what went wrong."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        writing.result()

    def close(self) -> None:
        """Wait, end the thread and give up the copies. Something else ends the run: a fault is only said."""
        try:
            self.finish()
        except OnecardError as fault:
            console.warn(f"The checkpoint of update {self._step} could not be written: {fault.what}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
            self._copies, self._kinds = {}, {}

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        keep: Keep,
        held_out_loss: float | None,
        best_step: int,
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        try:
            self._log.flush()
            checkpoint.save(
                self._run, step, tensors, state, keep=keep, held_out_loss=held_out_loss, best_step=best_step
            )
        except OnecardError as fault:
            with contextlib.suppress(OnecardError):  # on a full disk even this may not fit
                self._log.event("pause", step=step, reason=fault.what)
            raise
        measured: dict[str, Any] = {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        if keep.best:
            measured["best"] = best_step
        self._log.event("checkpoint", step=step, **measured)

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The tensors on the host, on their way there from a card; None where there is no room for them."""
        kinds = {name: (tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            self._copies, self._kinds = {}, {}
            if not self._there_is_room(tensors):
                return None
            self._copies = {
                name: torch.empty(shape, dtype=dtype, pin_memory=pinned)
                for name, (shape, dtype, pinned) in kinds.items()
            }
            self._kinds = kinds
        for name, tensor in tensors.items():
            # On the stream of the computation: what changes the tensors next comes after the copy.
            self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return self._copies

    def _there_is_room(self, tensors: dict[str, Tensor]) -> bool:
        import psutil

        needed = tensor_files.size_bytes(tensors)
        if any(tensor.is_cuda for tensor in tensors.values()):
            needed *= PINNED_ROUNDING
        free = psutil.virtual_memory().available
        if needed <= MOST_OF_FREE_MEMORY * free:
            return True
        if not self._said:
            console.note(
                f"  checkpoints are written while the run waits: a copy of {console.format_bytes(needed)} would take "
                f"too much of the {console.format_bytes(free)} that are free in memory"
            )
        self._said = True
        return False
