"""Token stores that are not made twice: the same text, tokenizer and settings give the stores of an earlier run.

In: a key (the hash of everything that decides the ids) and the places of stores. Out: those stores, linked from the
cache, with what was noted when they were made. The cache lies in $ONECARD_TOKEN_CACHE, else in $XDG_CACHE_HOME or
~/.cache, below onecard/tokens; ONECARD_TOKEN_CACHE=none switches it off. It holds 20 GB at most: what was used longest
ago goes first, and a set of stores of more than half of that is not kept. Files are linked, so that on one disk a store
takes its room once. Nothing that goes wrong here stops a run: the stores are then made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onecard import artifact
from onecard.errors import ArtifactError, OnecardError

MOST_BYTES = 20 * 10**9
# Of a store; what others write beside these belongs to the run.
STORE_FILES = ("tokens.bin", "documents.npy", "sources.npy", "learned.bin", "meta.json")
_FACTS = "facts.json"


def folder() -> Path | None:
    """Where the cache lies; None if it is switched off."""
    named = os.environ.get("ONECARD_TOKEN_CACHE")
    if named == "none":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "onecard" / "tokens"


def fetch(key: str, stores: Mapping[str, Path], files: Mapping[str, Path] | None = None) -> dict[str, Any] | None:
    """Put the stores of `key`, and single files, at their places; returns the facts noted with them.

    None if they are not kept.
    """
    place = folder()
    if place is None or not (place / key / _FACTS).is_file():
        return None
    try:
        facts: dict[str, Any] = json.loads((place / key / _FACTS).read_text(encoding="utf-8"))
        for name, directory in stores.items():
            with artifact.new_directory(directory, replace=True) as temporary:
                _link(place / key / name, temporary)
        for name, path in (files or {}).items():
            path.unlink(missing_ok=True)
            _link_file(place / key / name, path)
        os.utime(place / key)
    except (OSError, ValueError, OnecardError):
        return None
    return facts


def keep(
    key: str, stores: Mapping[str, Path], facts: Mapping[str, Any], files: Mapping[str, Path] | None = None
) -> None:
    """Keep finished stores, single files, and what should be known with them, for the next run of this key."""
    place = folder()
    size = sum(_size(directory) for directory in stores.values())
    if place is None or size > MOST_BYTES / 2:
        return
    with suppress(OSError, ArtifactError):
        place.mkdir(parents=True, exist_ok=True)
        _make_room(place, size)
        with artifact.new_directory(place / key, replace=True) as temporary:
            for name, directory in stores.items():
                (temporary / name).mkdir()
                _link(directory, temporary / name)
            for name, path in (files or {}).items():
                _link_file(path, temporary / name)
            artifact.write_json_atomically(temporary / _FACTS, facts)


def _link(source: Path, target: Path) -> None:
    """The files of a store in another directory: links where the disk is the same, copies elsewhere."""
    for name in STORE_FILES:
        if (source / name).is_file():
            _link_file(source / name, target / name)


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _make_room(place: Path, size: int) -> None:
    """Remove what was used longest ago until `size` more bytes fit."""
    entries = sorted((path for path in place.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = {path: sum(_size(store) for store in path.iterdir() if store.is_dir()) for path in entries}
    for path in entries:
        if sum(sizes.values()) + size <= MOST_BYTES:
            return
        shutil.rmtree(path, ignore_errors=True)
        del sizes[path]


def _size(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in STORE_FILES if (directory / name).is_file())
