"""What an evaluation found, for a person: plain sentences, tables on the console, and the page.

In: the dictionary that `evaluate` writes as report.json. It measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.report import Page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bits = Mapping[str, float]
# Below this the difference is not worth a word.
SAME_SHARE = 0.002
CONSOLE_CHARACTERS = 60
BY_HEART = (
    "Most of these questions were in the rows it was fine-tuned on: matches show what it learned by heart, not what it "
    "would say to new ones."
)


def verdict(bits: Mapping[str, Bits], xz: Bits) -> list[str]:
    """Sentences that say what the numbers mean; `bits` by model and language, `xz` by language."""
    if "model" not in bits:
        return []
    sentences = []
    for name in ("base", "model"):
        languages = {language: value for language, value in bits.get(name, {}).items() if language != "all"}
        compared = [language for language in languages if language in xz]
        if compared:
            better = [language for language in compared if languages[language] < xz[language]]
            sentences.append(f"The {name} is {_where_better(better, compared)}.")
    model = {language: value for language, value in bits["model"].items() if language != "all"}
    if "base" in bits:
        parts = [_change(language, model[language], bits["base"][language]) for language in model]
        sentences.append(f"Against the base: {'; '.join(parts)}.")
    return sentences


def _where_better(better: Sequence[str], compared: Sequence[str]) -> str:
    worse = [language for language in compared if language not in better]
    everywhere = {1: compared[0], 2: "both languages"}.get(len(compared), f"all {len(compared)} languages")
    if not worse:
        return f"better than xz in {everywhere}"
    if not better:
        return f"worse than xz in {everywhere}"
    return f"better than xz in {', '.join(better)}, but worse in {', '.join(worse)}"


def _change(language: str, now: float, before: float) -> str:
    share = (now - before) / before if before else 0.0
    if abs(share) < SAME_SHARE:
        return f"{language} is unchanged"
    direction = "worse (so much was forgotten)" if share > 0 else "better"
    return f"{language} is {abs(share):.1%} {direction}"


def language_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of bits per byte by language: xz, base, model."""
    bits, xz = report["result"]["bits_per_byte"], report["result"]["xz"]
    columns = [
        "language",
        "documents",
        "kB",
        *(["xz -9e"] if xz else []),
        *bits,
        *(["change"] if "base" in bits else []),
    ]
    rows = []
    for language, score in _languages(report["models"]["model"]):
        row: list[Any] = [language, score["documents"], round(score["bytes"] / 1000, 1)]
        if xz:
            row.append(_bits(xz[language]) if language in xz else "")
        row += [_bits(bits[name][language]) for name in bits]
        if "base" in bits:
            base = bits["base"][language]
            row.append(f"{(bits['model'][language] - base) / base:+.1%}" if base else "")
        rows.append(row)
    return columns, rows


def _languages(one: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Scores by language; "all" only where it adds something."""
    found = one["languages"]
    return [(language, score) for language, score in found.items() if language != "all" or len(found) > 2]


def _bits(value: float) -> float:
    return round(value, 3)


_SHARES = {
    "exact_match": "exact match",
    "f1": "F1 (ROUGE-1)",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
    "chrf": "chrF",
    "checks": "checks passed",
    "repetition": "repeated 4-grams",
}
"""What is measured of answers, as shares, and how it is called."""


def behaviour_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of how each model answers; what was not measured of any has no column."""
    models = report["models"]
    shown = [key for key in _SHARES if any(one[key] is not None for one in models.values())]
    columns = ["", "stopped by itself", *(_SHARES[key] for key in shown), "longest loop"]
    rows = []
    for name, one in models.items():
        stopped = f"{one['stopped']} of {one['asked']}" if one["asked"] else ""
        loop = "" if one["longest_loop"] is None else str(one["longest_loop"])
        rows.append([name, stopped, *(_percent(one[key]) for key in shown), loop])
    return columns, rows


CHOICES = (
    "By log-likelihood: the choice whose answer is likeliest as a whole (sum), or in the mean by its tokens, its "
    "characters, its bytes."
)


def choice_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the share of right choices, by way of counting; no rows where there were none."""
    found = {name: one["choices"] for name, one in report["models"].items() if one["choices"]}
    ways = list(next(iter(found.values()), {}))
    return ["", *(f"by {way}" for way in ways)], [
        [name, *(_percent(shares[way]) for way in ways)] for name, shares in found.items()
    ]


def harness_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the tasks of lm-evaluation-harness; no rows where there were none."""
    found = report["result"].get("harness", {})
    rows = [
        [task, metric, *(_with_error(one.get(task, {}).get(metric)) for one in found.values())]
        for task, metrics in found.get("model", {}).items()
        for metric in metrics
    ]
    return ["task", "metric", *found], rows


def _with_error(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return ""
    error = found["standard_error"]
    return f"{found['value']:.4g}" + ("" if error is None else f" ± {error:.2g}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def show(report: Mapping[str, Any]) -> None:
    """Print the tables and sentences."""
    result = report["result"]
    if result["bits_per_byte"]:
        console.table("Bits per byte of held-out text (less is better)", *language_table(report))
    for sentence in result["verdict"]:
        console.result(sentence)
    if result["asked"]:
        console.table("Answers", *behaviour_table(report))
        if report["questions_were_trained_on"]:
            console.result(BY_HEART)
        names = _asked(report)
        rows = [
            [_short(item["question"]), *(_short(item["answers"][name]["text"]) for name in names)]
            for item in report["answers"][:5]
        ]
        console.table("The first of them", ["question", *names], rows)
    columns, rows = choice_table(report)
    if rows:
        console.table("Multiple choice", columns, rows)
    columns, rows = harness_table(report)
    if rows:
        console.table("lm-evaluation-harness (± standard error)", columns, rows)
    console.result(f"Report: {result['output']}/report.html")


def _asked(report: Mapping[str, Any]) -> list[str]:
    """The models that were asked (a base without a chat template is not)."""
    return [name for name, one in report["models"].items() if one["asked"]]


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= CONSOLE_CHARACTERS else flat[: CONSOLE_CHARACTERS - 1] + "…"


def page(report: Mapping[str, Any]) -> Page:
    """The page for a person."""
    result, models = report["result"], report["models"]
    made = Page("Evaluation", _lead(models))
    made.facts(_facts(result))
    if result["bits_per_byte"]:
        _text_section(made, report)
    if result["asked"]:
        _answer_section(made, report)
    columns, rows = choice_table(report)
    if rows:
        made.heading("Multiple choice")
        made.table(columns, rows, CHOICES)
    columns, rows = harness_table(report)
    if rows:
        made.heading("lm-evaluation-harness")
        made.table(columns, rows, "± one standard error, as the harness computes it.")
    if report["continuations"]:
        _continuation_section(made, report)
    made.heading("How this was measured")
    made.paragraph(
        "Bits per byte: the cost of every token after the first of each document, the end of the document included, "
        f"divided by the bytes of its text in UTF-8. Windows of {result['window_tokens']} tokens move on by half of "
        "their length; each token is scored once. Answers and continuations always take the likeliest token."
    )
    made.details("Settings", "\n".join(f"{key} = {value}" for key, value in report["settings"].items()))
    return made


def _lead(models: Mapping[str, Any]) -> str:
    parts = [f"{name}: {one['path']}, {one['parameters'] / 1e6:.1f} M parameters" for name, one in models.items()]
    return "; ".join(parts)


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, values in sorted(result["bits_per_byte"].items(), reverse=True):
        facts[f"bits per byte, {name}"] = _bits(values["all"])
    if result["xz"]:
        facts["bits per byte, xz -9e"] = _bits(result["xz"]["all"])
    if result["asked"]:
        facts["answers that stopped by themselves"] = f"{result['stopped']} of {result['asked']}"
        facts["exact match"] = _percent(result["exact_match"])
        facts["F1 against the reference"] = _percent(result["f1"])
    if result["repetition"] is not None:
        facts["repeated 4-grams in what it writes"] = _percent(result["repetition"])
    return facts


def _text_section(made: Page, report: Mapping[str, Any]) -> None:
    made.heading("Text it has not seen")
    for sentence in report["result"]["verdict"]:
        made.paragraph(sentence)
    caption = "Bits per byte: what storing one byte of the held-out text costs; less is better."
    if report["xz"]:
        caption += " xz had the training text before it."
        if report["xz"]["all"]["training_was_cut"]:
            caption += f" Of a long training text it had the first part ({_sizes(report['xz'])})."
    made.table(*language_table(report), caption)
    made.figure(lambda axes: _draw(axes, report["result"]), "Bits per byte by language", height=2.6)
    rows = [
        [name, kind, score["documents"], score["tokens"], _bits(score["bits_per_byte"]), score["perplexity"]]
        for name, one in report["models"].items()
        for kind, score in [*_languages(one), *_sources(one)]
    ]
    made.table(
        ["model", "language or source", "documents", "tokens", "bits per byte", "perplexity"],
        rows,
        "Perplexity is by token: comparable only between models with the same tokenizer.",
    )


def _sizes(xz: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{language}: {console.format_bytes(found['training_bytes'])}"
        for language, found in xz.items()
        if language != "all"
    )


def _sources(one: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"source {name}", score) for name, score in one["sources"].items()]


def _draw(axes: Axes, result: Mapping[str, Any]) -> None:
    """Bars by language: xz, base, model."""
    series: dict[str, Bits] = {**({"xz -9e": result["xz"]} if result["xz"] else {}), **result["bits_per_byte"]}
    languages = [name for name in result["bits_per_byte"]["model"] if name != "all"]
    colours = {"xz -9e": "#c3c9d5", "base": "#8fb0ff", "model": "#2f5fd0"}
    width = 0.8 / len(series)
    for offset, (name, values) in enumerate(series.items()):
        places = [index + (offset - (len(series) - 1) / 2) * width for index in range(len(languages))]
        heights = [values.get(language, 0.0) for language in languages]
        bars = axes.bar(places, heights, width * 0.92, label=name, color=colours[name])
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axes.set_xticks(range(len(languages)), languages)
    axes.set_ylabel("bits per byte")
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))


def _answer_section(made: Page, report: Mapping[str, Any]) -> None:
    made.heading("Answers")
    if report["questions_were_trained_on"]:
        made.paragraph(BY_HEART)
    made.table(*behaviour_table(report), "Shared characters (Chinese) or words with the reference answer.")
    names = _asked(report)
    rows = [
        [item["question"], item["reference"], *(_answer(item["answers"][name]) for name in names)]
        for item in report["answers"]
    ]
    made.table(["question", "reference", *names], rows, "… marks an answer that was cut off at its longest length.")


def _answer(answer: Mapping[str, Any]) -> str:
    return str(answer["text"]) + ("" if answer["finish_reason"] == "stop" else " …")


def _continuation_section(made: Page, report: Mapping[str, Any]) -> None:
    made.heading("How it goes on")
    names = list(report["models"])
    rows = [
        [item["text"], item["truth"], *(item["continuations"][name] for name in names)]
        for item in report["continuations"]
    ]
    made.table(["beginning of a held-out document", "how it really goes on", *names], rows)
