"""The verbs `find-lr pretrain` and `find-lr finetune`: which peak learning rate a run should have, tried on its rows.

In: the settings of the run that is meant. Out: a directory with report.html (the curves, the suggestion, its reason)
and find_lr.json; nothing else is written, and weights and generators are put back as they were. Updates are those of
the one loop. Knows no more than so many updates can tell: what a rate does in a long run is another question.

range       the rate grows exponentially over the updates, until the loss bursts (Smith 2017, arXiv:1506.01186)
short_runs  a few rates, each for so many updates from the same start
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import FindFinetuneRateConfig, FindPretrainRateConfig
from onecard.report import Page
from onecard.train.loop import Loop
from onecard.train.schedule import Schedule
from onecard.train.session import rehearsal
from onecard.train.status import trend
from onecard.train.task import Task
from onecard.train.timing import left_as_found

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Config = FindPretrainRateConfig | FindFinetuneRateConfig
# The range reaches so far around what the run would take by itself.
BELOW, ABOVE = 1e-3, 1e2
# The candidates of short runs, as multiples of it.
CANDIDATES = (0.1, 0.3, 1.0, 3.0, 10.0)
# The loss has burst when its running mean is so many times the lowest.
BURST = 1.25
# Weight of a new loss in the running mean.
FRESH = 0.2


@dataclass(frozen=True)
class Point:
    """One update of the range test: its learning rate, its loss, and the loss averaged over its neighbours."""

    learning_rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class Trial:
    """One short run: its losses, where it ended (held-out rows, else the last quarter) and its slope there.

    The slope is of the second half, in nats a token and a hundred updates; None where the loss burst.
    """

    learning_rate: float
    losses: list[float]
    end: float | None
    slope: float | None


@dataclass(frozen=True)
class Suggestion:
    """A learning rate and why."""

    learning_rate: float
    reason: str


class Rising(Schedule):
    """From `final_ratio` at the first update to `decay_ratio` at the last, by equal factors."""

    def factor(self, update: int) -> float:
        """The factor for update 0, 1, ... max_steps - 1."""
        lowest, highest = self.final_ratio, self.decay_ratio
        return float(lowest * (highest / lowest) ** (update / max(1, self.max_steps - 1)))


# --- the verbs ----------------------------------------------------------------------------------------------------


def pretrain(config: FindPretrainRateConfig) -> dict[str, Any]:
    """Find the learning rate for `onecard pretrain` with these settings."""
    from onecard.train.pretrain import prepare

    return _find(config, "pretrain", lambda scratch: prepare(config.model_copy(update=scratch)))


def finetune(config: FindFinetuneRateConfig) -> dict[str, Any]:
    """Find the learning rate for `onecard finetune` with these settings."""
    from onecard.train.finetune import prepare

    return _find(config, "finetune", lambda scratch: prepare(config.model_copy(update=scratch)))


def _find(config: Config, verb: str, prepare: Callable[[dict[str, Any]], Task]) -> dict[str, Any]:
    with artifact.new_directory(config.output, replace=config.overwrite) as temporary:
        scratch = temporary / "scratch"
        task = prepare({"output": scratch, "overwrite": False})
        model, plan, make_loop = rehearsal(task)
        peak = float(plan["learning_rate"])
        found: Suggestion
        shown: dict[str, Sequence[Any]]
        with left_as_found(model):
            if config.method == "range":
                points = range_test(make_loop, config, peak)
                found, shown = suggest(points, burst=len(points) < config.updates), {"points": points}
            else:
                trials = short_runs(make_loop, model, config, peak)
                found, shown = compare(trials), {"trials": trials}
        factor = found.learning_rate / peak
        document = {
            "output": str(config.output),
            "verb": verb,
            "method": config.method,
            "optimizer": plan["optimizer"],
            "learning_rate": found.learning_rate,
            "reason": found.reason,
            "planned_learning_rate": peak,
        }
        if plan["optimizer"] == "muon":  # both rates were moved together
            document["muon_learning_rate"] = _rounded(factor * plan["muon_learning_rate"])
        written = {**document, **{name: [asdict(one) for one in many] for name, many in shown.items()}}
        artifact.write_json_atomically(temporary / "find_lr.json", json.loads(json.dumps(written, default=str)))
        _report(temporary, verb, config, document, shown)
        del task, make_loop, model
        shutil.rmtree(scratch)
        artifact.write_manifest(temporary, "find_lr", settings=config.plain(), result=document)
    _show(verb, config, document)
    return written


# --- the range test -----------------------------------------------------------------------------------------------


def range_test(make_loop: Callable[..., Loop], config: Config, peak: float) -> list[Point]:
    """Updates whose rate grows from the lowest to the highest; ends early where the loss bursts."""
    lowest = BELOW * peak if config.lowest_learning_rate == "auto" else config.lowest_learning_rate
    highest = ABOVE * peak if config.highest_learning_rate == "auto" else config.highest_learning_rate
    loop = make_loop(max_steps=config.updates)
    loop.schedule = Rising("rising", config.updates, 0.0, highest / peak, lowest / peak)
    losses = _updates(loop, config.updates, "learning rate rises", from_the_first=False)
    rates = [peak * loop.schedule.factor(update) for update in range(len(losses))]
    return [Point(*values) for values in zip(rates, losses, smooth(losses))]


def _updates(loop: Loop, count: int, description: str, *, from_the_first: bool) -> list[float]:
    """The losses of `count` updates of the loop, or of those before the loss bursts."""
    losses: list[float] = []
    mean = lowest = math.inf
    try:
        with console.progress(description, count, "updates") as bar:
            for number in range(count):
                result = loop.update(number)
                loop.step += 1
                if result.skipped:  # no number any more
                    break
                mean = result.loss if not losses else mean + FRESH * (result.loss - mean)
                lowest = min(lowest, losses[0] if from_the_first and losses else mean, mean)
                losses.append(result.loss)
                bar.advance(1, f"loss {result.loss:.3f}")
                if number >= 10 and mean > BURST * lowest:
                    break
    finally:
        loop.close()
        loop.optimizers.close()
    return losses


def smooth(losses: Sequence[float], sigma: float = 2.0) -> list[float]:
    """Each loss averaged with its neighbours, by Gaussian weights `sigma` updates wide: no lag as of a running mean."""
    reach = math.ceil(3 * sigma)
    weights = {offset: math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-reach, reach + 1)}
    made = []
    for index in range(len(losses)):
        near = {o: w for o, w in weights.items() if 0 <= index + o < len(losses)}
        made.append(sum(w * losses[index + o] for o, w in near.items()) / sum(near.values()))
    return made


def suggest(points: Sequence[Point], *, burst: bool) -> Suggestion:
    """Where the loss falls fastest, kept between a tenth and a third of the rate at which it is lowest."""
    lowest = min(range(len(points)), key=lambda index: points[index].smoothed)
    best = points[lowest]
    if lowest < 3:
        return Suggestion(
            _rounded(points[0].learning_rate / 3),
            "The loss rises from the first rate on: all of them are too high. Try again with a lower "
            "lowest_learning_rate; until then take less than the lowest tried.",
        )
    falls = [
        (points[i + 1].smoothed - points[i - 1].smoothed)
        / math.log(points[i + 1].learning_rate / points[i - 1].learning_rate)
        for i in range(1, lowest)
    ]
    steepest = points[1 + min(range(len(falls)), key=falls.__getitem__)].learning_rate
    rate = _rounded(min(max(steepest, best.learning_rate / 10), best.learning_rate / 3))
    reason = (
        f"The loss falls fastest at {steepest:.2g} and is lowest at {best.learning_rate:.2g}. The suggestion is the "
        "first, kept between a tenth and a third of the second: a whole run must be stable at it, not one update."
    )
    if not burst and lowest >= len(points) - 3:
        reason += " The loss still fell at the highest rate: a higher highest_learning_rate may show more."
    return Suggestion(rate, reason)


def _rounded(value: float) -> float:
    """Two significant digits: it is no more exact than that."""
    return float(f"{value:.2g}")


# --- short runs ---------------------------------------------------------------------------------------------------


def short_runs(make_loop: Callable[..., Loop], model: Any, config: Config, peak: float) -> list[Trial]:
    """Each candidate for so many updates from the same weights, rows and random numbers: a warm-up, then constant."""
    rates = sorted(config.candidates) or [_rounded(peak * factor) for factor in CANDIDATES]
    trials = []
    for rate in rates:
        with left_as_found(model):
            loop = make_loop(max_steps=config.updates)
            loop.schedule = Schedule("wsd", config.updates, 0.1, 0.0, 0.0)
            for name, value in loop.optimizers.peaks().items():
                loop.optimizers.change(name, value * rate / peak)
            losses = _updates(loop, config.updates, f"learning rate {rate:.2g}", from_the_first=True)
            whole = len(losses) == config.updates
            held_out = loop.evaluate() if whole else None
        trials.append(_trial(rate, losses, held_out, whole=whole))
    return trials


def _trial(rate: float, losses: list[float], held_out: float | None, *, whole: bool) -> Trial:
    if not whole:
        return Trial(rate, losses, None, None)
    end = held_out if held_out is not None else statistics.fmean(losses[-max(1, len(losses) // 4) :])
    half = len(losses) // 2
    slope = trend(list(enumerate(losses))[half:])
    return Trial(rate, losses, end, None if slope is None else slope["per_hundred_updates"])


def compare(trials: Sequence[Trial]) -> Suggestion:
    """The rate with the lowest loss at the end; the slope says whether it is still on its way."""
    whole = [trial for trial in trials if trial.end is not None]
    if not whole:
        return Suggestion(
            _rounded(trials[0].learning_rate / 10), "The loss bursts at each of these rates: try lower ones."
        )
    best = min(whole, key=lambda trial: trial.end or 0.0)
    reason = f"It has the lowest loss after {len(best.losses)} updates ({best.end:.3f})"
    if best.slope is not None:
        moves = "falling" if best.slope < 0 else "rising"
        reason += f", {moves} by {abs(best.slope):.2g} in 100 updates"
    others = [trial for trial in whole if trial is not best]
    if others:
        second = min(others, key=lambda trial: trial.end or 0.0)
        reason += f"; the next is {second.learning_rate:.2g} ({second.end:.3f})"
    reason += "."
    if best is trials[0] or best is trials[-1]:
        reason += f" It is the {'lowest' if best is trials[0] else 'highest'} that was tried: try some beyond it."
    return Suggestion(best.learning_rate, reason)


# --- for a person -------------------------------------------------------------------------------------------------


def _command(verb: str, document: dict[str, Any]) -> str:
    words = f"onecard {verb} ... --learning-rate {document['learning_rate']:g}"
    if "muon_learning_rate" in document:
        words += f" --muon-learning-rate {document['muon_learning_rate']:g}"
    return words


def _show(verb: str, config: Config, document: dict[str, Any]) -> None:
    rows = [["learning rate", f"{document['learning_rate']:.2g}"]]
    if "muon_learning_rate" in document:
        rows.append(["of the matrices (muon)", f"{document['muon_learning_rate']:.2g}"])
    rows += [["what auto would take", f"{document['planned_learning_rate']:.2g}"], ["why", document["reason"]]]
    console.table(f"find-lr {verb}: {config.output}", ["", ""], rows)
    console.result(f"Take it:  {_command(verb, document)}")
    console.result(f"Report:   {config.output / 'report.html'}")


def _report(
    directory: Path, verb: str, config: Config, document: dict[str, Any], shown: dict[str, Sequence[Any]]
) -> None:
    page = Page(f"A learning rate for {verb}", f"{config.updates} updates, {document['optimizer']}, {config.method}")
    facts = {"suggested learning rate": document["learning_rate"]}
    if "muon_learning_rate" in document:
        facts["of the matrices (muon)"] = document["muon_learning_rate"]
    page.facts(facts | {"what auto would take": document["planned_learning_rate"]})
    page.paragraph(document["reason"])
    page.sample(_command(verb, document))
    if "points" in shown:
        page.heading("Loss over learning rate")
        page.figure(
            lambda axes: _draw_range(axes, shown["points"], document["learning_rate"]),
            "Cross-entropy in nats a token while the rate grows; the line marks the suggestion.",
        )
    else:
        page.heading("Short runs")
        page.figure(
            lambda axes: _draw_trials(axes, shown["trials"]), "Cross-entropy in nats a token, averaged over neighbours."
        )
        page.table(
            ["learning rate", "loss at the end", "slope there (100 updates)"],
            [
                [f"{t.learning_rate:.2g}", "burst" if t.end is None else f"{t.end:.3f}", _slope(t.slope)]
                for t in shown["trials"]
            ],
        )
    page.save(directory / "report.html")


def _slope(slope: float | None) -> str:
    return "" if slope is None else f"{slope:+.2g}"


def _draw_range(axes: Axes, points: Sequence[Point], suggested: float) -> None:
    rates = [point.learning_rate for point in points]
    axes.plot(rates, [point.loss for point in points], color="#b7c6ea", linewidth=0.8, label="update")
    axes.plot(rates, [point.smoothed for point in points], color="#2f5fd0", linewidth=1.6, label="smoothed")
    axes.axvline(suggested, color="#18794e", linestyle="--", linewidth=1.2, label=f"suggested {suggested:.2g}")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # pages take no formulas
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss (nats/token)")
    axes.legend(frameon=False)


def _draw_trials(axes: Axes, trials: Sequence[Trial]) -> None:
    for trial in trials:
        axes.plot(smooth(trial.losses), linewidth=1.4, label=f"{trial.learning_rate:.2g}")
    axes.set_xlabel("update")
    axes.set_ylabel("loss (nats/token)")
    axes.legend(frameon=False)
