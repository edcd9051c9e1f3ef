"""From token ids to text as they come: whole characters only, and never a character of a stop string.

In: ids one by one. Out: text that is safe to send; the pieces joined are the whole answer. Every token is turned into
its bytes once; bytes become characters through an incremental UTF-8 decoder, which holds back three bytes at most, so
invalid bytes cannot stall the stream. For a byte-level tokenizer the result is exactly `tokenizer.decode` of all ids.
For one with byte fallback a valid character stays valid beside invalid bytes (where `decode` gives the whole run up).
It does not know logits, requests or HTTP.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable Latin-1, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token adds to a text.

    It works on a copy of the tokenizer, so that threads that encode meanwhile are not in its way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        described = json.loads(self._backend.to_str())
        decoder = described.get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        self._is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
        self._has_byte_tokens = any(part.get("type") == "ByteFallback" for part in parts)
        self.special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.size: int = max(tokenizer.get_vocab().values()) + 1
        self._alphabet = _byte_alphabet()
        self._known: dict[int, bytes] = {}
        self._anchor = None if self._is_byte_level else self._find_anchor()

    def __call__(self, token_id: int, *, first: bool = False, special: bool = False) -> bytes:
        """Bytes of a token after others, or as the `first` of a text (some tokenizers drop its leading space).

        Special tokens are empty, unless `special` asks for their spelling.
        """
        if token_id in self.special_ids and not special:
            return b""
        if first and not self._is_byte_level and not self._byte_token(token_id):
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def _byte_token(self, token_id: int) -> re.Match[str] | None:
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") if self._has_byte_tokens else None

    def _compute(self, token_id: int) -> bytes:
        spelling = self._backend.id_to_token(token_id)
        if spelling is None:
            return b""
        if self._is_byte_level:
            numbers = [self._alphabet.get(character) for character in spelling]
            return spelling.encode() if None in numbers else bytes(n for n in numbers if n is not None)
        if match := self._byte_token(token_id):
            return bytes([int(match[1], 16)])
        anchor, text = self._anchor or (None, "")
        ids = [token_id] if anchor is None else [anchor, token_id]
        return str(self._backend.decode(ids, skip_special_tokens=False))[len(text) :].encode()

    def _find_anchor(self) -> tuple[int, str] | None:
        """An ordinary token; what another token adds after it is what that one adds inside a text."""
        for token_id in range(self.size):
            text = str(self._backend.decode([token_id], skip_special_tokens=True))
            if len(text) == 1 and text.isascii() and text.isalpha():
                return token_id, text
        return None


class StopStrings:
    """Holds back what may become a stop string; cuts the text at the first one that is complete.

    The first is the one that ends first (of those, the longest): the same however the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take more text, give what may be sent. After a stop string nothing more comes."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            sent, self._held = self._held[:start], ""
            return sent
        keep = max(self._beginning(stop) for stop in self._stops)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent

    def flush(self) -> str:
        """Give what was held back, at the end of the text."""
        sent, self._held = self._held, ""
        return sent

    def _beginning(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Detokenizer:
    """The text of one answer, token by token. `continues` says that it goes on from a prompt's text."""

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = (), *, continues: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop_strings = StopStrings(stops)
        self._at_start = not continues

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop_strings.stopped

    def feed(self, token_id: int) -> str:
        """Text that may be sent after this token; often empty."""
        piece = self._token_bytes(token_id, first=self._at_start)
        self._at_start = self._at_start and not piece
        return self._stop_strings.feed(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest: an unfinished character becomes U+FFFD, a near-miss of a stop string is sent."""
        return self._stop_strings.feed(self._decoder.decode(b"", final=True)) + self._stop_strings.flush()
