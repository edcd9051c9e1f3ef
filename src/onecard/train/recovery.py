"""After an update went wrong: doing what the watchdog says, skipped updates written down, and the way back.

In: a loop after an update, and its result. Out: the loop as it goes on: where it was, or at an earlier checkpoint and
with other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onecard import console
from onecard.errors import OnecardError
from onecard.train import changes, checkpoint, state
from onecard.train.watchdog import Action

if TYPE_CHECKING:
    from onecard.train.loop import Loop, UpdateResult


def judge(loop: Loop, result: UpdateResult, update_seconds: float) -> Action:
    """Do what the watchdog says after an update: nothing, or go back. OnecardError where it gives up."""
    # What is as it was when the trouble began is not worth going back to.
    good = loop.step - max(1, loop.watchdog.skips_in_a_row + result.skipped)
    if result.skipped:
        loop.skipped += 1
        rows = loop.order.rows_of_update(loop.taken - 1)
        loop.log.event("skip", step=loop.step, loss=str(result.loss), grad_norm=str(result.grad_norm), rows=rows)
        # Inside backward the weights whose gradients came before the fault have been stepped already.
        kept = "All weights are finite" if loop.optimizers.in_backward else "Weights are unchanged"
        console.warn(f"Update {loop.step} is skipped: its loss or gradient is not finite. {kept}.")
    action, findings = loop.watchdog.after_update(result.loss, result.grad_norm, skipped=result.skipped)
    if action is not Action.GIVE_UP:
        loop.say(findings)
    if action is Action.ROLL_BACK:
        return _roll_back(loop, before=good)
    if action is Action.GIVE_UP:
        loop.record(result, None, update_seconds)
        loop.save()
        raise OnecardError(
            f"The run gives up after update {loop.step}: {findings[-1].text} Its weights are finite and saved.",
            f"Look at the rows named in {loop.run_directory / 'events.jsonl'}; begin anew with a lower "
            "learning_rate, or run the same command again to go on after them.",
        )
    return action


def _roll_back(loop: Loop, *, before: int) -> Action:
    """Go back to the newest whole checkpoint before an update, and on with the rows after those that failed.

    Without a checkpoint the weights stay as they are, which skipped updates have not changed.
    The checkpoint is written again with that place in the data, so that a resumed run does not meet them either.
    """
    loop.saver.finish()
    newest = checkpoint.newest_whole(loop.run_directory, before=before)
    if newest is None:
        return Action.GO_ON
    failed, order, taken, count = loop.step, loop.order, loop.taken, loop.watchdog.roll_backs
    state.restore(loop, newest[1])
    loop.close()
    loop.order, loop.taken, loop.watchdog.roll_backs = order, taken, count
    loop.log.cut_after(loop.step)
    rates = {}
    if loop.settings.roll_back_learning_rate_factor < 1:
        for name, peak in loop.optimizers.peaks().items():
            rates[name] = peak * loop.settings.roll_back_learning_rate_factor
            changes.make(loop, name, rates[name])
    loop.log.event("rollback", step=loop.step, failed=failed, **rates)
    console.warn(f"The run goes back from update {failed} to {loop.step} and on with other rows.")
    checkpoint.forget_after(loop.run_directory, loop.step)
    loop.saver.reach(loop.step)
    loop.save()
    return Action.ROLL_BACK
