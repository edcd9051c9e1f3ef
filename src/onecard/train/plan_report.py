"""How a plan is told: tables and sentences in the terminal, and report.html with the picture over the update.

In: a `Planned`. Out: text and a page. Knows no prediction; what is not measured is said to be predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.console import format_bytes, format_duration
from onecard.plan.job import KINDS, Job, Moment
from onecard.plan.shape import shape_of
from onecard.plan.speed import energy
from onecard.plan.targets import notes
from onecard.report import Page
from onecard.train import relief
from onecard.train.planned import Planned, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 1 << 30
COLORS = {
    "parameters": "#2f5fd0",
    "gradients": "#8fa9e8",
    "optimizer": "#18794e",
    "activations": "#e0a070",
    "logits": "#b54708",
    "workspace": "#98a2b3",
}
MOST_SAVINGS, MOST_TENSORS = 3, 3
# Parts of the update that are narrower in the picture stay without a name.
LEAST_LABELLED = 0.08
Table = tuple[list[str], list[list[Any]]]


def show(made: Planned, price: float | None, currency: str) -> None:
    """Tell it in the terminal."""
    console.table(f"Memory: {title(made)}", *memory_table(made))
    console.table("Time", *time_table(made, price, currency))
    console.result(f"Settings: {in_words(told(made.chosen.job))}.")
    console.result()
    if made.alternatives:
        console.table("What else would do", *alternatives_table(made))
    for sentence in sentences(made):
        console.result(sentence)


def title(made: Planned) -> str:
    """What is planned on what."""
    job = made.chosen.job
    parameters = shape_of(job.model).parameters
    rows = f"{job.batch_size} x {job.max_length:,}"
    many = f", {job.gradient_accumulation_steps} times an update" if job.gradient_accumulation_steps > 1 else ""
    size = f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
    return f"{made.subject.name} ({size} parameters), {rows} tokens{many}, on {made.target.name}"


def memory_table(made: Planned) -> Table:
    """By kind at the peak, then what comes on top, and what there is."""
    memory, capacity = made.chosen.memory, made.target.capacity_bytes
    rows = [(kind, memory.breakdown[kind]) for kind in KINDS if memory.breakdown.get(kind)]
    rows += [
        ("all tensors at the peak", memory.peak_allocated_bytes),
        ("kept by the allocator on top", memory.peak_reserved_bytes - memory.peak_allocated_bytes),
        ("driver and libraries", memory.context_bytes),
        ("needed", memory.needed_bytes),
        ("capacity", capacity),
        ("stays free" if made.fits else "missing", abs(capacity - memory.needed_bytes)),
    ]
    return ["at the peak", "", "of the capacity"], [
        [name, format_bytes(size), f"{size / capacity:.0%}"] for name, size in rows
    ]


def time_table(made: Planned, price: float | None, currency: str) -> Table:
    """What is expected, and between which bounds."""
    speed, seconds = made.chosen.speed, made.seconds
    factor = speed.uncertainty
    rate = speed.tokens_per_second
    rows = [
        ["tokens a second", f"{rate:,.0f}", f"{rate / factor:,.0f} to {rate * factor:,.0f}"],
        ["an update", _short(speed.seconds_per_update), _between(speed.seconds_per_update, factor)],
    ]
    if seconds is not None:
        tokens = made.tokens or 0
        limited = made.subject.limit_seconds is not None and tokens != made.subject.tokens
        source = "the time given" if limited else made.subject.tokens_from
        rows.append([f"{tokens:,.0f} tokens ({source})", format_duration(seconds), _between(seconds, factor)])
        taken = energy(speed, seconds, price)
        if taken.kwh is not None:
            rows.append(["energy of the card", f"{taken.kwh:,.2f} kWh", ""])
        if taken.cost is not None:
            rows.append(["its price", f"{taken.cost:,.2f} {currency}".strip(), ""])
    return ["", "expected", "between"], rows


def _between(seconds: float, factor: float) -> str:
    return f"{_short(seconds / factor)} to {_short(seconds * factor)}"


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.95 else format_duration(seconds)


def alternatives_table(made: Planned) -> Table:
    """Other settings beside the chosen ones: what differs, and what they take."""
    rows = [
        [
            in_words(relief.differing(made.chosen.job, other.job)),
            format_bytes(other.memory.needed_bytes),
            format_bytes(other.margin_bytes),
            f"{other.speed.tokens_per_second:,.0f}",
        ]
        for other in made.alternatives
    ]
    return ["instead", "needed", "stays free", "tokens/s"], rows


def sentences(made: Planned) -> list[str]:
    """What a table cannot say: where the peak is, what would lower it, and how sure all of it is."""
    said = []
    largest = made.chosen.memory.largest[:MOST_TENSORS]
    if made.peak_place:
        tensors = ", ".join(f"{name}: {format_bytes(size)}" for name, size in largest)
        said.append(
            f"The most is held in: {made.peak_place}." + (f" Its largest tensors: {tensors}." if tensors else "")
        )
    if made.savings:
        said.append(
            "What would lower it: "
            + "; ".join(
                f"{saving.words} by {format_bytes(saving.saved_bytes)}, at {saving.time_factor:.2f} times the time"
                for saving in made.savings[:MOST_SAVINGS]
            )
            + "."
        )
    if made.thin:
        said.append("That is a thin margin: the prediction may be off by more. An alternative with more room is safer.")
    if made.seconds is None:
        said.append("How long the whole training takes depends on its text: say so with --tokens, such as 2e9.")
    said.append(
        "Rates were measured on this machine."
        if made.chosen.speed.measured
        else f"Predicted from what is published of the {made.target.name}; onecard has not been measured on one."
    )
    return said + notes(made.target)


# What is told of settings only where it is not so.
_PLAIN = {
    "optimizer_states": "fp32",
    "optimizer_in_backward": False,
    "gradients": "fp32",
    "packed": True,
    "activation_checkpointing": "none",
    "activation_offload": False,
    "activation_compression": "none",
    "target_modules": (),
}


def told(job: Job) -> dict[str, Any]:
    """The settings of a job, less those that are as they always are."""
    settings = settings_of(job)
    return {name: value for name, value in settings.items() if name not in _PLAIN or value != _PLAIN[name]}


def in_words(settings: dict[str, Any]) -> str:
    """name = value, name = value: as one writes them in a recipe."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(value) + "]" if isinstance(value, tuple) else str(value)


# --- the page -----------------------------------------------------------------------------------------------------


def page(plans: list[Planned], price: float | None, currency: str) -> Page:
    """One section a plan."""
    names = ", ".join(made.subject.name for made in plans)
    verdict = "It fits" if all(made.fits for made in plans) else "It does not fit"
    made_page = Page(f"Plan: {names}", f"{verdict} on {plans[0].target.name}.")
    for made in plans:
        _section(made_page, made, price, currency)
    return made_page


def _section(into: Page, made: Planned, price: float | None, currency: str) -> None:
    memory, speed = made.chosen.memory, made.chosen.speed
    into.heading(title(made))
    facts = {
        "needed": format_bytes(memory.needed_bytes),
        "stays free" if made.fits else "missing": format_bytes(abs(made.chosen.margin_bytes)),
        "tokens a second": f"{speed.tokens_per_second:,.0f}",
    }
    if made.seconds is not None:
        facts["whole training"] = format_duration(made.seconds)
    into.facts(facts)
    if memory.moments:
        into.figure(
            lambda axes: draw(
                axes, memory.moments, made.target.capacity_bytes - memory.context_bytes, made.target.name
            ),
            "What tensors hold over one update, by kind, in the order in which it happens; the line is what the "
            "driver leaves of the card for them.",
            height=3.8,
        )
    into.table(*memory_table(made), caption="Memory of the device, when most of it is held.")
    into.table(
        *time_table(made, price, currency), caption="Time and energy, with the range in which they are expected."
    )
    if made.alternatives:
        into.table(*alternatives_table(made), caption="Other settings that would do.")
    for sentence in sentences(made):
        into.paragraph(sentence)
    into.table(["setting", "value"], [[name, _value(value)] for name, value in settings_of(made.chosen.job).items()])


def draw(axes: Axes, moments: tuple[Moment, ...], limit_bytes: int, name: str) -> None:
    """Stacked areas by kind, the limit, the peak, and where forward, backward and so on begin."""
    kinds = [kind for kind in KINDS if any(moment.bytes.get(kind) for moment in moments)]
    steps = range(len(moments))
    axes.stackplot(
        steps,
        [[moment.bytes.get(kind, 0) / GIB for moment in moments] for kind in kinds],
        labels=kinds,
        colors=[COLORS[kind] for kind in kinds],
        linewidth=0,
    )
    axes.axhline(limit_bytes / GIB, color="#b42318", linewidth=1.2, linestyle="--")
    axes.annotate(f"  {name}", (0, limit_bytes / GIB), va="top", fontsize=8, color="#b42318")
    highest = max(steps, key=lambda step: moments[step].total_bytes)
    top = moments[highest].total_bytes / GIB
    axes.plot([highest], [top], marker="v", color="#1d2330", markersize=5)
    right = highest > len(moments) / 2
    axes.annotate(
        f" {moments[highest].place} ",
        (highest, top),
        va="bottom",
        ha="right" if right else "left",
        fontsize=8,
        color="#1d2330",
    )
    starts = phase_starts(moments)
    for step, following in zip(starts, [*starts[1:], len(moments)]):
        axes.axvline(step, color="#98a2b3", linestyle=":", linewidth=0.9)
        if following - step >= LEAST_LABELLED * len(moments):
            axes.annotate(
                f" {phase(moments[step])}",
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                va="top",
                fontsize=8,
                color="#667085",
            )
    axes.set_xlim(0, max(1, len(moments) - 1))
    axes.set_ylim(0, 1.15 * max(limit_bytes / GIB, top))
    axes.set_xticks([])
    axes.set_ylabel("GiB")
    axes.legend(frameon=False, ncols=len(kinds), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.02))


def phase(moment: Moment) -> str:
    """The part of the update that a moment belongs to: "backward" of "backward, layer 7"."""
    return moment.place.partition(",")[0]


def phase_starts(moments: tuple[Moment, ...]) -> list[int]:
    """Where each part of the update begins."""
    return [step for step in range(len(moments)) if step == 0 or phase(moments[step]) != phase(moments[step - 1])]
