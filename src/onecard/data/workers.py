"""Worker processes: plain functions applied to a stream of arguments on several cores, answers in order.

In: a function of a module and an iterable of argument tuples, read only a little ahead. Out: its answers, in the order
of the arguments, whatever the number of workers. A worker is a Python process of its own that reads calls from its
standard input and ends when that is closed, so none outlives its parent, and a caller's script needs no main guard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import onecard
from onecard.errors import MachineError

# Calls that wait for each worker, so that it never waits for the parent; more would only hold memory.
AHEAD = 2
# A worker is one core's worth: libraries inside must not start threads of their own.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`count` processes, started at the first call; with a count of 1 everything runs in this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._children: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker") if count > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        if self._threads is None:
            return
        for child in self._children:
            if kind is not None:
                child.kill()
            with contextlib.suppress(OSError):  # one that died cannot be told
                child.stdin.close()  # type: ignore[union-attr]
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]

    def map(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The answers of `function(*call)` for each call, in order. What it raises is raised here.

        MachineError if a worker ends by itself (as when the system kills it for its memory).
        """
        if self._threads is None:
            yield from (function(*call) for call in calls)
            return
        if not self._children:
            self._start()
        waiting: deque[Future[Any]] = deque()
        for call in calls:
            waiting.append(self._threads.submit(self._call, function, call))
            while waiting[0].done() or len(waiting) >= self.count * AHEAD:
                yield waiting.popleft().result()
                if not waiting:
                    break
        while waiting:
            yield waiting.popleft().result()

    def _start(self) -> None:
        place = str(Path(onecard.__file__).parent.parent)
        paths = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
        for _ in range(self.count):
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", "from onecard.data.workers import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
            )
            self._children.append(child)
            self._idle.put(child)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        child = self._idle.get()
        assert child.stdin is not None and child.stdout is not None
        try:
            pickle.dump((function, arguments), child.stdin, protocol=5)
            child.stdin.flush()
            done, answer, told = pickle.load(child.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as fault:
            raise MachineError(
                "A worker process ended by itself (perhaps the system needed its memory).",
                "Run the same command again with fewer --workers; what was finished is kept.",
            ) from fault
        finally:
            self._idle.put(child)
        if done:
            return answer
        answer.add_note(told)
        raise answer


def serve() -> None:
    """A worker's life: calls from standard input, answers to standard output, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    with contextlib.suppress(BrokenPipeError), answers:
        while True:
            try:
                function, arguments = pickle.load(calls)
            except EOFError:
                return
            try:
                answer = (True, function(*arguments), "")
            except Exception as fault:  # noqa: BLE001 (it is raised in the parent)
                answer = (False, _portable(fault), traceback.format_exc())
            pickle.dump(answer, answers, protocol=5)
            answers.flush()


def _portable(fault: Exception) -> Exception:
    """The fault itself if it survives the way to the parent, else its words."""
    try:
        pickle.loads(pickle.dumps(fault))
    except Exception:  # noqa: BLE001 (whatever it is that cannot be pickled)
        return RuntimeError(f"{type(fault).__name__}: {fault}")
    return fault
