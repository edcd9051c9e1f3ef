"""Signals that end a run: noted when they come, obeyed by the loop at the next completed update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGHUP; obeyed by the loop at the next completed update.

    The handler only takes note: printing here could meet the stream in the middle of another print.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the signals that end a run; a second one changes nothing, so it cannot spoil a save.

    One that is ignored stays ignored: that is how nohup keeps a run alive when its terminal is closed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    caught = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in caught:
        signal.signal(number, request)
    try:
        yield request
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
