"""Batches made ahead: the same for any number of threads, in order, and errors reach the one who takes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from onecard.data.batches import RowOrder
from onecard.data.prefetch import Prefetch


@pytest.mark.parametrize("workers", [1, 4])
def test_two_epochs_give_each_row_once_an_epoch_and_distinct_draws(workers: int) -> None:
    """A random number drawn for each row: the same for any number of threads, another in each epoch."""
    order = RowOrder([5, 5], [1.0, 1.0], seed=3, rows_per_update=2)

    def make(update: int) -> list[tuple[int, float]]:
        time.sleep(0.002 * (update % 3))  # threads finish out of order
        return [
            (row, np.random.default_rng([3, update, row]).random())  # a function of seed, update and row
            for row in order.rows_of_update(update)
        ]

    with_threads = Prefetch(make, ahead=4, workers=workers)
    taken = [with_threads.take(update) for update in range(2 * order.updates_per_epoch)]
    with_threads.close()
    assert taken == [make(update) for update in range(10)]
    first, second = ([item for update in taken[a:b] for item in update] for a, b in ((0, 5), (5, 10)))
    assert sorted(row for row, _ in first) == sorted(row for row, _ in second) == list(range(10))
    assert len({draw for _, draw in [*first, *second]}) == 20


def test_the_next_is_made_while_the_present_one_is_used() -> None:
    made: list[int] = []
    second = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 1:
            second.set()
        return number

    ahead = Prefetch(make, ahead=1)
    assert ahead.take(0) == 0
    assert second.wait(5)  # nobody has asked for it yet
    assert ahead.take(1) == 1 and made[:2] == [0, 1]
    ahead.close()
    assert made.count(1) == 1


def test_any_number_may_be_asked_for_and_what_was_begun_in_vain_is_dropped() -> None:
    ahead = Prefetch(lambda number: number * 10, ahead=2)
    assert [ahead.take(n) for n in (0, 7, 3, 3, 4)] == [0, 70, 30, 30, 40]
    assert sorted(ahead._begun) == [5, 6]
    ahead.close()


def test_an_error_reaches_the_one_who_takes() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise OSError("gone")
        return number

    ahead = Prefetch(make)
    assert ahead.take(0) == 0
    with pytest.raises(OSError, match="gone"):
        ahead.take(1)
    assert ahead.take(2) == 2
    ahead.close()


def test_waiting_is_measured() -> None:
    ahead = Prefetch(lambda number: time.sleep(0.05 if number == 0 else 0) or number, ahead=1)
    ahead.take(0)
    assert ahead.waited_seconds >= 0.05
    time.sleep(0.1)
    ahead.take(1)
    assert ahead.waited_seconds < 0.05
    ahead.close()
