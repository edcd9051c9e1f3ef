"""From sources to shards, on all cores, and on again where a killed run stopped.

In: settings and the files of the sources. Out: a working folder beside the output with one shard after another. Batches
are cut by what they hold alone, so that shards are the same whatever the number of workers, and one that is whole is
never made again. After a kill reading goes on at the last file that begins a batch.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from onecard import artifact, console
from onecard.config import CleanConfig
from onecard.data.documents import RawDocument, read_raw_items
from onecard.data.records import refuse
from onecard.data.shards import EXAMPLES, LONGEST_REJECTED_CHARACTERS, Batch, summary_of, tidy
from onecard.data.sources import source_files
from onecard.data.workers import Workers
from onecard.errors import ArtifactError
from onecard.settings import Source

BATCH_CHARACTERS = 1_000_000
BATCH_ITEMS = 4_000
# More than are shown: some turn out to be duplicates.
_CHANGED_EXAMPLES = 20
# Settings that change nothing of what is found.
_PLACES = ("output", "overwrite", "workers", "engine", "ray_address")


@dataclass
class Tally:
    """What the summaries of all shards come to."""

    shards: int = 0
    shard_sources: list[int] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_by_source: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    changes: Counter[str] = field(default_factory=Counter)
    changed_examples: list[tuple[int, str, str, str]] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)
    documents: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        """Take in the next shard."""
        self.shards += 1
        self.shard_sources.append(summary["source"])
        self.rejected.update(summary["rejected"])
        self.rejected_by_source[summary["name"]] += sum(summary["rejected"].values())
        self.changes.update(summary["changes"])
        for index, caption, *texts in summary["changed_examples"]:
            step = caption.partition(":")[0]
            if self.shown[step] < _CHANGED_EXAMPLES:
                self.shown[step] += 1
                self.changed_examples.append((self.documents + index, caption, *texts))
        self.documents += summary["documents"]
        for reason, rows in summary["examples"].items():
            self.examples[reason] += rows[: EXAMPLES - len(self.examples[reason])]


# --- the working folder -------------------------------------------------------------------------------------------


def fingerprint(config: CleanConfig, files: Sequence[Sequence[Path]]) -> str:
    """What decides the shards: the settings, the inputs as they stand, and the code."""
    here = Path(__file__).parent
    code = {path.name: artifact.hash_file(path) for path in sorted([*here.glob("*.py"), *here.glob("*.toml")])}
    others = [
        *(source_files(source) for source in config.decontaminate),
        [config.reference] if config.reference else [],
    ]
    inputs = [[_state(path) for path in paths] for paths in (*files, *others)]
    settings = {name: value for name, value in config.plain().items() if name not in _PLACES}
    return artifact.hash_json({"code": code, "inputs": inputs, "settings": settings})[:16]


def _state(path: Path) -> tuple[str, int, int]:
    if not path.exists():
        return str(path), 0, 0
    return str(path), path.stat().st_size, path.stat().st_mtime_ns


@contextmanager
def working_folder(output: Path, name: str) -> Iterator[Path]:
    """A hidden folder beside `output` that outlives a kill and an interrupt, and nothing else; `name` tells its state.

    Remains of runs with other names are cleared away. ArtifactError if another process works on the same output.
    """
    output = output.resolve()
    folder = output.with_name(f".{output.name}.{name}.clean")
    for remains in output.parent.glob(f".{_literal(output.name)}.{'[0-9a-f]' * len(name)}.clean"):
        if remains != folder and not _is_in_use(remains):
            shutil.rmtree(remains, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if not _locked(lock):
            raise ArtifactError(
                f"Another `onecard clean` is at work on {output}.", "Wait for it, or choose another --output."
            )
        try:
            yield folder
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as fault:
            if not _is_passing(fault):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    shutil.rmtree(folder, ignore_errors=True)


def _is_passing(fault: BaseException) -> bool:
    """Whether the same command may end well later (a full disk, a killed worker)."""
    from onecard.errors import MachineError

    return isinstance(fault, MachineError | OSError | MemoryError)


def _literal(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _locked(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_in_use(folder: Path) -> bool:
    with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
        return not _locked(lock)
    return False


# --- batches ------------------------------------------------------------------------------------------------------


class _Cutter:
    """Cuts the items of one source into batches, where they are large enough and, if possible, where a file ends."""

    def __init__(self, number: int, place: int, source: Source, files: Sequence[Path]) -> None:
        self._source = source
        self._place = place
        self._numbers = {str(file): number for number, file in enumerate(files)}
        self._file = ""
        self.batch = self._new(number)

    def _new(self, number: int) -> Batch:
        return Batch(number, self._place, self._source.name, self._source.language)

    def add(self, name: str, text: str, file: str, line: int, reason: str = "") -> Batch | None:
        """Take one item; returns the batch before it if that is finished."""
        done = None
        batch = self.batch
        if file != self._file:
            self._file = file
            if batch.characters >= BATCH_CHARACTERS // 2 or len(batch.ids) >= BATCH_ITEMS // 2:
                # Several names lie in one file, such as the members of an archive: reading begins at files alone.
                number = self._numbers.get(file)
                batch.next_start = None if number is None else (self._place, number)
                done = batch
        if batch.ids and (batch.characters >= BATCH_CHARACTERS or len(batch.ids) >= BATCH_ITEMS):
            done = batch
        if done is not None:
            self.batch = self._new(batch.number + 1)
        self.batch.add(name, text, file, line, reason)
        return done

    def finish(self) -> Batch | None:
        """The last batch of the source."""
        if not self.batch.ids:
            return None
        self.batch.next_start = (self._place + 1, 0)
        return self.batch


def batches(
    config: CleanConfig,
    sources: Sequence[Source],
    files: Sequence[Sequence[Path]],
    *,
    number: int = 0,
    start: tuple[int, int] = (0, 0),
    read: Callable[[str, str], None] = lambda file, text: None,
) -> Iterator[Batch]:
    """The items of all sources in batches; from batch `number`, which begins at file `start`, on.

    `read` is told the file and the text of each document. DataError as `read_raw_items` says, and with `strict` at the
    first row that cannot be read.
    """
    for place, source in enumerate(sources):
        if place < start[0]:
            continue
        first_file = start[1] if place == start[0] else 0
        cutter = _Cutter(number, place, source, files[place])
        for item in read_raw_items(source, first_file=first_file):
            if isinstance(item, RawDocument):
                read(item.file, item.text)
                done = cutter.add(item.id, item.text, item.file, item.line)
            else:
                refuse(item, strict=config.strict, reject=lambda _: None)
                name = f"{source.name}:{item.line}" if item.line else source.name
                done = cutter.add(name, item.text[:LONGEST_REJECTED_CHARACTERS], item.file, item.line, item.reason)
            if done is not None:
                yield done
        last = cutter.finish()
        number = cutter.batch.number
        if last is not None:
            number += 1
            yield last


def make_shards(
    config: CleanConfig, folder: Path, sources: Sequence[Source], files: Sequence[Sequence[Path]], workers: Workers
) -> Tally:
    """Make every shard that is not there yet."""
    sizes = {str(path): path.stat().st_size for paths in files for path in paths}
    number, start = _reached(folder)
    if number:
        console.note(f"Going on after {number:,} finished shards of an earlier run of the same command.")
    done: Counter[str] = Counter()
    settings = pickle.dumps(config)
    total = 0
    with console.progress("cleaning", sum(sizes.values()), "bytes") as bar:

        def read(file: str, text: str) -> None:
            # Bytes of text stand in for bytes of the file, which may be compressed or hold more than text.
            room = sizes.get(file, 0) - done[file]
            advance = min(len(text) if text.isascii() else len(text.encode("utf-8", "replace")), room)
            if advance > 0:
                done[file] += advance
                bar.advance(advance)

        def missing() -> Iterator[tuple[Path, bytes, Batch]]:
            nonlocal total
            total = number
            for batch in batches(config, sources, files, number=number, start=start, read=read):
                total = batch.number + 1
                if summary_of(folder, batch.number) is None:
                    yield folder, settings, batch

        for _ in workers.map(tidy, missing()):
            pass
        bar.advance(sum(sizes.values()) - done.total())
    tally = Tally()
    for at in range(total):
        summary = summary_of(folder, at)
        assert summary is not None
        tally.add(summary)
    return tally


def _reached(folder: Path) -> tuple[int, tuple[int, int]]:
    """The last batch of which it is known where it begins, all before it being whole, and the file it begins at."""
    at, reached, start = 0, 0, (0, 0)
    while (summary := summary_of(folder, at)) is not None:
        at += 1
        if summary["next_start"] is not None:
            reached, start = at, (summary["next_start"][0], summary["next_start"][1])
    return reached, start
