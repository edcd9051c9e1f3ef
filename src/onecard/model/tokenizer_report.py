"""`onecard tokenizer report`: tokenizers side by side on your own text, and what a vocabulary size means for a model.

In: tokenizer or model directories, a corpus or files of text, a file of terms. Out: a directory with report.html and
the numbers in onecard.json. Counting is tokenizer/report.py's; here stands what needs models: how large the table of a
vocabulary is in a model, and how much a character costs to compute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import TokenizerReportConfig
from onecard.data.corpus import Document, read_documents
from onecard.data.documents import read_raw_documents
from onecard.data.rules import language_of
from onecard.errors import ConfigError, DataError
from onecard.model.load import load_tokenizer
from onecard.model.presets import PRESETS, preset
from onecard.report import Page
from onecard.tokenizer import report as own
from onecard.tokenizer.chunks import chunks
from onecard.tokenizer.special import BYTES, FIXED_TOKENS
from onecard.tokenizer.terms import read_terms
from onecard.tokenizer.train import assemble, train_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# The curve: characters read, and the share of them that it is measured on.
CURVE_CHARACTERS = 8_000_000
CURVE_HELD_OUT = 0.1
# Models for which the vocabulary sizes are compared.
SHOWN_SIZES = ("12M", "125M", "1B")
SPLITS_SHOWN = 20
LONGEST_SHOWN = 40


def report(config: TokenizerReportConfig) -> dict[str, Any]:
    """Measure and write the comparison; returns the numbers of each tokenizer and of each vocabulary size."""
    started = time.monotonic()
    if (config.corpus is None) == (not config.text):
        raise ConfigError("There has to be one text to measure on.", "Give --corpus DIR, or --text FILE ...")
    inputs = [
        *config.tokenizers,
        *([config.corpus] if config.corpus else []),
        *([config.terms] if config.terms else []),
    ]
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=inputs)
    tokenizers = {_label(path, config.tokenizers): load_tokenizer(path) for path in config.tokenizers}
    console.heading(f"Comparing {len(tokenizers)} tokenizer{'s' if len(tokenizers) > 1 else ''}")
    texts = list(own.limited(_texts(config)))
    measured = {name: _measured(tokenizer, config, texts) for name, tokenizer in tokenizers.items()}
    if not next(iter(measured.values())).by_language:
        raise DataError("There is no text to measure on.", "Give files that hold some.")
    terms = [] if config.terms is None else read_terms(config.terms)
    splits = {term: {name: own.pieces(each, term) for name, each in tokenizers.items()} for term in terms}
    curve = _curve(config, texts) if config.sizes else []
    result = {
        "tokenizers": {name: _numbers(tokenizers[name], measured[name]) for name in tokenizers},
        "terms": {
            term: {name: sum(count for _, count in parts) for name, parts in found.items()}
            for term, found in splits.items()
        },
        "vocabulary_sizes": curve,
        "seconds": round(time.monotonic() - started, 2),
    }
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
        _page(tokenizers, measured, splits, curve).save(directory / "report.html")
        artifact.write_json_atomically(directory / "report.json", result)
        artifact.write_manifest(
            directory, "evaluation", settings=config.plain(), parents=inputs, result={"seconds": result["seconds"]}
        )
    _show(config, result)
    return result


def _label(path: Path, among: Sequence[Path]) -> str:
    """The last part of a path, or the whole where two are called the same."""
    name = path.resolve().name
    return name if sum(other.resolve().name == name for other in among) == 1 else str(path)


def _measured(
    tokenizer: PreTrainedTokenizerFast, config: TokenizerReportConfig, texts: list[Document]
) -> own.Measurement:
    """What the text comes to: the held-out documents of a corpus, or the files."""
    if config.corpus is not None:
        return own.measure(tokenizer, config.corpus)
    found = own.Measurement()
    own.count(tokenizer, texts, found)
    own.look_at_entries(tokenizer, found)
    return found


def _texts(config: TokenizerReportConfig) -> Iterator[Document]:
    for source in config.text:
        for raw in read_raw_documents(source, strict=False, reject=lambda rejection: None):
            language = language_of(raw.text) if source.language == "auto" else source.language
            yield Document(raw.id, raw.text, source.label, language)


def _numbers(tokenizer: PreTrainedTokenizerFast, found: own.Measurement) -> dict[str, Any]:
    def plain(counts: dict[str, own.Count]) -> dict[str, Any]:
        return {
            name: {
                "tokens": count.tokens,
                "characters_per_token": round(count.characters_per_token, 4),
                "bytes_per_token": round(count.bytes_per_token, 4),
            }
            for name, count in sorted(counts.items())
        }

    return {
        "entries": len(tokenizer.get_vocab()),
        **found.summary(),
        "by_language": plain(found.by_language),
        "by_source": plain(found.by_source),
    }


# --- the curve ----------------------------------------------------------------------------------------------------


def _curve(config: TokenizerReportConfig, texts: Iterable[Document]) -> list[dict[str, Any]]:
    """Tokens that unseen text takes at each vocabulary size, with a BPE trained on this text.

    The merges of a smaller vocabulary are the first of a larger one, so that one training gives all sizes.
    """
    texts = read_documents(config.corpus, "train") if config.corpus is not None else texts
    learned, held_out = _two_parts(document.text for document in texts)
    trained = train_model(
        learned, vocabulary_size=max(config.sizes), pre_tokenizer="qwen2", maximum_token_characters=16
    )
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    fixed = len(FIXED_TOKENS) + BYTES
    characters = sum(map(len, held_out))
    found = []
    for size in sorted({min(size, fixed + len(merges)) for size in config.sizes if size > fixed}):
        tokenizer = assemble(merges[: size - fixed], "qwen2")
        tokens = _tokens(tokenizer, held_out)
        found.append(
            {
                "vocabulary_size": size,
                "tokens": tokens,
                "characters_per_token": round(characters / max(tokens, 1), 4),
                "models": {name: _cost(name, size, tokens / max(characters, 1)) for name in SHOWN_SIZES},
            }
        )
    return found


def _two_parts(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Pieces to learn from, and every tenth to measure on, within the number of characters that is read."""
    parts: tuple[list[str], list[str]] = ([], [])
    every = round(1 / CURVE_HELD_OUT)
    read = 0
    for number, piece in enumerate(chunks(texts, 2000)):
        if read >= CURVE_CHARACTERS:
            break
        parts[number % every == every - 1].append(piece)
        read += len(piece)
    return parts[0], parts[1] or parts[0]


def _tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    return sum(len(found.ids) for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False))


def _cost(size: str, vocabulary: int, tokens_per_character: float) -> dict[str, float]:
    """What a model of that size has in its table, and computes for a character in training."""
    shape = preset(size)
    flops = shape.training_flops_per_token(vocabulary, shape.context_tokens / 2) * tokens_per_character
    return {
        "table_share": round(vocabulary * shape.width / shape.parameters(vocabulary), 4),
        "parameters": shape.parameters(vocabulary),
        "training_flops_per_character": round(flops),
    }


# --- what a person sees -------------------------------------------------------------------------------------------


def _page(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    measured: dict[str, own.Measurement],
    splits: dict[str, dict[str, list[tuple[str, int]]]],
    curve: list[dict[str, Any]],
) -> Page:
    names = list(tokenizers)
    page = Page(
        "Tokenizers side by side" if len(names) > 1 else f"The tokenizer {names[0]}",
        "How many characters of this text a token holds. More characters in a token mean shorter sequences: faster "
        "training, faster answers and a longer memory; more entries mean a larger table in the model.",
    )
    page.facts({f"characters a token, {name}": _overall(measured[name]) for name in names})
    for note in measured[names[0]].notes:
        page.paragraph(f"Note: {note}")
    for kind in ("language", "source"):
        _side_by_side(page, kind, {name: getattr(measured[name], f"by_{kind}") for name in names})
    page.heading("Entries")
    page.table(
        ["tokenizer", "entries", "learned entries that this text never uses", "longest token"],
        [
            [
                name,
                len(tokenizers[name].get_vocab()),
                f"{100 * measured[name].unused_share:.1f} %",
                own.visible(measured[name].longest[0][0][:LONGEST_SHOWN]) if measured[name].longest else "",
            ]
            for name in names
        ],
        "An entry that a domain never uses is a row of the model that is never trained on it.",
    )
    if splits:
        page.heading("Terms")
        page.table(
            ["term", *names],
            [[term, *(sum(count for _, count in found[name]) for name in names)] for term, found in splits.items()],
            "Tokens that each term takes.",
        )
        for term, found in list(splits.items())[:SPLITS_SHOWN]:
            for name in names:
                page.pieces(found[name], f"{term}, {name}")
    _samples(page, tokenizers, measured)
    if curve:
        _curve_section(page, curve)
    if len(names) == 1:
        own.longest_table(page, measured[names[0]])
    return page


def _overall(found: own.Measurement) -> float:
    counts = found.by_language.values()
    return sum(c.characters for c in counts) / max(sum(c.tokens for c in counts), 1)


def _side_by_side(page: Page, kind: str, counts: dict[str, dict[str, own.Count]]) -> None:
    names = list(counts)
    rows = sorted(counts[names[0]])
    page.heading(f"By {kind}")
    page.table(
        [kind, "characters", *names],
        [
            [row, counts[names[0]][row].characters, *(counts[name][row].characters_per_token for name in names)]
            for row in rows
        ],
        "Characters a token (tokens and bytes are in report.json).",
    )
    if kind != "language" or len(names) == 1:
        return

    def bars(axes: Axes) -> None:
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            axes.bar(
                [row + (place - (len(names) - 1) / 2) * width for row in range(len(rows))],
                [counts[name][row].characters_per_token for row in rows],
                width,
                label=name,
            )
        axes.set_xticks(range(len(rows)), rows)
        axes.set_ylabel("characters a token")
        axes.legend(frameon=False)

    page.figure(bars, "Characters a token, by language: higher is shorter.")


def _samples(page: Page, tokenizers: dict[str, PreTrainedTokenizerFast], measured: dict[str, own.Measurement]) -> None:
    page.heading("How text is split")
    page.paragraph("Each mark is one token; a raised number says that a piece takes more than one.")
    for language, text in sorted(next(iter(measured.values())).samples.items()):
        for name, tokenizer in tokenizers.items():
            page.pieces(own.pieces(tokenizer, text), f"{language}, {name}")


def _curve_section(page: Page, curve: list[dict[str, Any]]) -> None:
    page.heading("If you trained a tokenizer on this text")
    page.paragraph(
        "A BPE tokenizer of each size, trained on nine tenths of the text and measured on the rest. A larger "
        "vocabulary makes sequences shorter and the table larger; for a small model the table soon costs more than it "
        "saves. The last columns are the work of training on a character, relative to the cheapest size."
    )
    cheapest = {name: min(row["models"][name]["training_flops_per_character"] for row in curve) for name in SHOWN_SIZES}

    def relative(row: dict[str, Any], name: str) -> float:
        return float(row["models"][name]["training_flops_per_character"] / cheapest[name])

    page.table(
        [
            "entries",
            "tokens",
            "characters a token",
            *(f"table of a {name}" for name in SHOWN_SIZES),
            *(f"work, {name}" for name in SHOWN_SIZES),
        ],
        [
            [
                row["vocabulary_size"],
                row["tokens"],
                row["characters_per_token"],
                *(f"{100 * row['models'][name]['table_share']:.0f} %" for name in SHOWN_SIZES),
                *(round(relative(row, name), 3) for name in SHOWN_SIZES),
            ]
            for row in curve
        ],
        "Table: the share of the embedding in the parameters. onecard's own sizes take "
        + ", ".join(f"{shape.vocabulary:,} ({name})" for name, shape in PRESETS.items() if name in SHOWN_SIZES)
        + ".",
    )
    sizes = [row["vocabulary_size"] for row in curve]

    def tokens(axes: Axes) -> None:
        axes.plot(sizes, [row["characters_per_token"] for row in curve], marker="o")
        axes.set_ylabel("characters a token")
        _logarithmic(axes, sizes)

    def work(axes: Axes) -> None:
        for name in SHOWN_SIZES:
            axes.plot(sizes, [relative(row, name) for row in curve], marker="o", label=f"{name} model")
        axes.set_ylabel("work for a character")
        axes.legend(frameon=False)
        _logarithmic(axes, sizes)

    page.figure(tokens, "Characters that a token holds, by vocabulary size.")
    page.figure(work, "Training FLOP for a character of text, relative to the cheapest vocabulary of each model size.")


def _logarithmic(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("entries")


def _show(config: TokenizerReportConfig, result: dict[str, Any]) -> None:
    languages = sorted({language for found in result["tokenizers"].values() for language in found["by_language"]})
    console.table(
        "Tokenizers",
        ["tokenizer", "entries", *(f"characters a token, {language}" for language in languages), "unused %"],
        [
            [
                name,
                found["entries"],
                *(found["by_language"][language]["characters_per_token"] for language in languages),
                round(100 * found["unused_share"], 1),
            ]
            for name, found in result["tokenizers"].items()
        ],
    )
    if result["vocabulary_sizes"]:
        console.table(
            "A tokenizer trained on this text",
            ["entries", "tokens", "characters a token"],
            [
                [row["vocabulary_size"], row["tokens"], row["characters_per_token"]]
                for row in result["vocabulary_sizes"]
            ],
        )
    console.result(f"Report: {config.output / 'report.html'}")
