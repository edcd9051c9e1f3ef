"""Directories that onecard writes: whole or absent, with their provenance.

A finished directory holds `onecard.json`: the format, what kind of thing it is, the full configuration, the parents it
was made from, the hash of each file, and the versions of the libraries. The manifest is written last, so a directory
without it is unfinished. Work is written to a sibling temporary directory, flushed, and renamed into place.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onecard
from onecard.errors import ArtifactError, of_the_system

MANIFEST = "onecard.json"
FORMAT = 1
_VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True)
class Manifest:
    """What `onecard.json` says.

    `kind` is corpus, tokenizer, tokens, model, run or evaluation. `fingerprint` is the hash of everything that decided
    the content (settings and inputs); `content_hash` is the hash of the content itself. `result` is the short summary
    that the verb printed.
    """

    kind: str
    fingerprint: str
    content_hash: str
    settings: dict[str, Any]
    parents: list[dict[str, str]]
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]
    created: str
    result: dict[str, Any]


def hash_bytes(data: bytes) -> str:
    """128-bit content hash, in hexadecimal (xxHash: fast, for identity and damage, not against forgery)."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> str:
    """128-bit content hash of a file, read in blocks of 4 MiB."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """Hash of a JSON-able value, independent of the order of keys."""
    # Under a C locale the bytes of a path that ASCII cannot hold are escaped: they become themselves again.
    return hash_bytes(_encoded(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)))


def hash_tree(path: Path) -> str:
    """Hash of a file, or of every file below a directory with its relative name (manifests and reports left out)."""
    if path.is_file():
        return hash_file(path)
    return _combined({name: entry["hash"] for name, entry in _file_table(path, payload_files(path)).items()})


def payload_files(directory: Path) -> list[Path]:
    """The files that make up the content of a directory: all but manifests and reports for people, sorted by name."""
    skipped = {MANIFEST, "report.html"}
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in skipped)


def _file_table(directory: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "hash": hash_file(path)}
        for path in files
    }


def _combined(hashes: Mapping[str, str]) -> str:
    return hash_json(sorted(hashes.items()))


def versions() -> dict[str, str]:
    """Versions of onecard, Python and the libraries that decide results."""
    found = {"onecard": onecard.__version__, "python": platform.python_version()}
    for package in _VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_text_atomically(path: Path, text: str) -> None:
    """`write_bytes_atomically` of text in UTF-8."""
    # A surrogate stands for a byte of a path that is no text; one that a JSON file brought has no byte at all.
    write_bytes_atomically(path, _encoded(text))


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part, even if power fails."""
    _clear_remains(path)
    temporary = _sibling(path, "part")
    try:
        with disk_faults(path):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            flush_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def write_json_atomically(path: Path, value: Any) -> None:
    """`write_text_atomically` of indented JSON."""
    write_text_atomically(path, json.dumps(value, ensure_ascii=False, indent=2, default=str) + "\n")


def flush_directory(path: Path) -> None:
    """Make a rename in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(path: Path) -> None:
    """Flush every file and directory below `path` to the disk."""
    for item in path.rglob("*"):
        if item.is_file():
            with item.open("rb") as file:
                os.fsync(file.fileno())
        elif item.is_dir():
            flush_directory(item)
    flush_directory(path)


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder or a missing permission into an error that the user can mend."""
    try:
        yield
    except OSError as fault:
        mendable = of_the_system(fault, path)
        if mendable is None:
            raise
        raise mendable from fault


@contextmanager
def new_directory(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `output`; on success flush it and rename it to `output`.

    On any error the temporary directory is removed and `output` is as it was. An existing `output` is refused unless
    it is empty or `replace` is true; what stood there is moved aside first and removed only after the rename. A link is
    followed. What processes that were killed left beside `output` is cleared away (or put back, if it is all there is).
    """
    output = output.resolve()
    _clear_remains(output)
    if not replace:
        _refuse_occupied(output)
    temporary = _sibling(output, "part")
    with disk_faults(output):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            flush_tree(temporary)
            _put_in_place(temporary, output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_output(output: Path, *, overwrite: bool, inputs: Iterable[Path]) -> Iterator[Path]:
    """`new_directory` for a place that a user named, after `check_output`."""
    check_output(output, overwrite=overwrite, inputs=inputs)
    with new_directory(output.resolve(), replace=overwrite) as temporary:
        yield temporary


def check_output(output: Path, *, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Nothing but what onecard made is ever replaced at a place that a user named.

    ArtifactError for an `output` that is, contains or lies inside one of `inputs` (files or directories), and for one
    that holds something, unless onecard made it and `overwrite` is true. Verbs ask before long work, too.
    """
    place = output.resolve()
    for path in inputs:
        source = path.resolve()
        if place == source or place.is_relative_to(source) or source.is_relative_to(place):
            relation = "is" if place == source else "contains" if source.is_relative_to(place) else "lies inside"
            raise ArtifactError(f"The output {place} {relation} the input {source}.", "Choose another --output.")
    _clear_remains(place)
    if not (overwrite and _is_finished(place)):
        _refuse_occupied(place)


def _refuse_occupied(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if _is_finished(output):
        raise ArtifactError(f"{output} already exists.", "Choose another --output, or pass --overwrite to replace it.")
    raise ArtifactError(f"{output} already exists and was not made by onecard.", "Choose another --output.")


def _is_finished(directory: Path) -> bool:
    """Whether onecard made it: there is a manifest that can be read."""
    try:
        read_manifest(directory)
    except (ArtifactError, OSError):
        return False
    return True


def _put_in_place(temporary: Path, output: Path) -> None:
    """Rename `temporary` to `output`; what stood there stays if that fails."""
    aside = None
    if output.exists():
        aside = _sibling(output, "old")
        output.replace(aside)
    try:
        temporary.replace(output)
    except BaseException:
        if aside is not None:
            aside.replace(output)
        raise
    flush_directory(output.parent)
    if aside is not None:
        _remove(aside)


def _sibling(path: Path, ending: str) -> Path:
    """A hidden name beside `path` with the process that uses it: .NAME.MACHINE-PROCESS-RANDOM.ENDING"""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{ending}")


def _machine() -> str:
    return hash_bytes(platform.node().encode("utf-8", "surrogateescape"))[:6]


def _clear_remains(output: Path) -> None:
    """Remove what dead processes of this machine left beside `output`; put an old state back if nothing replaced it."""
    if not output.parent.is_dir():
        return
    pattern = re.compile(re.escape(f".{output.name}.{_machine()}-") + r"(\d+)-[0-9a-f]{8}\.(part|old)")
    for path in sorted(output.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        # A folder that we may read but not write keeps them; the write itself says so, if there is one.
        with contextlib.suppress(OSError):
            if match[2] == "old" and not output.exists():
                path.replace(output)
            else:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    import psutil

    return process == os.getpid() or bool(psutil.pid_exists(process))


def write_manifest(
    directory: Path,
    kind: str,
    *,
    settings: Mapping[str, Any],
    parents: Iterable[Path] = (),
    fingerprint: str = "",
    result: Mapping[str, Any] | None = None,
    files: Iterable[Path] | None = None,
) -> Manifest:
    """Hash the files of `directory` and write its `onecard.json`: the last act of making it.

    `parents` are files or directories it was made from (recorded with their content hashes); `files` restricts the
    content that is hashed (default: everything but reports).
    """
    table = _file_table(directory, payload_files(directory) if files is None else files)
    manifest = Manifest(
        kind=kind,
        fingerprint=fingerprint or hash_json(settings),
        content_hash=_combined({name: entry["hash"] for name, entry in table.items()}),
        settings=dict(settings),
        parents=[{"path": str(path), "content_hash": content_hash(path)} for path in parents],
        files=table,
        versions=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        result=dict(result or {}),
    )
    write_json_atomically(directory / MANIFEST, {"format": FORMAT, **manifest.__dict__})
    return manifest


def content_hash(path: Path) -> str:
    """The content hash of a file or directory: from its manifest where it has one, else computed."""
    if (path / MANIFEST).is_file():
        return read_manifest(path).content_hash
    return hash_tree(path)


def read_manifest(directory: Path, kind: str | None = None) -> Manifest:
    """Read `onecard.json`; ArtifactError if it is missing, unreadable, of another version or of another kind."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise ArtifactError(f"{directory} is not a directory.", "Check the path; make it with the stage before.")
    if not path.is_file():
        raise ArtifactError(
            f"{directory} has no {MANIFEST}: it was not finished, or not made by onecard.",
            "Run the command that makes it again.",
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = int(raw.pop("format"))
        if found != FORMAT:
            raise ArtifactError(
                f"{path} has format {found}; this onecard {onecard.__version__} reads format {FORMAT}.",
                "Make the directory again with this version, or use the version that made it "
                f"({raw.get('versions', {}).get('onecard', 'unknown')}).",
            )
        manifest = Manifest(**raw)
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ArtifactError(f"{path} is damaged ({fault}).", "Run the command that makes it again.") from fault
    if kind is not None and manifest.kind != kind:
        raise ArtifactError(
            f"{directory} holds a {manifest.kind}, not a {kind}.", f"Give a directory that holds a {kind}."
        )
    return manifest


def verify(directory: Path) -> Manifest:
    """Compare every file with its hash in the manifest; ArtifactError names the first that differs."""
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing.", "Run the command that makes it again.")
        if path.stat().st_size != entry["bytes"] or hash_file(path) != entry["hash"]:
            raise ArtifactError(f"{path} is damaged or was changed by hand.", "Run the command that makes it again.")
    return manifest


def accept_change(path: Path) -> None:
    """Record what a file is now in the manifests of the directories above it that name it.

    For settings that a person may change in a finished directory. The content hash stays: it names what was made, and
    by it the stages of a recipe know that nothing has to be made again.
    """
    for directory in (path.parent, path.parent.parent):
        if not (directory / MANIFEST).is_file():
            continue
        manifest = read_manifest(directory)
        name = path.relative_to(directory).as_posix()
        if name in manifest.files:
            files = {**manifest.files, **_file_table(directory, [path])}
            write_json_atomically(directory / MANIFEST, {"format": FORMAT, **manifest.__dict__, "files": files})
