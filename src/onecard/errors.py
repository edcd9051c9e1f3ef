"""The errors a user can mend.

    OnecardError                 exit status 2
    ├── ConfigError              a setting is unknown, wrong, or contradicts another
    ├── DataError                a file or a row of it cannot be used (file, line)
    ├── ArtifactError            a directory made by onecard is missing, foreign, damaged or does not belong here
    ├── MissingExtra             an optional package is not installed
    ├── Interrupted              the user (or the system) stopped the run; the work is saved     exit status 130
    └── MachineError             the machine is not fit                                        exit status 3
        └── DoesNotFit           the plan needs more memory or disk than there is

Each carries two sentences: what is wrong, and what to do about it. Only `cli` catches them; anything else is a bug.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any


class OnecardError(Exception):
    """A fault that the user can mend: `what` is wrong in one line, `remedy` says in one line what to do."""

    exit_status = 2
    # What `--json` prints although the verb failed.
    document: Any = None

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        # By default a copy (from a worker to its parent) would be made by calling the class with the one line.
        return _copied, (type(self), self.args, vars(self))


def _copied(kind: type[OnecardError], lines: tuple[Any, ...], state: dict[str, Any]) -> OnecardError:
    made = kind.__new__(kind, *lines)
    vars(made).update(state)
    return made


class ConfigError(OnecardError):
    """A setting is unknown, of the wrong kind, out of range, or contradicts another."""


class DataError(OnecardError):
    """A file, or one row of it, cannot be used.

    `file` and `line` (physical, counted from 1) say where, if known; they are put before `what`.
    """

    def __init__(self, what: str, remedy: str, *, file: Path | str | None = None, line: int | None = None) -> None:
        place = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(place + what, remedy)
        self.file = file
        self.line = line


class ArtifactError(OnecardError):
    """A directory written by onecard is missing, incomplete, damaged, of another version, or does not belong here."""


class MissingExtra(OnecardError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, purpose: str, *, install: str | None = None) -> None:
        super().__init__(f"{purpose} needs the package {package}.", f"Install it: pip install {install or package}")


class Interrupted(OnecardError):
    """The run was stopped from outside and its work is saved."""

    exit_status = 130


class MachineError(OnecardError):
    """The machine cannot do what was asked."""

    exit_status = 3


class DoesNotFit(MachineError):
    """The plan needs more memory or disk than the machine has."""


def of_the_system(fault: OSError, place: Path | str | None = None) -> OnecardError | None:
    """What the operating system refused, as an error that the user can mend; None if it is none.

    `place` is what was being written, for faults that name no file themselves (such as a full disk).
    """
    name = fault.filename if fault.filename is not None else place
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return ArtifactError(
            f"The disk is full while writing {place or name or 'a file'}.",
            "Free some space (or choose another --output) and run the same command again; finished work is kept.",
        )
    if fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENAMETOOLONG, errno.ELOOP):
        return ArtifactError(
            f"{name or 'A file'} cannot be used ({fault.strerror}).",
            "Check it and its permissions; where it is an output, choose another --output.",
        )
    if fault.errno == errno.ENOTDIR and place is not None:
        return ArtifactError(f"{place} cannot be made: a part of its path is a file.", "Choose another --output.")
    return None
