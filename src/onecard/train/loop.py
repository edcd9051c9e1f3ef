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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard import console
from onecard.data.batches import RowOrder
from onecard.data.packing import RowBatch, Rows, gather
from onecard.data.prefetch import Prefetch
from onecard.errors import Interrupted
from onecard.train import changes, checkpoint, recovery, state
from onecard.train.background import Saver
from onecard.train.compilation import begin_pass, uncompiled
from onecard.train.control import PAUSE, Control
from onecard.train.metrics import RunLog, peak_memory_bytes
from onecard.train.neftune import is_noisy
from onecard.train.objectives import Objective
from onecard.train.optimizers import Optimizers
from onecard.train.precision import Precision
from onecard.train.scaling import LossScale, clip_
from onecard.train.schedule import Schedule
from onecard.train.stopping import StopRequest, stop_on_signals
from onecard.train.vitals import Vitals
from onecard.train.watchdog import Action, Finding, Limits, Watchdog


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
    keep_best: bool = False
    keep_every: int | None = None
    roll_back_learning_rate_factor: float = 1.0


@dataclass(frozen=True)
class UpdateResult:
    """One update: mean loss of its labelled tokens (nats), gradient norm before clipping, tokens but padding.

    `waited_seconds` went by before its rows were there; `measures` is what the objective tells beside the loss.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    waited_seconds: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a forward pass in training mode is random: by modules, by rates in the configuration, by added noise."""
    if is_noisy(model) or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
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
        watchdog: Watchdog | None = None,
        sample: Callable[[], list[tuple[str, str]]] | None = None,
    ) -> None:
        self.run_directory, self.model, self.objective = run, model, objective
        self.rows, self.order, self.held_out = rows, order, held_out
        self.optimizers, self.schedule, self.precision, self.settings = optimizers, schedule, precision, settings
        self.saving, self.sample = saving, sample
        self.watchdog = watchdog or Watchdog(Limits())
        self.loss_scale = LossScale(enabled=precision.loss_scaling)
        self.stopped_by: int | None = None
        self._ahead: Prefetch[list[RowBatch]] | None = None
        self.log = RunLog(run)
        self.vitals = Vitals(self.log)
        self.saver = Saver(run, self.log)
        self.control = Control(run)
        # Updates done, updates of the present order taken, tokens learned, updates skipped.
        self.step = self.taken = self.tokens = self.skipped = 0
        # Settings that were changed on the way, by name.
        self.changes: dict[str, Any] = {}
        self._held_out_measures: dict[str, float] = {}
        self.seconds = self._factor = 0.0
        self._random = has_dropout(model)

    # --- one update -----------------------------------------------------------------------------------------------

    def micro_batches(self, update: int) -> list[RowBatch]:
        """The rows of an update in micro-batches of one shape."""
        numbers, size = self.order.rows_of_update(update), self.settings.batch_size
        batches = [
            gather(self.rows, numbers[at : at + size], pad_id=self.settings.pad_id, row_count=size)
            for at in range(0, len(numbers), size)
        ]
        if self.precision.device == "cuda":
            # From there a card copies while it computes.
            batches = [batch.moved(lambda array: torch.from_numpy(array).pin_memory().numpy()) for batch in batches]
        return batches

    def update(self, number: int) -> UpdateResult:
        """Compute the gradients of update `number` of the order and apply them (or skip it if they are not finite)."""
        if self._ahead is None:
            self._ahead = Prefetch(self.micro_batches)
        batches = self._ahead.take(number)
        # Only updates that are applied move the schedule on.
        self._factor = self.schedule.factor(self.step - self.skipped)
        self.optimizers.set_factor(self._factor)
        while True:
            try:
                loss, norm = self._scaled_gradients(batches)
                break
            except torch.OutOfMemoryError as fault:
                self._halve(fault)
            batches = self.micro_batches(number)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.optimizers.step()
            self.loss_scale.update(overflow=False)
        self.optimizers.zero_grad()
        tokens = sum(batch.tokens for batch in batches)
        return UpdateResult(loss, norm, tokens, skipped, self._ahead.waited_seconds, self.objective.measures())

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
        labelled = max(1, sum(self.objective.count(batch) for batch in batches))
        scale = self.loss_scale.value
        self._begin(batches)
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

    def _halve(self, fault: torch.OutOfMemoryError) -> None:
        """Go on in micro-batches of half the size, whose gradients add up to the same; raises where that cannot be."""
        size = self.settings.batch_size
        if size == 1 or self.optimizers.in_backward:  # inside backward some weights have been stepped already
            raise fault
        self.optimizers.zero_grad()
        changes.make(self, "batch_size", (size + 1) // 2)
        self.log.event("oom", step=self.step + 1, batch_size=self.settings.batch_size, was=size)
        console.warn(
            f"The memory ran out in update {self.step + 1}: it is done again with batch_size "
            f"{self.settings.batch_size} instead of {size}, which gives the same gradient."
        )
        if self.precision.device == "cuda":
            torch.cuda.empty_cache()

    def rehearse(self) -> None:
        """Forward and backward of the longest rows, of which nothing is kept: if the memory runs out, then now."""
        lengths = [sum(s.end - s.begin for s in self.rows.segments(row)) for row in range(sum(self.rows.per_source))]
        longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[: self.settings.batch_size]
        generator = torch.get_rng_state()
        while True:
            size = self.settings.batch_size
            try:
                batch = gather(self.rows, longest[:size], pad_id=self.settings.pad_id, row_count=size)
                self._loss(batch, 0.0).backward()  # type: ignore[no-untyped-call]
                break
            except torch.OutOfMemoryError as fault:
                self._halve(fault)
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

    def _begin(self, batches: Iterable[RowBatch]) -> None:
        """Let the objective see all rows of an update or an evaluation before their losses are computed."""
        self.objective.measures()  # those of an attempt that was given up count for nothing
        begin_pass(self.model)
        with self.precision.autocast():
            self.objective.begin(self.model, batches, device=self.precision.device, row_tokens=self.rows.max_length)

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self) -> float | None:
        """Mean loss (nats) over the labelled tokens of the held-out rows; None without such rows."""
        if self.held_out is None:
            return None
        rows, numbers = self.held_out
        size, total, labelled = self.settings.batch_size, 0.0, 0

        def held_out_batches() -> Iterator[RowBatch]:
            for at in range(0, len(numbers), size):
                yield gather(rows, numbers[at : at + size], pad_id=self.settings.pad_id, row_count=size)

        if self._random:  # else training mode computes the same, and the compiled layers need no second form
            self.model.eval()
        try:
            self._begin(held_out_batches())
            for batch in held_out_batches():
                # Gradients stay enabled though none is taken, for then the compiled training layers serve here too.
                total += float(self._loss(batch, 1.0, learn=False).detach())
                labelled += self.objective.count(batch)
        finally:
            self.model.train()
        self._held_out_measures = {f"held_out_{name}": value for name, value in self.objective.measures().items()}
        return total / max(1, labelled)

    def _look(self) -> float | None:
        held_out_loss = self.evaluate()
        texts = []
        if self.sample is not None:
            self.model.eval()
            try:
                with uncompiled(), torch.no_grad():
                    for prompt, text in self.sample():
                        self.log.sample(self.step, prompt, text)
                        texts.append(text)
            finally:
                self.model.train()
        decaying = self.schedule.factor(self.step - self.skipped) < self._factor
        self.say(self.watchdog.after_evaluation(held_out_loss, texts, decaying=decaying))
        return held_out_loss

    def say(self, findings: list[Finding]) -> None:
        """Write findings of the watchdog down, and say them."""
        for finding in findings:
            self.log.event("finding", step=self.step, what=finding.kind, text=finding.text)
            console.warn(f"Update {self.step}: {finding.text}")

    # --- state ----------------------------------------------------------------------------------------------------

    def save(self, held_out_loss: float | None = None, *, wait: bool = True) -> None:
        """Write a checkpoint of everything that decides how the run goes on; without `wait` in the background."""
        settings = self.settings
        self.saver.save(
            self.step,
            state.tensors(self),
            state.numbers(self),
            keep=checkpoint.Keep(settings.keep_last, settings.keep_best, settings.keep_every),
            held_out_loss=held_out_loss,
            wait=wait,
        )

    def resume(self) -> bool:
        """Go to the newest whole checkpoint; False if there is none."""
        newest = checkpoint.newest_whole(self.run_directory)
        if newest is None:
            return False
        state.restore(self, newest[1])
        self.saver.reach(self.step)
        self.log.cut_after(self.step)
        return True

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
            self.saver.close()

    def _run(self, description: str) -> None:
        self.model.train()
        with (
            stop_on_signals() as stop,
            console.progress(description, self.settings.max_steps, "updates", done=self.step) as bar,
        ):
            while self._goes_on(bar):
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
                if recovery.judge(self, result, update_seconds) is Action.ROLL_BACK:
                    bar.advance(self.step - bar.done)
                    continue
                last = self.step == settings.max_steps
                held_out_loss = self._look() if last or self.step % settings.evaluate_every == 0 else None
                last = last or self.watchdog.enough
                self.seconds += time.monotonic() - started
                if last or held_out_loss is not None or self.step % settings.log_every == 0:
                    self.record(result, held_out_loss, update_seconds)
                bar.advance(1, f"loss {result.loss:.3f}")
                # Read once: what comes during the save is obeyed after the next update, which is then saved too.
                stopped_by = stop.signal
                self.saver.look()
                best = settings.keep_best and self.saver.is_best(held_out_loss)
                if last or best or stopped_by is not None or self.step % settings.save_every == 0:
                    self.save(held_out_loss, wait=last or stopped_by is not None)
                self.stopped_by = stopped_by
                if stopped_by is not None and not last:
                    name = signal.Signals(stopped_by).name
                    self.log.event("pause", step=self.step, reason=name)
                    raise Interrupted(
                        f"Stopped by {name} after update {self.step} of {settings.max_steps}; everything is saved.",
                        "Run the same command again to go on from there.",
                    )

        self._take_best()

    @property
    def at_end(self) -> bool:
        """Whether no update is left to make, as things stand."""
        return self.step >= self.settings.max_steps or self.watchdog.enough

    def _goes_on(self, bar: console.Progress) -> bool:
        """Whether there is another update to make; what was asked for in the last one may have moved the end."""
        if self.at_end:
            self._obey(bar)
        return not self.at_end

    def _take_best(self) -> None:
        """With early stopping the model that counts is the one with the lowest loss on held-out rows."""
        patience = self.watchdog.limits.early_stopping
        self.saver.finish()
        best = checkpoint.best(self.run_directory, at_most=self.step)
        if patience is None or best is None or best[0] == self.step:
            return
        state.restore_model(self, best[1])
        self.log.event("early_stop", step=self.step, best=best[0], held_out_loss=best[2])
        console.note(
            f"  the loss on held-out rows was lowest after update {best[0]} ({best[2]:.3f}): that model is kept"
            + (f"; {patience} evaluations did not better it" if self.watchdog.enough else "")
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
        """Make the changes that were asked for; Interrupted, with everything saved, if a pause was before the end."""
        pause = None
        for request in self.control.due(self.step, partial(changes.settled, self)):
            if request.name == PAUSE:
                pause = request
                continue
            changes.make(self, request.name, request.value)
            console.note(f"  {request.name} = {request.value} from update {self.step + 1} on ({request.who})")
            if request.name == "max_steps":
                bar.total = request.value
        if pause is not None and not self.at_end:  # at its end it need not pause
            self.saver.finish()
            if not checkpoint.directory_of(self.run_directory, self.step).exists():
                self.save()
            self.log.event("pause", step=self.step, reason=f"asked for by {pause.who}")
            raise Interrupted(
                f"Paused after update {self.step} of {self.settings.max_steps}, as {pause.who} asked; all is saved.",
                f"Go on with: onecard resume {self.run_directory}",
            )

    def record(self, result: UpdateResult, held_out_loss: float | None, update_seconds: float) -> None:
        """Write a line of metrics.jsonl."""
        extra = {} if held_out_loss is None else {"held_out_loss": held_out_loss, **self._held_out_measures}
        self.log.update(
            step=self.step,
            tokens=self.tokens,
            loss=result.loss if math.isfinite(result.loss) else None,
            lr=self._factor * self.optimizers.peak_learning_rate,
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            tokens_per_second=result.tokens / max(update_seconds, 1e-9),
            seconds=self.seconds,
            data_wait_fraction=result.waited_seconds / max(update_seconds, 1e-9),
            peak_memory_bytes=peak_memory_bytes(self.precision.device),
            **result.measures,
            **self.vitals.row(self.step),
            **extra,
        )
