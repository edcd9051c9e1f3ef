"""report.html of a training run: how the loss fell, what was planned and what was measured, what the model wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard.console import format_bytes, format_duration
from onecard.report import Page
from onecard.train import chat_rows
from onecard.train.directory import changes, shown
from onecard.train.foresight import predicted_text
from onecard.train.metrics import RunLog, read_lines
from onecard.train.vitals import energy_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write(run: Path, verb: str, plan: dict[str, Any], result: dict[str, Any]) -> None:
    """Write `run`/report.html from the run's own files."""
    log = RunLog(run)
    rows = log.metrics()
    changed = sorted([*plan.get("amended", []), *changes(run)], key=lambda entry: int(entry["step"]))
    shape = f"{plan['parameters'] / 1e6:.1f}M parameters, {plan['optimizer']}, {plan['precision']}"
    preferences = any("margin" in row for row in rows)
    page = Page(f"{verb}: {run.name}", shape)
    page.facts(
        {
            f"loss on held-out rows{'' if preferences else ' (nats a token)'}": result["held_out_loss"]
            if result["held_out_loss"]
            else "none",
            "updates": result["updates"],
            "tokens": result["tokens"],
            "tokens/s": round(result["tokens_per_second"]),
            "time": format_duration(result["seconds"]),
            "peak memory": format_bytes(result["peak_memory_bytes"]),
            **({} if result.get("energy_kwh") is None else {"energy of the card": energy_text(result)}),
        }
    )
    page.heading("Loss")
    page.figure(
        lambda axes: _draw_loss(axes, rows, changed),
        f"{'Loss of the preferences' if preferences else 'Cross-entropy in nats a token'}: each update, its running "
        "mean, held-out rows"
        f"{'; what was changed on the way' if changed else ''}.",
    )
    if preferences:
        page.figure(
            lambda axes: _draw_rewards(axes, rows),
            "Rewards: how far the model has moved towards the chosen and the rejected answers, each mean of an update "
            "and of the held-out rows (markers). A margin that grows while both fall is the rule; both far below 0 say "
            "that the model unlearns to answer at all.",
        )
        page.table(
            ["", *(f"update {row['step']:,}" for row in (rows[0], rows[-1]))],
            [
                [label, *(f"{row[key]:,.3f}" if key in row else "" for row in (rows[0], rows[-1]))]
                for key, label in _PREFERENCES.items()
                if any(key in row for row in (rows[0], rows[-1]))
            ],
        )
    if changed:
        page.heading("Changed on the way")
        page.table(
            ["after update", "setting", "from", "to", "by", "when"],
            [[e["step"], e["name"], shown(e.get("old", "?")), shown(e["new"]), e["who"], e["time"]] for e in changed],
        )
    page.heading("Plan and measurement")
    page.table(
        ["", "planned", "measured"],
        [
            ["time", format_duration(plan["predicted_seconds"]), format_duration(result["seconds"])],
            ["tokens a second", f"{plan['predicted_tokens_per_second']:,.0f}", f"{result['tokens_per_second']:,.0f}"],
            ["updates", f"{plan['max_steps']:,}", f"{result['updates']:,}"],
            ["peak memory", predicted_text(plan), format_bytes(result["peak_memory_bytes"])],
            ["updates skipped", "0", f"{result['skipped']:,}"],
        ],
    )
    page.figure(lambda axes: _draw_rates(axes, rows), "Learning rate over the run.", height=1.8)
    _write_sensors(page, run, rows, result)
    if (run / chat_rows.LOOK).is_file():
        chat_rows.on_page(page, json.loads((run / chat_rows.LOOK).read_text(encoding="utf-8")))
    samples = log.samples()
    if samples:
        page.heading("What it wrote, update by update")
        for prompt in dict.fromkeys(row["prompt"] for row in samples):
            page.paragraph(prompt)
            for row in [row for row in samples if row["prompt"] == prompt]:
                page.sample(row["text"], f"after update {row['step']:,}")
    page.heading("Settings")
    settings = {**plan.get("asked", {}), **plan}
    hidden = ("asked", "fingerprint", "free", "amended", "working_directory")
    page.table(["setting", "value"], [[key, str(settings[key])] for key in sorted(settings) if key not in hidden])
    page.save(run / "report.html")


def _write_sensors(page: Page, run: Path, rows: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Heat and power over time, waiting, and what kept the card from its work; nothing where nothing is known."""
    known = [row for row in rows if "card_celsius" in row or "card_watts" in row]
    events = read_lines(run / "events.jsonl")
    found = [f"Update {row['step']:,}: {row['what']}" for row in events if row["event"] == "under_use"]
    cooling = result.get("cooling_seconds") or 0
    if not known and not found and not cooling:
        return
    page.heading("Heat and power")
    if known:
        page.figure(
            lambda axes: _draw_heat(axes, known),
            "Temperature of the card (its highest between two lines of metrics.jsonl) and its power (mean).",
        )
    if cooling:
        page.paragraph(f"The run waited {format_duration(cooling)} for the card to cool, beside the time above.")
    for text in found:
        page.paragraph(text)


def _draw_heat(axes: Axes, rows: list[dict[str, Any]]) -> None:
    lines = []
    for name, label, color in (
        ("card_celsius", "card", "#b54708"),
        ("card_memory_celsius", "its memory", "#e0a070"),
    ):
        points = [(row["seconds"] / 60, row[name]) for row in rows if name in row]
        if points:
            lines += axes.plot(*zip(*points), color=color, linewidth=1.4, label=label)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("°C")
    points = [(row["seconds"] / 60, row["card_watts"]) for row in rows if "card_watts" in row]
    if points:
        watts = axes.twinx()
        watts.spines["top"].set_visible(False)
        lines += watts.plot(*zip(*points), color="#8fa9e8", linewidth=1.0, label="power")
        watts.set_ylabel("W")
        watts.set_ylim(bottom=0)
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")


def _draw_loss(axes: Axes, rows: list[dict[str, Any]], changed: list[dict[str, Any]]) -> None:
    points = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    if points:
        steps, losses = zip(*points)
        axes.plot(steps, losses, color="#b7c6ea", linewidth=0.8, label="update")
        smooth, mean = [], losses[0]
        for value in losses:
            mean += (value - mean) * 0.1
            smooth.append(mean)
        axes.plot(steps, smooth, color="#2f5fd0", linewidth=1.6, label="running mean")
    held = [(row["step"], row["held_out_loss"]) for row in rows if row.get("held_out_loss") is not None]
    if held:
        axes.plot(*zip(*held), color="#b54708", marker="o", markersize=4, linewidth=1.2, label="held out")
    for step in sorted({entry["step"] for entry in changed}):
        words = [f" {entry['name']} = {shown(entry['new'])}" for entry in changed if entry["step"] == step]
        axes.axvline(step + 0.5, color="#98a2b3", linestyle=":", linewidth=1.2)
        axes.annotate(
            "\n".join(words),
            (step + 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            fontsize=8,
            color="#667085",
        )
    axes.set_xlabel("update")
    axes.set_ylabel("loss" if any("margin" in row for row in rows) else "loss (nats/token)")
    axes.legend(frameon=False)


_PREFERENCES = {
    "accuracy": "chosen answer ahead (share)",
    "margin": "margin of the rewards",
    "reward_chosen": "reward of the chosen",
    "reward_rejected": "reward of the rejected",
    "logp_chosen": "log-probability of the chosen",
    "logp_rejected": "log-probability of the rejected",
    "length_chosen": "tokens of the chosen",
    "length_rejected": "tokens of the rejected",
    "held_out_accuracy": "chosen answer ahead, held-out rows",
    "held_out_margin": "margin, held-out rows",
}


def _draw_rewards(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for name, label, color in (("chosen", "chosen", "#18794e"), ("rejected", "rejected", "#b54708")):
        points = [(row["step"], row[f"reward_{name}"]) for row in rows if f"reward_{name}" in row]
        if points:
            axes.plot(*zip(*points), color=color, linewidth=1.2, label=label)
        held = [(row["step"], row[f"held_out_reward_{name}"]) for row in rows if f"held_out_reward_{name}" in row]
        if held:
            axes.plot(*zip(*held), color=color, marker="o", markersize=4, linewidth=0)
    axes.axhline(0, color="#98a2b3", linewidth=0.8)
    axes.set_xlabel("update")
    axes.set_ylabel("reward")
    axes.legend(frameon=False)


def _draw_rates(axes: Axes, rows: list[dict[str, Any]]) -> None:
    axes.plot([row["step"] for row in rows], [row["lr"] for row in rows], color="#18794e", linewidth=1.4)
    axes.set_xlabel("update")
    axes.set_ylabel("learning rate")
