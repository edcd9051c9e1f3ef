"""The page to chat on: one HTML file without anything from elsewhere.

In: the model's name, and whether a key is asked for. Out: HTML, and the headers that forbid it all it does not need.
Text of users and models is put into the page as text, never as HTML. It does not know the engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from pathlib import Path


@lru_cache
def _template() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """What a Content-Security-Policy calls the one script or style of the page."""
    text = _template().split(f"<{tag}>")[1].split(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def html(model: str, *, asks_key: bool) -> str:
    """The page for one model."""
    # In a data attribute: quotes and angle brackets are escaped twice over.
    settings = json.dumps({"model": model, "key": asks_key}, ensure_ascii=True)
    escaped = settings.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
    return _template().replace("@SETTINGS@", escaped)
