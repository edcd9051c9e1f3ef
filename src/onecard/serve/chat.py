"""`onecard chat`: talk to a model in the terminal, or ask it the lines of a pipe.

In: a model directory and what the user types. Out: the answers, as they are written, on stdout; everything else
(prompt, speed, help) on stderr. The conversation is kept and sent whole each time; when it outgrows the context, the
oldest turns are dropped and that is said. It does not know HTTP: the engine runs in this process with one slot.
"""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.config import ChatConfig
from onecard.errors import ArtifactError, OnecardError
from onecard.serve.engine import Engine
from onecard.serve.opening import open_engine
from onecard.serve.requests import FinishEvent, GenerationParameters, Handle
from onecard.serve.sampling import SamplingParameters
from onecard.tokenizer.template import encode_chat, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HELP = r"""/exit          leave (also Ctrl-D, or Ctrl-C at the prompt)
/reset         begin a new conversation
/system TEXT   set the system message (empty: none) and begin anew
/retry         answer the last question again
/help          this list
A line that ends in \ goes on in the next one. Ctrl-C stops an answer."""

# Bytes with which a text could move the cursor, or worse, of the terminal that shows it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COMMANDS = ("/exit", "/reset", "/system", "/retry", "/help")

# So that a question is not read again with each that follows it.
_PREFIX_BYTES = 256 << 20


@dataclass
class _Conversation:
    """What was said so far. Turns alternate: user, assistant."""

    system: str
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """All of it, as a chat template reads it."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


def only_continues(path: Path) -> bool:
    """Whether the model is one that `onecard pretrain` left: it has a chat template and has never seen a chat."""
    try:
        plan = artifact.read_manifest(path, "run").settings.get("plan", {})
    except ArtifactError:
        return False
    return bool(plan.get("verb") == "pretrain")


class _Chat:
    """One session at the terminal or on a pipe."""

    def __init__(self, config: ChatConfig, engine: Engine, tokenizer: PreTrainedTokenizerFast) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._conversation = _Conversation(config.system)
        self._interactive, self._to_terminal = sys.stdin.isatty(), sys.stdout.isatty()
        self._continues = only_continues(config.model)
        self.answers: list[dict[str, Any]] = []

    def run(self) -> None:
        """Read lines until the end of input, /exit, or Ctrl-C at the prompt."""
        if self._continues:
            console.note("This model was not fine-tuned on chats: it continues what you write.")
        if self._interactive:
            console.note("Ask something. /help lists the commands; Ctrl-D leaves.")
        while True:
            try:
                line = self._read()
                name = line.split(maxsplit=1)[0] if line.strip() else ""
                if name == "/exit":
                    return
                if name in _COMMANDS or (name.startswith("/") and self._interactive):
                    self._command(line.strip())
                elif name:
                    self._ask(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                console.note("")
                return

    def _read(self) -> str:
        """One line; a backslash at its end joins the next."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        return console.ask(prompt if self._interactive else "")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            console.note(_HELP)
        elif name == "/reset":
            self._conversation.turns.clear()
            console.note("A new conversation.")
        elif name == "/system":
            self._conversation = _Conversation(rest.strip())
            console.note("A new conversation, " + ("with this system message." if rest.strip() else "without system."))
        elif name == "/retry":
            self._retry()
        else:
            console.note(f"There is no command {name}; /help lists them.")

    def _retry(self) -> None:
        turns = self._conversation.turns
        if turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns:
            console.note("Nothing was asked yet.")
            return
        self._ask(turns.pop()["content"])

    def _ask(self, question: str) -> None:
        turns = self._conversation.turns
        turns.append({"role": "user", "content": question})
        try:
            ids = self._fit()
            text, finish, seconds = self._answer(ids)
        except OnecardError as fault:
            turns.pop()
            console.failure(fault.what, fault.remedy)
            return
        if finish.reason == "error":
            turns.pop()
            console.warn(finish.error)
            return
        turns.append({"role": "assistant", "content": text})
        speed = finish.completion_tokens / seconds if seconds > 0 else 0.0
        self.answers.append(
            {
                "question": question,
                "answer": text,
                "finish_reason": finish.reason,
                "completion_tokens": finish.completion_tokens,
                "tokens_per_second": round(speed, 2),
            }
        )
        ending = {"length": ", cut off at its limit", "abort": ", stopped"}.get(finish.reason, "")
        console.note(f"[{finish.completion_tokens} tokens, {speed:.1f} tokens/s{ending}]")

    def _fit(self) -> list[int]:
        """Token ids of the conversation, shortened from its oldest turns until an answer has room."""
        turns, length = self._conversation.turns, self._engine.max_length
        room = min(self._config.max_new_tokens, max(length // 4, 1))
        if self._continues:
            return encode_prompt(self._tokenizer, turns[-1]["content"])[-(length - room) :]
        dropped = 0
        while True:
            messages = self._conversation.messages()
            ids = encode_chat(self._tokenizer, messages, add_generation_prompt=True).ids
            if len(ids) + room <= length or len(turns) < 3:
                break
            del turns[:2]
            dropped += 1
        if dropped:
            console.note(
                f"(The context of {length} tokens is full: its oldest {dropped} answered questions are forgotten.)"
            )
        return ids

    def _answer(self, ids: list[int]) -> tuple[str, FinishEvent, float]:
        """Stream one answer; the seconds include the reading of the prompt."""
        config = self._config
        # Each answer of a session has its own seed, so that /retry does not repeat itself.
        seed = None if config.seed is None else config.seed + len(self.answers)
        sampling = SamplingParameters(temperature=config.temperature, top_p=config.top_p, seed=seed)
        limit = max(min(config.max_new_tokens, self._engine.max_length - len(ids)), 1)
        handle = self._engine.submit(ids, GenerationParameters(max_tokens=limit, sampling=sampling))
        pieces: list[str] = []
        started = time.monotonic()
        try:
            event = self._show(handle, pieces)
        except KeyboardInterrupt:
            handle.cancel()
            event = self._show(handle, pieces)  # a second Ctrl-C is not caught here: it leaves
        console.result_fragment("\n")
        return "".join(pieces), event, time.monotonic() - started

    def _show(self, handle: Handle, pieces: list[str]) -> FinishEvent:
        """Print what comes until the answer ends."""
        for event in handle:
            pieces.append(event.text)
            console.result_fragment(_CONTROL.sub("\ufffd", event.text) if self._to_terminal else event.text)
            if isinstance(event, FinishEvent):
                return event
        raise AssertionError("an answer ends with a FinishEvent")


def chat(config: ChatConfig) -> dict[str, Any]:
    """Talk until the user leaves; returns the questions and answers with their speed.

    On a pipe each line is a question. ArtifactError if the model cannot be read.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A pipe is UTF-8 whatever the locale; a byte that is not is shown as such instead of ending the session.
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="replace")
    engine, tokenizer = open_engine(
        config.model, max_concurrent=1, precision=config.precision, prefix_bytes=_PREFIX_BYTES
    )
    try:
        session = _Chat(config, engine, tokenizer)
        session.run()
    finally:
        engine.close()
    return {"model": str(config.model), "answers": session.answers}
