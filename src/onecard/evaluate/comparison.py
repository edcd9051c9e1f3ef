"""What a comparison found, for a person: a verdict in words, intervals as a picture, answers side by side.

In: the dictionary that `compare` writes as report.json. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.data.preview import spread
from onecard.report import Page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWER_IS_BETTER = ("loss", "repetition")
KNOWN = (
    "The models learned from all of these rows: what stands here is what they know by heart, not what they would say "
    "to new questions."
)
_NAMES = {
    "loss": "answers' loss",
    "exact_match": "exact match",
    "f1": "F1 (ROUGE-1)",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
    "chrf": "chrF",
    "stopped": "answers that end by themselves",
    "repetition": "repeated 4-grams",
    "checks": "checks of form passed",
    "choices_sum": "multiple choice, whole answer",
    "choices_token": "multiple choice, by token",
    "choices_character": "multiple choice, by character",
    "choices_byte": "multiple choice, by byte",
}
_COLOURS = {"better": "#18794e", "worse": "#b42318", "undecided": "#667085", "too_few_rows": "#c3c9d5"}
_SAMPLES_ON_PAGE = 12
_SAMPLES_ON_CONSOLE = 3
_CONSOLE_CHARACTERS = 60

Measures = Mapping[str, Mapping[str, Any]]


def name_of(measure: str) -> str:
    """What a measure is called."""
    if measure.startswith("text_"):
        language = measure.removeprefix("text_")
        return "general text" if language == "all" else f"general text, {language}"
    return _NAMES[measure]


def verdict(measures: Measures, *, learned_before: bool) -> list[str]:
    """Plain sentences: which measures went which way and by how much, then those of which nothing can be told."""
    decided = [_sentence(name, found) for name, found in measures.items() if found["verdict"] in ("better", "worse")]
    return [*([KNOWN] if learned_before else []), *decided, *_untold(measures)]


def _sentence(name: str, found: Mapping[str, Any]) -> str:
    sign = -1 if found["difference"] < 0 else 1
    low, high = sorted((sign * found["low"], sign * found["high"]))
    by = f"{_amount(found, abs(found['difference']))} [{_amount(found, low)}, {_amount(found, high)}] {_unit(found)}"
    forgotten = ": so much was forgotten" if name.startswith("text_") and found["verdict"] == "worse" else ""
    from_to = f"{_value(found, 'base')} -> {_value(found, 'model')}"
    return f"{found['verdict']} on {name_of(name)} by {by} ({from_to}; {_rows(name, found['rows'])}){forgotten}."


def _untold(measures: Measures) -> list[str]:
    """A sentence for all measures on the same number of rows that show no difference, or have too few rows."""
    sentences: dict[str, list[str]] = {}
    for name, found in measures.items():
        counted = _rows(name, found["rows"])
        if found["verdict"] == "undecided":
            sentences.setdefault(f"no difference can be told from {counted}.", []).append(name_of(name))
        elif found["verdict"] == "too_few_rows":
            sentences.setdefault(f"{counted} are too few to tell.", []).append(name_of(name))
    return [f"{', '.join(names)}: {what}" for what, names in sentences.items()]


def _rows(name: str, count: int) -> str:
    kind = "piece of text" if name.startswith("text_") else "row"
    return f"{count:,} {kind if count == 1 else kind.replace('piece', 'pieces') if 'piece' in kind else 'rows'}"


def _unit(found: Mapping[str, Any]) -> str:
    if found["unit"] == "share":
        return "points"
    return str(found["unit"]).replace("bits a byte", "bits per byte")


def _amount(found: Mapping[str, Any], value: float) -> str:
    """A value in the unit of its measure: points of a share, else two or three digits behind the point."""
    if found["unit"] == "share":
        return f"{100 * value:.1f}"
    return f"{value:.3f}" if max(abs(found["low"]), abs(found["high"])) < 0.1 else f"{value:.2f}"


def _value(found: Mapping[str, Any], side: str) -> str:
    value = found[side]
    return f"{100 * value:.1f} %" if found["unit"] == "share" else f"{value:.3f}"


def interval(found: Mapping[str, Any]) -> str:
    """The difference and its interval, such as +1.7 [-1.7, +5.0]."""
    scale, digits = (100, 1) if found["unit"] == "share" else (1, 3)
    # Rounded first: what rounds to nothing has no sign.
    middle, low, high = (
        f"{round(scale * found[key], digits) + 0.0:+.{digits}f}" for key in ("difference", "low", "high")
    )
    return f"{middle} [{low}, {high}]"


def table(measures: Measures) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of all measures."""
    columns = ["", "base", "model", "difference [95 %]", "unit", "rows", "verdict"]
    rows = [
        [
            name_of(name),
            _value(found, "base"),
            _value(found, "model"),
            interval(found),
            _unit(found),
            found["rows"],
            found["verdict"].replace("_", " "),
        ]
        for name, found in measures.items()
    ]
    return columns, rows


def show(report: Mapping[str, Any]) -> None:
    """Print the table, the sentences and a few answers."""
    result = report["result"]
    console.table("Base and model on the same rows", *table(result["measures"]))
    for sentence in result["verdict"]:
        console.result(sentence)
    answers, _ = spread(report["answers"], _SAMPLES_ON_CONSOLE)
    if answers:
        console.result()
        rows = [
            [_short(item["question"]), *(_short(item["answers"][name]["text"]) for name in ("base", "model"))]
            for item in answers
        ]
        console.table("Some answers", ["question", "base", "model"], rows)
    console.result(f"Report: {result['output']}/report.html")


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _CONSOLE_CHARACTERS else flat[: _CONSOLE_CHARACTERS - 1] + "…"


# --- the page -----------------------------------------------------------------------------------------------------


def page(report: Mapping[str, Any]) -> Page:
    """The page for a person."""
    result = report["result"]
    measures: Measures = result["measures"]
    parts = [
        f"{name}: {one['path']}, {one['parameters'] / 1e6:.1f} M parameters" for name, one in report["models"].items()
    ]
    made = Page("Is it better?", "; ".join(parts))
    made.facts(_facts(measures))
    for sentence in result["verdict"]:
        made.paragraph(sentence[:1].upper() + sentence[1:])
    if result["left_out"]:
        made.paragraph(f"{result['left_out']:,} rows of the sources are left out: the models learned from them.")
    made.heading("Differences and how sure they are")
    shares = {name: found for name, found in measures.items() if found["unit"] == "share"}
    costs = {name: found for name, found in measures.items() if found["unit"] != "share"}
    if costs:
        made.figure(
            lambda axes: _draw(axes, costs, 1.0, "nats a token or bits per byte"),
            "Loss of answers and of general text: model - base with its 95 % interval; left of 0 the model is better.",
            height=0.9 + 0.45 * len(costs),
        )
    if shares:
        made.figure(
            lambda axes: _draw(axes, shares, 100.0, "percentage points"),
            "Answers: model - base with its 95 % interval; green: better, red: worse, grey: cannot be told. Right of 0 "
            "is better, but for repetition.",
            height=0.9 + 0.36 * len(shares),
        )
    made.table(*table(measures))
    if report["rows"]:
        _row_section(made, report["rows"])
    if report["answers"]:
        _answer_section(made, report["answers"])
    if report["choices"]:
        _choice_section(made, report["choices"])
    made.heading("How this was measured")
    made.paragraph(
        "Both models see the same rows. The loss is that of all tokens of the answers, the ends of their turns "
        "included, by the mask that fine-tuning learns from: a mean by token over all rows. Where the two cut text "
        "into different tokens it is told in bits per byte of the answers. Answers always take the likeliest token. "
        "F1, ROUGE and BLEU count characters in Chinese and words elsewhere; BLEU and chrF are of the whole set."
    )
    made.paragraph(
        "Intervals: 10,000 paired bootstrap samples of the rows (whole chats, pieces of text), 2.5 to 97.5 %. Better "
        "or worse is said where the interval does not hold 0. One in twenty such intervals misses the truth: where "
        "many measures are looked at, the loss of answers is the one to believe first."
    )
    made.details("Settings", "\n".join(f"{key} = {value}" for key, value in report["settings"].items()))
    return made


def _facts(measures: Measures) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("loss", "f1", "stopped", "choices_byte", "checks", "text_all", *measures):
        if name in measures and len(facts) < 4 and name_of(name) not in facts:
            found = measures[name]
            facts[name_of(name)] = f"{_value(found, 'base')} → {_value(found, 'model')}".replace(" %", "\u00a0%")
    return facts


def _draw(axes: Axes, measures: Measures, scale: float, unit: str) -> None:
    """A point and its interval a measure, the first on top."""
    for place, found in enumerate(measures.values()):
        low, middle, high = (scale * found[key] for key in ("low", "difference", "high"))
        colour = _COLOURS[found["verdict"]]
        axes.plot([low, high], [place, place], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot([middle], [place], color=colour, marker="o", markersize=7)
        axes.annotate(
            interval(found),
            (high, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#667085",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axes.axvline(0, color="#1d2330", linewidth=1)
    axes.set_yticks(range(len(measures)), [name_of(name) for name in measures])
    axes.set_ylim(len(measures) - 0.5, -0.5)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.3 * (right - left))  # room for the numbers
    axes.set_xlabel(f"model - base, {unit}")


def _row_section(made: Page, rows: Sequence[Mapping[str, Any]]) -> None:
    made.heading("Row by row")
    better = sum(row["model"] < row["base"] for row in rows)
    made.figure(
        lambda axes: _draw_rows(axes, rows),
        "Loss of the answers of each row in nats a token: below the line the model is better "
        f"({better:,} of {len(rows):,} rows).",
        height=4.2,
    )
    ordered = sorted(rows, key=lambda row: float(row["model"] - row["base"]))
    ends = ordered if len(ordered) <= 6 else [*ordered[:3], *ordered[-3:]]
    made.table(
        ["row", "question", "base", "model", "difference"],
        [
            [
                f"{row['file'].rsplit('/', 1)[-1]}:{row['line']}",
                row["question"][:200],
                round(row["base"], 2),
                round(row["model"], 2),
                round(row["model"] - row["base"], 2),
            ]
            for row in ends
        ],
        "The rows that gained most, and those that gained least or lost.",
    )


def _draw_rows(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    base, model = [row["base"] for row in rows], [row["model"] for row in rows]
    least, most = min(*base, *model), max(*base, *model)
    axes.plot([least, most], [least, most], color="#98a2b3", linewidth=1)
    axes.scatter(base, model, s=14, color="#2f5fd0", alpha=0.6, linewidths=0)
    axes.set_xlabel("base (nats a token)")
    axes.set_ylabel("model (nats a token)")


def _answer_section(made: Page, answers: Sequence[Mapping[str, Any]]) -> None:
    made.heading("Answers side by side")
    chosen, _ = spread(answers, _SAMPLES_ON_PAGE)
    made.table(
        ["question", "reference", "base", "model"],
        [
            [item["question"], item["reference"], *(_answer(item["answers"][name]) for name in ("base", "model"))]
            for item in chosen
        ],
        "… marks an answer that was cut off at its longest length."
        + (f" {len(chosen)} of {len(answers)}; all stand in report.json." if len(chosen) < len(answers) else ""),
    )


def _answer(answer: Mapping[str, Any]) -> str:
    failed = [name for name, passed in answer.get("checks", {}).items() if not passed]
    ending = "" if answer["finish_reason"] == "stop" else " …"
    return f"{answer['text']}{ending}" + (f"  [fails: {', '.join(failed)}]" if failed else "")


def _choice_section(made: Page, choices: Sequence[Mapping[str, Any]]) -> None:
    made.heading("Multiple choice")
    chosen, _ = spread(choices, _SAMPLES_ON_PAGE)
    rows = [
        [
            item["question"],
            item["choices"][item["right"]],
            *(item["choices"][item["chosen"][name]["byte"]] for name in ("base", "model")),
        ]
        for item in chosen
    ]
    made.table(
        ["question", "right", "base", "model"],
        rows,
        "By log-likelihood: each choice is an answer, and the likeliest by byte of it is what stands here.",
    )
