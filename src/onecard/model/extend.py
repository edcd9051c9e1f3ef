"""`onecard tokenizer extend`: terms, or the control tokens of a chat template, for a model that stands already.

In: a model directory, and a file of terms or the name of a chat template. Out: a model directory whose tokenizer has
them as single tokens and whose embedding and head have a row for each. A new row begins as the mean of the rows that
its text was read with before, so that the model goes on much as it did, and learns the rest in fine-tuning. What the
tokenizer becomes is decided in tokenizer/extension.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import TokenizerExtendConfig
from onecard.errors import ConfigError
from onecard.model.load import (
    check_tokenizer_fits,
    load_model,
    load_tokenizer,
    model_directory,
    rows_without_token,
    vocabulary_rows,
)
from onecard.report import Page
from onecard.tokenizer.chat_templates import CHAT_FORMATS, ChatFormat
from onecard.tokenizer.extension import Extension, extended
from onecard.tokenizer.report import visible
from onecard.tokenizer.template import stop_token_ids
from onecard.tokenizer.terms import read_terms
from onecard.tokenizer.train import save_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def extend(config: TokenizerExtendConfig) -> dict[str, Any]:
    """Write the extended model; returns the new ids, the terms with their pieces before, and the rows."""
    started = time.monotonic()
    chat = None if config.chat_template == "none" else CHAT_FORMATS[config.chat_template]
    if config.terms is None and chat is None:
        raise ConfigError("There is nothing to add.", "Give --terms FILE, or --chat-template NAME.")
    base = model_directory(config.model)
    inputs = [base] if config.terms is None else [base, config.terms]
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=inputs)
    old = load_tokenizer(base)
    terms = [] if config.terms is None else read_terms(config.terms)
    made = extended(old, terms, () if chat is None else chat.control_tokens)
    if not made.made_of and chat is None:
        raise ConfigError(
            "Every term is one token already, or cannot be one.", _reasons(made) or "The model needs no extension."
        )
    console.heading(f"Extending {config.model} by {len(made.made_of):,} entries")
    tokenizer = _opened(base, made)
    if chat is not None:
        tokenizer.chat_template = chat.template
        _check_end(tokenizer, chat)
    model = load_model(base, dtype=_stored_dtype(base))
    check_tokenizer_fits(old, model, base)
    before = int(_embedding(model).shape[0])
    add_rows(model, made.made_of, _ends_turn(tokenizer, chat), config.pad_to_multiple_of, vocabulary_rows(tokenizer))
    _keep_settings_alike(model, tokenizer, chat)
    result = _result(made, terms, tokenizer, model, before)
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as directory:
        model.save_pretrained(str(directory))
        save_tokenizer(tokenizer, directory)
        for file in directory.glob("*.safetensors"):  # written for the owner alone; the others are for whom umask says
            file.chmod((directory / "config.json").stat().st_mode)
        _write_report(directory / "report.html", result)
        result["seconds"] = round(time.monotonic() - started, 2)
        artifact.write_manifest(directory, "model", settings=config.plain(), parents=inputs, result=result)
    _show(config, result)
    return result


# --- rows ---------------------------------------------------------------------------------------------------------


def add_rows(
    model: PreTrainedModel, made_of: dict[int, list[int]], ends_turn: dict[int, int], multiple: int, entries: int
) -> None:
    """Give embedding and head a row for each of `entries` ids, in a multiple of rows, and start the new ones.

    A row becomes the mean of the rows in `made_of`; one that ends a turn begins as the row of what ends a text
    (`ends_turn`: id -> id); rows that no token has become the mean of all. A tied head stays tied.
    """
    import torch

    rows = int(_embedding(model).shape[0])
    known = min(rows, min(made_of, default=rows))
    if entries > rows:
        model.resize_token_embeddings(-(-entries // multiple) * multiple, mean_resizing=False)
    with torch.no_grad():
        for weight in _tables(model):
            mean = weight[:known].float().mean(0)
            weight[rows:] = mean.to(weight.dtype)
            for index, parts in made_of.items():
                source = [ends_turn[index]] if index in ends_turn else parts
                weight[index] = weight[source].float().mean(0).to(weight.dtype)


def _embedding(model: PreTrainedModel) -> Tensor:
    embedding: Any = model.get_input_embeddings()
    weight: Tensor = embedding.weight
    return weight


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """Everything that has a row for each id: the embedding; of a head that is not tied, the weight; its bias."""
    untyped: Any = model
    head = untyped.get_output_embeddings()
    found = [_embedding(model)]
    if head is not None:
        found += [head.weight] if head.weight.data_ptr() != found[0].data_ptr() else []
        found += [head.bias] if getattr(head, "bias", None) is not None else []
    return found


def _stored_dtype(base: Path) -> Any:
    """The number format of the weights on disk: they are written as they were."""
    import torch

    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    return getattr(torch, str(name), torch.float32)


# --- tokenizer and settings ---------------------------------------------------------------------------------------


def _opened(base: Path, made: Extension) -> PreTrainedTokenizerFast:
    """The larger tokenizer as transformers opens it, with the settings that the old one has."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json"):
            if (base / name).is_file():
                shutil.copy(base / name, place / name)
        (place / "tokenizer.json").write_text(json.dumps(made.description, ensure_ascii=False), encoding="utf-8")
        tokenizer = load_tokenizer(place)
    vocabulary = tokenizer.get_vocab()
    expected = {**made.description["model"]["vocab"]} if made.description["model"]["type"] == "BPE" else {}
    expected |= {entry["content"]: entry["id"] for entry in made.description["added_tokens"]}
    wrong = [token for token, index in expected.items() if vocabulary.get(token) != index]
    assert not wrong, f"the library gives {wrong[0]} another id than the file"
    return tokenizer


def _check_end(tokenizer: PreTrainedTokenizerFast, chat: ChatFormat) -> None:
    if not chat.turn_end and tokenizer.eos_token_id is None:
        raise ConfigError(
            "This chat template ends an answer with the EOS, which the tokenizer does not have.",
            "Take another chat_template, such as chatml.",
        )


def _ends_turn(tokenizer: PreTrainedTokenizerFast, chat: ChatFormat | None) -> dict[int, int]:
    """The token that ends a turn, and the one that the model ends texts with."""
    if chat is None or not chat.turn_end or tokenizer.eos_token_id is None:
        return {}
    ids: dict[str, int] = tokenizer.get_vocab()
    return {ids[chat.turn_end]: int(tokenizer.eos_token_id)}


def _keep_settings_alike(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chat: ChatFormat | None) -> None:
    """Stop at what the template ends a turn with; never generate a row that no token has."""
    generation: Any = model.generation_config
    if chat is not None:
        stops = stop_token_ids(tokenizer)
        generation.eos_token_id = stops[0] if len(stops) == 1 else stops
        model.config.eos_token_id = generation.eos_token_id
    spare = rows_without_token(tokenizer, int(_embedding(model).shape[0]))
    generation.suppress_tokens = spare or None


# --- what a person sees -------------------------------------------------------------------------------------------


def _reasons(made: Extension) -> str:
    return "; ".join(f"{term}: {reason}" for term, reason in list(made.left_out.items())[:5])


def _result(
    made: Extension, terms: list[str], tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, before: int
) -> dict[str, Any]:
    now = {term: tokenizer.tokenize(term) for term in terms}
    return {
        "new_entries": len(made.made_of),
        "entries": vocabulary_rows(tokenizer),
        "rows_before": before,
        "rows": int(_embedding(model).shape[0]),
        "rows_without_token": len(rows_without_token(tokenizer, int(_embedding(model).shape[0]))),
        "terms": [
            {
                "term": term,
                "tokens_before": len(made.before[term]),
                "tokens": len(now[term]),
                **({"left_out": made.left_out[term]} if term in made.left_out else {}),
            }
            for term in terms
        ],
        "chat_template": tokenizer.chat_template is not None,
    }


def _write_report(path: Path, result: dict[str, Any]) -> None:
    page = Page(
        f"A tokenizer with {result['new_entries']:,} entries more",
        "Each new row of the embedding (and of the head, where it is not the same) begins as the mean of the rows that "
        "its text was read with before. Fine-tuning teaches the model to use them: with all weights, since adapters "
        "leave the embedding as it is.",
    )
    page.facts(
        {
            "new entries": result["new_entries"],
            "rows before": result["rows_before"],
            "rows now": result["rows"],
            "rows without a token, never generated": result["rows_without_token"],
        }
    )
    if result["terms"]:
        page.heading("Terms")
        page.table(
            ["term", "tokens before", "tokens now", "why not one"],
            [
                [visible(row["term"]), row["tokens_before"], row["tokens"], row.get("left_out", "")]
                for row in result["terms"]
            ],
            "Text in which the pieces of a term do not meet is split as before.",
        )
    page.save(path)


def _show(config: TokenizerExtendConfig, result: dict[str, Any]) -> None:
    for row in result["terms"]:
        if "left_out" in row:
            console.note(f"  {row['term']} stays as it is: {row['left_out']}")
    if result["terms"]:
        console.table(
            f"Model in {config.output}: {result['rows_before']:,} rows before, {result['rows']:,} now",
            ["term", "tokens before", "tokens now"],
            [[row["term"], row["tokens_before"], row["tokens"]] for row in result["terms"][:20]],
        )
    console.result(
        f"{result['new_entries']:,} new entries. Fine-tune the model with all weights, so that it learns them: "
        f"onecard finetune {config.output} ..."
    )
