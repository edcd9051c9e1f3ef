"""The verb `preview`: what a fine-tuning with these settings would learn, before anything is trained or written.

In: the settings of `finetune`. Out: counts of rows and tokens, three rows with the learned tokens marked, what stands
out among the rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from onecard import console
from onecard.config import FinetuneConfig
from onecard.data.records import Rejection
from onecard.train import chat_rows
from onecard.train.base import Base, say_rows

_REJECTED_SHOWN = 5


def preview(config: FinetuneConfig) -> dict[str, Any]:
    """Read and encode the rows as `finetune` would, and show them; no model weights are loaded, nothing is written.

    Errors as those of `finetune` before its first step.
    """
    from onecard.train.finetune import USUAL_LENGTH

    base = Base.open(config)
    config = config.model_copy(update={"max_length": base.row_tokens(config, USUAL_LENGTH)})
    rejected: list[Rejection] = []

    def reject(rejection: Rejection) -> None:
        if Counter(item.reason for item in rejected)[rejection.reason] < _REJECTED_SHOWN:
            rejected.append(rejection)

    rows = chat_rows.read(config, base.tokenizer, reject)
    say_rows(rows.facts)
    if rejected:
        console.table(
            "Some of the rows that are dropped",
            ["reason", "row", "text"],
            [[item.reason, f"{item.file}:{item.line}", _short(item.text)] for item in rejected],
        )
    chat_rows.say(rows.look, as_result=True)
    return {**rows.facts, **rows.look}


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 80 else f"{flat[:79]}…"
