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
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard import console
from onecard.data.batches import RowOrder
from onecard.data.packing import RowBatch, Rows, gather
from onecard.data.prefetch import Prefetch
from onecard.errors import Interrupted, OnecardError
from onecard.train import checkpoint, state
from onecard.train.compilation import begin_pass, uncompiled
from onecard.train.control import PAUSE, Control
from onecard.train.metrics import RunLog, peak_memory_bytes
from onecard.train.objectives import Objective
from onecard.train.optimizers import Optimizers
from onecard.train.precision import Precision
from onecard.train.scaling import LossScale, clip_
from onecard.train.schedule import Schedule
from onecard.train.stopping import StopRequest, stop_on_signals
from onecard.train.vitals import Vitals

_SCHEDULE = {"kind", "max_steps", "warmup_ratio", "decay_ratio", "final_ratio"}
_SETTINGS = {"max_steps", "max_grad_norm", "evaluate_every", "save_every", "keep_last", "log_every"}
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
        self.vitals = Vitals(self.log)
        self.control = Control(run)
        # Updates done, updates of the present order taken, tokens learned, updates skipped.
        self.step = self.taken = self.tokens = self.skipped = self.skips_in_a_row = 0
        # Settings that were changed on the way, by name.
        self.changes: dict[str, Any] = {}
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
        """Compute the gradients of update `number` of the order and apply them (or skip it if they are not finite)."""
        if self._ahead is None:
            self._ahead = Prefetch(self.micro_batches)
        batches = self._ahead.take(number)
        # Only updates that are applied move the schedule on.
        self.optimizers.set_factor(self.schedule.factor(self.step - self.skipped))
        loss, norm = self._scaled_gradients(batches)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.optimizers.step()
            self.loss_scale.update(overflow=False)
        self.optimizers.zero_grad()
        tokens = sum(batch.tokens for batch in batches)
        return UpdateResult(loss, norm, tokens, skipped, self._ahead.waited_seconds)

    def _scaled_gradients(self, batches: list[RowBatch]) -> tuple[float, float]:
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
            self.log.event("overflow", step=self.step + 1, loss_scale=self.loss_scale.value)

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

    def save(self) -> None:
        """Write a checkpoint of everything that decides how the run goes on."""
        self.log.flush()
        checkpoint.save(
            self.run_directory, self.step, state.tensors(self), state.numbers(self), keep_last=self.settings.keep_last
        )
        self.log.event("checkpoint", step=self.step)

    def resume(self) -> bool:
        """Go to the newest whole checkpoint; False if there is none."""
        newest = checkpoint.newest_whole(self.run_directory)
        if newest is None:
            return False
        state.restore(self, newest[1])
        self.log.cut_after(self.step)
        return True

    def change(self, name: str, value: Any) -> None:
        """Give a setting (one of `control.MEANWHILE`) another value from the next update on."""
        self.changes[name] = value
        if name in ("learning_rate", "muon_learning_rate", "weight_decay"):
            self.optimizers.change(name, value)
        elif name == "gradient_accumulation_steps":
            self._reorder(self.order.changed(self.taken, rows_per_update=value * self.settings.batch_size))
        elif name == "mix":
            weights = [float(value.get(source, 1.0)) for source in self.rows.store.sources]
            self._reorder(self.order.changed(self.taken, weights=weights))
        else:
            field = {"schedule": "kind", "final_learning_rate_ratio": "final_ratio"}.get(name, name)
            if field in _SCHEDULE:
                self.schedule = replace(self.schedule, **{field: value})
            if field in _SETTINGS:
                self.settings = replace(self.settings, **{field: value})

    def _reorder(self, order: RowOrder) -> None:
        self.close()  # what was made ahead is of the old order
        self.order, self.taken = order, 0

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, description: str) -> None:
        """Train to `max_steps`. Interrupted after a signal (saved), OnecardError when too many updates are skipped."""
        try:
            with self.vitals:
                self._run(description)
        except RuntimeError as broken:
            fault = self.vitals.explain(self.step)
            if fault is None:
                raise
            raise fault from broken
        finally:
            self.close()

    def _run(self, description: str) -> None:
        self.model.train()
        with (
            stop_on_signals() as stop,
            console.progress(description, self.settings.max_steps, "updates", done=self.step) as bar,
        ):
            while self.step < self.settings.max_steps:
                self._watch(stop)
                self._obey(bar)
                settings = self.settings
                started = time.monotonic()
                result = self.update(self.taken)
                update_seconds = time.monotonic() - started
                self.vitals.after_update(result.waited_seconds, update_seconds)
                self.step += 1
                self.taken += 1
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

    def _watch(self, stop: StopRequest) -> None:
        """Wait while the card is too hot; HardwareFault, with what can be trusted saved, if it is broken."""
        fault = self.vitals.before_update(self.step, lambda: stop.signal is not None or self.control.pause_wanted())
        if fault is None:
            return
        if not fault.spoiled and not checkpoint.directory_of(self.run_directory, self.step).exists():
            with suppress(RuntimeError):  # of a card that does not answer
                self.save()
        raise fault

    def _obey(self, bar: console.Progress) -> None:
        """Make the changes that were asked for; Interrupted, with everything saved, if a pause was."""
        pause = None
        for request in self.control.due(self.step):
            if request.name == PAUSE:
                pause = request
                continue
            self.change(request.name, request.value)
            console.note(f"  {request.name} = {request.value} from update {self.step + 1} on ({request.who})")
            if request.name == "max_steps":
                bar.total = request.value
        if pause is not None:
            if not checkpoint.directory_of(self.run_directory, self.step).exists():
                self.save()
            self.log.event("pause", step=self.step, reason=f"asked for by {pause.who}")
            raise Interrupted(
                f"Paused after update {self.step} of {self.settings.max_steps}, as {pause.who} asked; all is saved.",
                f"Go on with: onecard resume {self.run_directory}",
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
            **self.vitals.row(self.step),
            **extra,
        )

    def _count_skip(self, result: UpdateResult) -> bool:
        """Count and report a skipped update; True when so many in a row mean that the run is broken."""
        if not result.skipped:
            self.skips_in_a_row = 0
            return False
        self.skipped += 1
        self.skips_in_a_row += 1
        rows = self.order.rows_of_update(self.taken - 1)
        self.log.event("skip", step=self.step, loss=str(result.loss), grad_norm=str(result.grad_norm), rows=rows)
        console.warn(f"Update {self.step} is skipped: its loss or gradient is not finite. Weights are unchanged.")
        if self.skips_in_a_row < SKIPS_IN_A_ROW:
            return False
        self.skips_in_a_row = 0  # whoever goes on from here begins to count anew
        return True
