"""The names by which rows are recognised: fields that hold text, and lists that hold the turns of a chat.

In: the values of a row. Out: whether they are one, and their text. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Looked for in this order; names are compared without case.
TEXT_FIELDS = (
    "text", "content", "body", "document", "article", "passage", "paragraph", "story", "正文", "内容", "文本", "文章",
    "output", "response", "answer", "completion", "sentence", "review", "text_a", "conversations",
)  # fmt: skip
# The lists that hold the messages of a chat.
_TURN_FIELDS = ("messages", "conversations", "conversation", "prompt")
# Beside the text fields, what the first half of a question with answer is called.
_QUESTION_FIELDS = ("instruction", "prompt", "问题")


def as_text(value: Any) -> str | None:
    """A string, or a list of strings joined by line ends; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    return None


def is_row(values: Mapping[str, Any]) -> bool:
    """Whether an object holds text or a chat of its own, so that a list inside is a part of it and not its rows."""
    by_name = {key.strip().lower(): value for key, value in values.items()}
    if any((as_text(by_name.get(name)) or "").strip() for name in (*TEXT_FIELDS, *_QUESTION_FIELDS)):
        return True
    return any(_are_turns(by_name.get(name)) for name in _TURN_FIELDS)


def _are_turns(value: Any) -> bool:
    """Messages with role and content (or from and value), or strings in turn; not rows that hold messages."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict):
        return bool(first.keys() & {"role", "from"} and first.keys() & {"content", "value"})
    return isinstance(first, str)
