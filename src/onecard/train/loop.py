"""The one training loop: an objective and rows in, a trained model and an exact record out.

An update takes its rows from the order (a function of seed, epoch and index), runs them in micro-batches, and divides
every gradient by the labelled tokens of the whole update, so that neither micro-batch size nor accumulation nor packing
changes the result. State is saved only between updates; a signal is obeyed at the next completed one.
A non-finite loss or gradient skips the update: weights, optimizer state and schedule are as if it had not been tried.
Where only the loss scale of fp16 was too high, the same update is tried again with a lower one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from onecard import console
from onecard.data.batches import RowOrder
from onecard.data.packing import RowBatch, Rows, gather
from onecard.data.prefetch import Prefetch
from onecard.errors import Interrupted, OnecardError
from onecard.train import checkpoint
from onecard.train.compilation import begin_pass, uncompiled
from onecard.train.metrics import RunLog, peak_memory_bytes
from onecard.train.objectives import Objective
from onecard.train.optimizers import Optimizers
from onecard.train.precision import Precision
from onecard.train.scaling import LossScale, clip_
from onecard.train.schedule import Schedule

# So many skipped updates in a row mean that the run is broken, not unlucky.
SKIPS_IN_A_ROW = 10


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of a resolved plan that the loop needs; counts are of updates unless named otherwise."""

    max_steps: int
    batch_size: int
    max_grad_norm: float
    evaluate_every: int
    save_every: int
    keep_last: int
    log_every: int
    pad_id: int


@dataclass(frozen=True)
class UpdateResult:
    """One update: mean loss of its labelled tokens (nats), gradient norm before clipping, tokens but padding.

    `waited_seconds` went by before its rows were there.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    waited_seconds: float = 0.0


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGHUP; obeyed by the loop at the next completed update.

    The handler only takes note: printing here could meet the stream in the middle of another print.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the signals that end a run; a second one changes nothing, so it cannot spoil a save.

    One that is ignored stays ignored: that is how nohup keeps a run alive when its terminal is closed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    caught = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in caught:
        signal.signal(number, request)
    try:
        yield request
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a forward pass in training mode is random: by modules, or by rates that the configuration gives."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config = getattr(model, "config", None)
    rates = config.to_dict().items() if config is not None else ()
    return any(
        isinstance(value, int | float) and value > 0
        for name, value in rates
        if "drop" in name or name.endswith("pdrop")
    )


class Loop:
    """Trains `model` in place. `run` is the run directory; `sample` writes what the model says at an evaluation.

    `saving` is entered around every forward pass that is learned from: it decides what backward finds kept, and how.
    """

    def __init__(
        self,
        *,
        run: Path,
        model: torch.nn.Module,
        objective: Objective,
        rows: Rows,
        order: RowOrder,
        held_out: tuple[Rows, list[int]] | None,
        optimizers: Optimizers,
        schedule: Schedule,
        precision: Precision,
        settings: LoopSettings,
        saving: Callable[[], AbstractContextManager[object]] = nullcontext,
        sample: Callable[[], list[tuple[str, str]]] | None = None,
    ) -> None:
        self.run_directory, self.model, self.objective = run, model, objective
        self.rows, self.order, self.held_out = rows, order, held_out
        self.optimizers, self.schedule, self.precision, self.settings = optimizers, schedule, precision, settings
        self.saving, self.sample = saving, sample
        self.loss_scale = LossScale(enabled=precision.loss_scaling)
        self.stopped_by: int | None = None
        self._ahead: Prefetch[list[RowBatch]] | None = None
        self.log = RunLog(run)
        self.step = self.tokens = self.skipped = self._skips_in_a_row = 0
        self.seconds = 0.0
        self._random = has_dropout(model)

    # --- one update -----------------------------------------------------------------------------------------------

    def micro_batches(self, update: int) -> list[RowBatch]:
        """The rows of an update in micro-batches of one shape."""
        numbers, size = self.order.rows_of_update(update), self.settings.batch_size
        return [
            gather(self.rows, numbers[at : at + size], pad_id=self.settings.pad_id, row_count=size)
            for at in range(0, len(numbers), size)
        ]

    def update(self, number: int) -> UpdateResult:
        """Compute the gradients of update `number` and apply them (or skip it if they are not finite)."""
        if self._ahead is None:
            self._ahead = Prefetch(self.micro_batches)
        batches = self._ahead.take(number)
        # Only updates that are applied move the schedule on.
        self.optimizers.set_factor(self.schedule.factor(number - self.skipped))
        loss, norm = self._scaled_gradients(number, batches)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.optimizers.step()
            self.loss_scale.update(overflow=False)
        self.optimizers.zero_grad()
        tokens = sum(batch.tokens for batch in batches)
        return UpdateResult(loss, norm, tokens, skipped, self._ahead.waited_seconds)

    def _scaled_gradients(self, number: int, batches: list[RowBatch]) -> tuple[float, float]:
        """`_gradients`, again with half the loss scale as long as gradients overflow though the loss does not."""
        before = self.loss_scale.state()
        while True:
            loss, norm = self._gradients(batches)
            if not math.isfinite(loss) or math.isfinite(norm):
                return loss, norm
            if self.loss_scale.value <= 1:
                self.loss_scale.load(before)  # not the scale but the rows are at fault
                return loss, norm
            self.loss_scale.update(overflow=True)
            self.optimizers.zero_grad()
            self.log.event("overflow", step=number + 1, loss_scale=self.loss_scale.value)

    def _gradients(self, batches: list[RowBatch]) -> tuple[float, float]:
        """Leave the clipped gradients of an update in `.grad`; its mean loss and the norm before clipping."""
        # Without any label the loss is 0 and so are its gradients.
        labelled = max(1, sum(batch.labelled for batch in batches))
        scale = self.loss_scale.value
        parts = []
        for batch in batches:
            part = self._loss(batch, scale / labelled)
            part.backward()  # type: ignore[no-untyped-call]
            parts.append(part.detach())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.loss_scale.unscale_(gradients)
        norm = clip_(gradients, self.settings.max_grad_norm)
        if self.optimizers.in_backward:
            norm = self.optimizers.taken_norm()
        # Read here and not before: a device then waits once an update, and not once a micro-batch.
        return math.fsum(torch.stack(parts).tolist()) / scale, norm

    def rehearse(self) -> None:
        """Forward and backward of the longest rows, of which nothing is kept: if the memory runs out, then now."""
        lengths = [sum(s.end - s.begin for s in self.rows.segments(row)) for row in range(sum(self.rows.per_source))]
        longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[: self.settings.batch_size]
        generator = torch.get_rng_state()
        batch = gather(self.rows, longest, pad_id=self.settings.pad_id, row_count=self.settings.batch_size)
        self._loss(batch, 0.0).backward()  # type: ignore[no-untyped-call]
        self.optimizers.zero_grad()
        torch.set_rng_state(generator)

    def close(self) -> None:
        """End the thread that makes batches ahead; a later update starts it anew."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _loss(self, batch: RowBatch, scale: float, *, learn: bool = True) -> Tensor:
        begin_pass(self.model)
        with self.precision.autocast(), self.saving() if learn else nullcontext():
            return self.objective.loss(
                self.model,
                batch,
                scale=scale,
                device=self.precision.device,
                row_tokens=self.rows.max_length,
                learn=learn,
            )

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self) -> float | None:
        """Mean loss (nats) over the labelled tokens of the held-out rows; None without such rows."""
        if self.held_out is None:
            return None
        rows, numbers = self.held_out
        size, total, labelled = self.settings.batch_size, 0.0, 0
        if self._random:  # else training mode computes the same, and the compiled layers need no second form
            self.model.eval()
        try:
            for at in range(0, len(numbers), size):
                batch = gather(rows, numbers[at : at + size], pad_id=self.settings.pad_id, row_count=size)
                # Gradients stay enabled though none is taken, for then the compiled training layers serve here too.
                total += float(self._loss(batch, 1.0, learn=False).detach())
                labelled += batch.labelled
        finally:
            self.model.train()
        return total / max(1, labelled)

    def _look(self) -> float | None:
        held_out_loss = self.evaluate()
        if self.sample is not None:
            self.model.eval()
            try:
                with uncompiled(), torch.no_grad():
                    for prompt, text in self.sample():
                        self.log.sample(self.step, prompt, text)
            finally:
                self.model.train()
        return held_out_loss

    # --- state ----------------------------------------------------------------------------------------------------

    def _model_tensors(self) -> dict[str, Tensor]:
        parameters = list(self.model.named_parameters())
        if any(parameter.requires_grad for _, parameter in parameters):
            # What is frozen is as it was when the run began.
            parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        named = [*parameters, *self.model.named_buffers()]
        return {f"model/{name}": tensor.detach() for name, tensor in named}

    def save(self) -> None:
        """Write a checkpoint of everything that decides how the run goes on."""
        tensors = self._model_tensors()
        tensors |= {f"optimizer/{name}": value for name, value in self.optimizers.state_tensors().items()}
        tensors["generator/cpu"] = torch.get_rng_state()
        if self.precision.device == "cuda":
            tensors["generator/cuda"] = torch.cuda.get_rng_state()
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "skips_in_a_row": self._skips_in_a_row,
            "loss_scale": self.loss_scale.state(),
        }
        self.log.flush()
        checkpoint.save(self.run_directory, self.step, tensors, state, keep_last=self.settings.keep_last)
        self.log.event("checkpoint", step=self.step)

    def resume(self) -> bool:
        """Go to the newest whole checkpoint; False if there is none."""
        newest = checkpoint.newest_whole(self.run_directory)
        if newest is None:
            return False
        _, path = newest
        tensors = self._model_tensors()
        for name, (dtype, shape) in checkpoint.tensor_names(path).items():
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=dtype)
        state = checkpoint.load(path, tensors)
        device = self.precision.device
        self.optimizers.load_state_tensors(
            {
                # The counters too: the fused kernels want them where the weights are.
                name.removeprefix("optimizer/"): value.to(device)
                for name, value in tensors.items()
                if name.startswith("optimizer/")
            }
        )
        torch.set_rng_state(tensors["generator/cpu"])
        if device == "cuda" and "generator/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator/cuda"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.skipped, self._skips_in_a_row = state["skipped"], state["skips_in_a_row"]
        self.loss_scale.load(state["loss_scale"])
        self.log.cut_after(self.step)
        return True

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, description: str) -> None:
        """Train to `max_steps`. Interrupted after a signal (saved), OnecardError when too many updates are skipped."""
        try:
            self._run(description)
        finally:
            self.close()

    def _run(self, description: str) -> None:
        settings = self.settings
        self.model.train()
        with (
            stop_on_signals() as stop,
            console.progress(description, settings.max_steps, "updates", done=self.step) as bar,
        ):
            while self.step < settings.max_steps:
                started = time.monotonic()
                result = self.update(self.step)
                update_seconds = time.monotonic() - started
                self.step += 1
                self.tokens += result.tokens
                broken = self._count_skip(result)
                last = self.step == settings.max_steps
                held_out_loss = self._look() if last or self.step % settings.evaluate_every == 0 else None
                self.seconds += time.monotonic() - started
                if last or held_out_loss is not None or self.step % settings.log_every == 0:
                    self._record(result, held_out_loss, update_seconds)
                bar.advance(1, f"loss {result.loss:.3f}")
                # Read once: what comes during the save is obeyed after the next update, which is then saved too.
                stopped_by = stop.signal
                if last or broken or stopped_by is not None or self.step % settings.save_every == 0:
                    self.save()
                if broken:
                    raise OnecardError(
                        f"{SKIPS_IN_A_ROW} updates in a row had no finite gradient; the run stops with finite weights.",
                        f"Look at the rows named in {self.run_directory / 'events.jsonl'}; begin anew with a lower "
                        "learning_rate, or run the same command again to go on after them.",
                    )
                self.stopped_by = stopped_by
                if stopped_by is not None and not last:
                    name = signal.Signals(stopped_by).name
                    self.log.event("pause", step=self.step, reason=name)
                    raise Interrupted(
                        f"Stopped by {name} after update {self.step} of {settings.max_steps}; everything is saved.",
                        "Run the same command again to go on from there.",
                    )

    def _record(self, result: UpdateResult, held_out_loss: float | None, update_seconds: float) -> None:
        extra = {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        self.log.update(
            step=self.step,
            tokens=self.tokens,
            loss=result.loss if math.isfinite(result.loss) else None,
            lr=self.schedule.factor(self.step - 1) * self.optimizers.peak_learning_rate,
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            tokens_per_second=result.tokens / max(update_seconds, 1e-9),
            seconds=self.seconds,
            data_wait_fraction=result.waited_seconds / max(update_seconds, 1e-9),
            peak_memory_bytes=peak_memory_bytes(self.precision.device),
            **extra,
        )

    def _count_skip(self, result: UpdateResult) -> bool:
        """Count and report a skipped update; True when so many in a row mean that the run is broken."""
        if not result.skipped:
            self._skips_in_a_row = 0
            return False
        self.skipped += 1
        self._skips_in_a_row += 1
        rows = self.order.rows_of_update(self.step - 1)
        self.log.event("skip", step=self.step, loss=str(result.loss), grad_norm=str(result.grad_norm), rows=rows)
        console.warn(f"Update {self.step} is skipped: its loss or gradient is not finite. Weights are unchanged.")
        if self._skips_in_a_row < SKIPS_IN_A_ROW:
            return False
        self._skips_in_a_row = 0  # whoever goes on from here begins to count anew
        return True
