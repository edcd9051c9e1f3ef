"""Making the batches of the next updates in background threads while the present one computes.

What is made is a function of its number alone, so neither the count of threads nor their pace changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Prefetch(Generic[Made]):
    """`take(n)` gives `make(n)`; n + 1 to n + `ahead` are begun meanwhile. `waited_seconds`: how long the last took."""

    def __init__(self, make: Callable[[int], Made], *, ahead: int = 2, workers: int = 1) -> None:
        self._make, self._ahead = make, ahead
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
        self._begun: dict[int, Future[Made]] = {}
        self.waited_seconds = 0.0

    def take(self, number: int) -> Made:
        """What `make(number)` gives (or raises)."""
        started = time.perf_counter()
        found = self._begin(number)
        wanted = range(number + 1, number + 1 + self._ahead)
        for other in [begun for begun in self._begun if begun not in wanted]:
            self._begun.pop(other).cancel()
        for other in wanted:
            self._begun[other] = self._begin(other)
        made = found.result()
        self.waited_seconds = time.perf_counter() - started
        return made

    def _begin(self, number: int) -> Future[Made]:
        begun = self._begun.pop(number, None)
        return self._threads.submit(self._make, number) if begun is None else begun

    def close(self) -> None:
        """End the threads; what they had begun is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._begun.clear()
