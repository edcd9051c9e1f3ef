"""What another reader makes of a written model, beside the model that it was made of.

In: the model's own tokenizer and logits, and a tokenizer and a model as another reader loaded them from a file. Out:
how far probabilities have moved. `NotTheSame` for what would be read as another model: other ids of any of 200 strings
or of any chat, or in fp32 other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onecard.errors import DataError, OnecardError
from onecard.tokenizer.template import encode_chat

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 1e-3
_PIECES = (
    "The quick brown fox", "jumps over 12,345 lazy dogs.", " leading space", "it's we've they'll", "e-mail: a@b.cn",
    "冠状动脉粥样硬化", "你好，世界！", "话说天下大势，分久必合。", "３.14　ＡＢＣ（全角）", "混合 mixed 文本 text",
    "\n\n\\t  indented", "def f(x):\n    return x**2", "👍👨‍👩‍👧 emoji", "naïve café Zürich", "1234567890", "…——《》",
    "<b>bold</b>", "https://example.org/?q=1", "Ωμέγα привет", "𠮷野家",
)  # fmt: skip
_TEXTS = ("In the beginning God created the heaven and the earth.", "话说天下大势，分久必合，合久必分。", "1 + 1 = 2")
_CHATS = (
    (("user", "你好"),),
    (("user", " Who are you? 👋"), ("assistant", "I am a model.\n\nAnd you?"), ("user", "<|im_end|> <s> [INST]")),
    (("system", "Be brief. 简短。"), ("user", "1+1?"), ("assistant", "2"), ("user", "and 2+2?")),
)


class NotTheSame(OnecardError):
    """A written file was not read back as the model it was made of."""


def strings() -> list[str]:
    """200 strings in Chinese, English and what stands between them."""
    count = len(_PIECES)
    return [_PIECES[i % count] + " " * (i // count % 2) + _PIECES[(7 * i + i // count) % count] for i in range(200)]


def documents(tokenizer: Any) -> list[list[int]]:
    """Texts, and a chat where the model has a template, of at most 64 ids each."""
    made = [tokenizer(text)["input_ids"][:64] for text in _TEXTS]
    if tokenizer.chat_template:
        made.append(encode_chat(tokenizer, [{"role": "user", "content": "你好"}], add_generation_prompt=True).ids[:64])
    return made


def logits(model: Any, ids: Sequence[list[int]]) -> list[Tensor]:
    """Of each document: tokens x vocabulary, in fp64."""
    import torch

    with torch.no_grad():
        return [model(input_ids=torch.tensor([one])).logits[0].double() for one in ids]


def check_ids(name: str, own: Any, theirs: Any) -> int:
    """How many chats both tokenizers make the same ids of; NotTheSame unless all are, and all strings.

    Of a chat that the template refuses (as some do a system message) neither makes anything.
    """
    for text in strings():
        meant, read = (each(text, add_special_tokens=False)["input_ids"] for each in (own, theirs))
        if meant != read:
            raise NotTheSame(
                f"{name} splits {text!r} into {read}, the model was trained on {meant}.",
                "Serve the model's directory instead; and please report this tokenizer.",
            )
    if not own.chat_template:
        return 0
    same = 0
    for chat in _CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        try:
            meant = encode_chat(own, messages, add_generation_prompt=True).ids
        except DataError:
            continue
        read = encode_chat(theirs, messages, add_generation_prompt=True).ids
        if meant != read:
            place = next(
                (place for place, pair in enumerate(zip(meant, read)) if pair[0] != pair[1]), min(len(meant), len(read))
            )
            raise NotTheSame(
                f"{name} writes a chat otherwise than the model was trained on it, from token {place} on: "
                f"{theirs.decode(read[place : place + 8])!r} for {own.decode(meant[place : place + 8])!r}.",
                "Serve the model's directory instead; and please report this chat template.",
            )
        same += 1
    return same


def moved(name: str, made: Sequence[Tensor], reference: Sequence[Tensor], *, exact: bool) -> dict[str, float]:
    """How far the logits of the same documents are apart; NotTheSame if `exact` and they are further than EXACT."""
    import torch

    off = max(float((one - other).abs().max()) for one, other in zip(made, reference))
    if exact and not off <= EXACT:
        raise NotTheSame(f"The logits of {name} differ by up to {off:.2g}.", "Please report this model.")
    divergences = [
        float((other.softmax(-1) * (other.log_softmax(-1) - one.log_softmax(-1))).sum(-1).mean())
        for one, other in zip(made, reference)
    ]
    same = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in zip(made, reference)])
    return {
        "largest_logit_difference": off,
        "divergence": sum(divergences) / len(divergences),
        "same_next_token": float(same.double().mean()),
    }
