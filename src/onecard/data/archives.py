"""The members of a .zip, one after another, each to be opened like a file of its own. Nothing is unpacked to disk."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from onecard.data import sources
from onecard.data.encoding import OpenBytes

_ENCRYPTED = 0x1
_UTF8_NAME = 0x800


@dataclass(frozen=True, slots=True)
class Member:
    """One file inside; `fault` is why it cannot be read, if so."""

    name: str
    open: OpenBytes
    fault: str = ""


def members(path: Path) -> Iterator[Member]:
    """In the order of their names; hidden ones and what systems put beside the files are skipped.

    zipfile.BadZipFile if the archive is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        found = sorted(
            ((_name(entry), entry) for entry in archive.infolist() if not entry.is_dir()), key=lambda pair: pair[0]
        )
        for name, entry in found:
            if any(part.startswith((".", "__MACOSX")) for part in name.split("/")):
                continue
            fault = "encrypted_file" if entry.flag_bits & _ENCRYPTED else ""
            yield Member(name, functools.partial(_open, archive, entry, name), fault)


def _name(entry: zipfile.ZipInfo) -> str:
    """Names that are not marked as UTF-8 are most often UTF-8 or GB18030 all the same."""
    if entry.flag_bits & _UTF8_NAME:
        return entry.filename
    raw = entry.filename.encode("cp437", "replace")
    for encoding in ("utf-8", "gb18030"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    return entry.filename


def _open(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> BinaryIO:
    return sources.decompressed(cast(BinaryIO, archive.open(entry)), Path(name).suffix)
