"""How long an update takes here: real updates, on a state that is put back afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onecard.train.loop import Loop

# Measuring goes on until so many updates or seconds; slow updates are measured once.
MOST_UPDATES, ENOUGH_SECONDS = 20, 5.0


def seconds_per_update(make_loop: Callable[[int], Loop], model: Any, *, micro_batches: int) -> float:
    """Seconds of an update of so many micro-batches, from updates of one and of two.

    `make_loop(n)` gives a loop whose updates have n micro-batches. Weights, buffers and generators are left as found.
    """
    model.train()
    with left_as_found(model):
        seconds = once = _median(make_loop(1), warm_up=2)
        if micro_batches > 1:
            seconds += (micro_batches - 1) * max(0.0, _median(make_loop(2), warm_up=0) - once)
    return seconds


@contextmanager
def left_as_found(model: Any) -> Iterator[None]:
    """Put weights that are trained, buffers and generators back, bit for bit, at the end."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    before = [(tensor, tensor.detach().clone()) for tensor in (*trained, *model.buffers())]
    generator = torch.get_rng_state()
    on_card = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        torch.set_rng_state(generator)
        if on_card is not None:
            torch.cuda.set_rng_state(on_card)


def _median(loop: Loop, *, warm_up: int) -> float:
    """Median seconds of updates after the first ones, which compile."""
    epoch = loop.order.updates_per_epoch
    for number in range(warm_up):
        loop.update(number % epoch)
    times: list[float] = []
    while sum(times) < ENOUGH_SECONDS and len(times) < MOST_UPDATES:
        at = time.perf_counter()
        loop.update(len(times) % epoch)
        if loop.precision.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - at)
    loop.close()
    loop.optimizers.close()
    return statistics.median(times)
