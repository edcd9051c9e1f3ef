from __future__ import annotations

from collections import Counter

import pytest

from onecard.data.batches import RowOrder


def epoch_rows(order: RowOrder, epoch: int) -> list[int]:
    first = epoch * order.updates_per_epoch
    return [row for u in range(first, first + order.updates_per_epoch) for row in order.rows_of_update(u)]


def test_each_row_once_an_epoch_and_an_odd_tail() -> None:
    """10 rows, 4 an update: 3 updates, the last of two rows."""
    order = RowOrder([10], [1.0], seed=0, rows_per_update=4)
    assert order.updates_per_epoch == 3
    assert [len(order.rows_of_update(u)) for u in range(6)] == [4, 4, 2, 4, 4, 2]
    first, second = epoch_rows(order, 0), epoch_rows(order, 1)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10))


def test_any_update_is_reached_without_walking() -> None:
    walked = RowOrder([13, 7], [1.5, 1.0], seed=4, rows_per_update=3)
    path = [walked.rows_of_update(u) for u in range(60)]
    for update in (59, 0, 31, 7):
        assert RowOrder([13, 7], [1.5, 1.0], seed=4, rows_per_update=3).rows_of_update(update) == path[update]


@pytest.mark.parametrize("weight", [2.0, 0.5, 0.3])
def test_weights_give_every_row_equally_many_visits(weight: float) -> None:
    order = RowOrder([10, 6], [weight, 1.0], seed=1, rows_per_update=4)
    assert order.rows_per_epoch == round(10 * weight) + 6
    visits = Counter(row for epoch in range(10) for row in epoch_rows(order, epoch))
    assert {visits[row] for row in range(10)} == {round(10 * weight)}
    assert {visits[row] for row in range(10, 16)} == {10}


def test_a_source_of_weight_0_is_left_out() -> None:
    order = RowOrder([3, 4], [0.0, 1.0], seed=1, rows_per_update=4)
    assert sorted(epoch_rows(order, 0)) == [3, 4, 5, 6]


def test_another_seed_is_another_order() -> None:
    orders = [epoch_rows(RowOrder([30], [1.0], seed=s, rows_per_update=4), 0) for s in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_an_order_goes_on_in_other_steps_where_it_was() -> None:
    """10 rows, 4 an update; after the first update 3 an update: 3, 3 are left of the epoch, then 3, 3, 3, 1."""
    before = RowOrder([10], [1.0], seed=0, rows_per_update=4)
    after = before.changed(1, rows_per_update=3)
    assert after.first == (0, 4)
    taken = [before.rows_of_update(0), *(after.rows_of_update(u) for u in range(6))]
    assert [len(rows) for rows in taken] == [4, 3, 3, 3, 3, 3, 1]
    assert sum(taken[:3], []) == epoch_rows(before, 0)
    assert sum(taken[3:], []) == epoch_rows(before, 1)
    assert after.changed(3).rows_of_update(1) == after.rows_of_update(4)
    # At the end of an epoch the next one begins.
    assert before.changed(3, rows_per_update=2).first == (1, 0)


def test_another_mix_begins_with_a_new_epoch() -> None:
    before = RowOrder([10, 6], [1.0, 1.0], seed=0, rows_per_update=4)
    after = before.changed(1, weights=[0.0, 1.0])
    assert after.first == (1, 0)
    assert sorted(epoch_rows(after, 0)) == list(range(10, 16))
    assert before.changed(0, weights=[2.0, 1.0]).first == (0, 0)
    assert before.changed(2, weights=[1.0, 1.0]).rows_of_update(0) == before.rows_of_update(2)
