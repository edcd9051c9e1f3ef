"""The one place where chats, documents and prompts become token ids, for any Hugging Face tokenizer with a template.

In: a tokenizer and messages or text. Out: ids, and for chats the mask of what the model itself says. Training,
evaluation and serving all come through here, so that a prompt at serving time is the very prefix that was trained on.

Two rules hold everywhere. A text that spells a control token (`<|im_end|>`) stays text, whatever the role: only the
template writes control tokens. And there is one BOS: documents and prompts get it if the tokenizer has one, in a chat
the template alone writes it, whatever the tokenizer adds by itself.

A chat is rendered by the tokenizer's own template in transformers' sandbox and encoded without further special tokens,
so that the ids are those of `apply_chat_template` and of the servers that use it. There are two exceptions: control
tokens spelled in a message, and an answer that changes how the end of its prompt is split (it begins with a line break,
say, that would merge with one of the prompt). No server could ever generate that, so there the prompt is encoded as a
server does, and the answer apart from it.

The module does not know which tokenizer it has, nor how rows were read (data) or are batched (train).
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from onecard.errors import ConfigError, DataError
from onecard.tokenizer.encoding import Encoder, encoder_of
from onecard.tokenizer.messages import Messages, Tools, map_strings, normalise, well_formed, with_arguments
from onecard.tokenizer.special import END_OF_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Learn = Literal["answers", "last_answer", "everything"]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """Token ids of a chat; `assistant_mask` is true for the tokens of the answers and of the end of turn after each."""

    ids: list[int]
    assistant_mask: list[bool]


def encode_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Messages,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = False,
    learn: Learn = "answers",
) -> EncodedChat:
    """The ids of a conversation, and which of them are the assistant's own.

    The mask leaves out messages that say `train: False`; with `learn` it is that of the last answer alone, or of
    everything. The ids are the same whatever is learned.

    With `add_generation_prompt` the ids end where the model has to go on; they are then a prefix of the ids of the
    conversation with the answer in it. The mask is found by rendering the conversation up to each answer, with and
    without it; ConfigError names the message at which a template does not keep to its own prefix (only for answers that
    are learned, and without `add_generation_prompt`: others need not be, to go on). DataError if a message is malformed
    or the template refuses it.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "The tokenizer has no chat template.", "Use a model made for chat, or finetune one with onecard."
        )
    encoder = encoder_of(tokenizer)
    plain_messages, plain_tools = normalise(messages, tools)
    spelled = encoder.spelled((plain_messages, plain_tools))
    hidden_tools = map_strings(plain_tools, spelled.hide) if plain_tools else None
    hidden_messages = _as_expected(tokenizer, map_strings(plain_messages, spelled.hide), hidden_tools)

    @cache
    def render(count: int, generation_prompt: bool) -> str:
        return _render(tokenizer, hidden_messages[:count], hidden_tools, generation_prompt)

    text = render(len(messages), add_generation_prompt)
    places = [index for index, message in enumerate(hidden_messages) if message["role"] == "assistant"]
    answers, learned = [], []
    for index in places:
        wanted = messages[index].get("train") is not False and (learn == "answers" or index == places[-1])
        try:
            answers.append(_find_answer(encoder, text, index, render))
            learned.append(wanted)
        except ConfigError as fault:
            if wanted and learn != "everything" and not add_generation_prompt:
                raise ConfigError(spelled.restore(fault.what), fault.remedy) from fault
    ids, owners = encoder.encode(text, spelled, answers)
    if learn == "everything":
        return EncodedChat(ids, [True] * len(ids))
    return EncodedChat(ids, [owner >= 0 and learned[owner] for owner in owners])


def encode_document(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """BOS, the text, EOS: each control token exactly once (BOS only if the tokenizer has one)."""
    return encode_documents(tokenizer, [text])[0]


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> list[list[int]]:
    """`encode_document` of many texts, on all processors."""
    encoded = encoder_of(tokenizer).plain.encode_batch_fast([well_formed(t) for t in texts], add_special_tokens=False)
    begin, end = document_ends(tokenizer)
    return [begin + item.ids + end for item in encoded]


def document_ends(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The ids that stand before and after a document."""
    return _begin(tokenizer), _document_end(tokenizer)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """BOS and the text, for raw completion (BOS only if the tokenizer has one)."""
    return _begin(tokenizer) + encoder_of(tokenizer).plain.encode(well_formed(text), add_special_tokens=False).ids


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that end an answer: the template's end of turn (if it has one), then EOS; without repetition."""
    found: list[int] = []
    if tokenizer.chat_template:
        try:
            chat = encode_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except (ConfigError, DataError):
            # The template ends no turn, or allows no such conversation: only EOS is left to stop at.
            chat = EncodedChat([], [])
        control = set(encoder_of(tokenizer).control.values())
        found += [index for index, own in zip(chat.ids, chat.assistant_mask) if own and index in control][:1]
    for index in (*([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]), *_document_end(tokenizer)):
        if index not in found:
            found.append(index)
    return found


def _document_end(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What ends a document: END_OF_TEXT where the tokenizer has it as a control token, else EOS.

    Fine-tuning makes the end of a turn the EOS; a document still ends as it did when the model read documents.
    """
    own = encoder_of(tokenizer).control.get(END_OF_TEXT)
    if own is not None:
        return [own]
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _begin(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


# --- rendering ----------------------------------------------------------------------------------------------------


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool
) -> str:
    import jinja2

    try:
        rendered = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False
        )
    except (jinja2.TemplateError, TypeError, ValueError) as fault:
        raise DataError(
            f"The chat template refuses the conversation: {fault}.", "Check the order and roles of the messages."
        ) from fault
    return str(rendered)


def _as_expected(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: list[Any] | None
) -> list[dict[str, Any]]:
    """Arguments of calls as the template needs them: objects, or JSON text where it prints or joins them as they are.

    Found out by rendering a call that would show Python's notation, because templates do not say.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    probe = with_arguments(messages, lambda _: {"notation": "of Python"})
    try:
        as_text = "{'notation'" in _render(tokenizer, probe, tools, False)
    except DataError:
        as_text = True
    return with_arguments(messages, lambda value: json.dumps(value, ensure_ascii=False)) if as_text else messages


def _find_answer(encoder: Encoder, text: str, index: int, render: Callable[[int, bool], str]) -> tuple[int, int]:
    """Where in the rendered text the answer at `index` begins as the model would say it, and where its turn ends."""
    try:
        prompt = render(index, True)
        through = render(index + 1, False)
    except DataError as fault:
        raise _parted(index, f"the part before it cannot be rendered alone ({fault.what.rstrip('.')})") from fault
    if not text.startswith(prompt):
        raise _parted(index, f"the prompt for it is not how the conversation begins; {_where(prompt, text)}")
    shared = len(through) if text.startswith(through) else len(os.path.commonprefix([text, through]))
    marks = [match.span() for match in encoder.pattern.finditer(text, len(prompt), max(shared, len(prompt)))]
    # Templates may add white space or an EOS after the end of turn: walk back over those, to the first mark that
    # follows the answer, and take with it the marks that touch it.
    first = len(marks)
    while first > 0 and (first == len(marks) or not text[marks[first - 1][1] : marks[first][0]].strip()):
        first -= 1
    if first == len(marks) and shared < len(through):
        raise _parted(index, _OTHERWISE)
    if first == len(marks):
        raise _parted(index, "no end of turn follows it, so that the model could not learn to stop")
    end = marks[first][1]
    for start, stop in marks[first + 1 :]:
        if start == end:
            end = stop
    if encoder.pattern.sub("", through[end:]).strip():
        raise _parted(index, _OTHERWISE)
    return len(prompt), end


# Characters shown on each side of a difference.
_AROUND = 24
_OTHERWISE = "it is rendered otherwise when further messages follow"


def _where(prompt: str, text: str) -> str:
    """The two texts around their first difference."""
    first = len(os.path.commonprefix([prompt, text]))
    begin = max(first - _AROUND, 0)
    served, trained = (json.dumps(side[begin : first + _AROUND], ensure_ascii=False) for side in (prompt, text))
    return f"from character {first} on, the server writes {served}, the conversation {trained}"


def _parted(index: int, reason: str) -> ConfigError:
    return ConfigError(
        f"The chat template does not keep to its own prefix at message {index}: {reason}.",
        "Set learn = last_answer, or use a template that only adds to what it wrote.",
    )
