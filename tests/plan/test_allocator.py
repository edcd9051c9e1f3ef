"""The caching allocator, by requests whose blocks and segments are worked out by hand."""

from __future__ import annotations

import pytest

from onecard.plan.allocator import (
    HOPPER_WORKSPACE_BYTES,
    KIB,
    MIB,
    CachingAllocator,
    Usage,
    context_bytes,
    rounded,
    simulate,
    workspace_bytes,
)


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (512, 512), (513, 1024), (1536, 1536), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_blocks_are_multiples_of_512_bytes(requested: int, block: int) -> None:
    assert rounded(requested) == block


@pytest.mark.parametrize(
    ("requested", "segment"),
    [
        (1, 2 * MIB),  # small requests share segments of 2 MiB
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),  # up to 10 MiB: of 20 MiB
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from there a segment of their own, in steps of 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_the_first_request_decides_the_segment(requested: int, segment: int) -> None:
    assert simulate([(1, requested)]).peak_reserved_bytes == segment


def test_small_and_large_requests_do_not_share_segments() -> None:
    # 1 MiB lies in a small segment though a large one has 15 MiB left.
    assert simulate([(1, 5 * MIB), (2, MIB)]).peak_reserved_bytes == 22 * MIB


def test_a_rest_of_up_to_a_mib_stays_with_its_block() -> None:
    # 101 MiB in a segment of 102: the rest of 1 MiB is not cut off, and counts as handed out.
    assert simulate([(1, 101 * MIB)]) == Usage(102 * MIB, 102 * MIB, 102 * MIB, 102 * MIB)
    # 100.5 MiB in 102: the rest of 1.5 MiB is cut off.
    assert simulate([(1, 100 * MIB + 512 * KIB)]).peak_allocated_bytes == 100 * MIB + 512 * KIB


def test_what_is_freed_serves_the_next_request_of_its_size() -> None:
    events = [(1, 30 * MIB), (1, 0), (2, 30 * MIB), (2, 0)]
    assert simulate(events) == Usage(30 * MIB, 30 * MIB, 0, 30 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    # Free: 40 and 30 MiB. 30 takes the 30, so that 40 still finds its block.
    events = [(1, 40 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 30 * MIB), (4, 40 * MIB)]
    assert simulate(events).peak_reserved_bytes == 70 * MIB


def test_a_cut_block_leaves_no_room_for_what_was_there() -> None:
    # A state of 12 MiB made in the hole of 100 stays: the next 100 needs a segment of its own.
    events = [(1, 100 * MIB), (1, 0), (2, 12 * MIB), (3, 100 * MIB)]
    assert simulate(events) == Usage(112 * MIB, 200 * MIB, 112 * MIB, 200 * MIB)


def test_free_neighbours_become_one_block() -> None:
    # 100 is cut into 40 and 60; both freed, in either order, they serve 100 again.
    begin = [(1, 100 * MIB), (1, 0), (2, 40 * MIB), (3, 60 * MIB)]
    for order in ([(2, 0), (3, 0)], [(3, 0), (2, 0)]):
        assert simulate([*begin, *order, (4, 100 * MIB)]).peak_reserved_bytes == 100 * MIB
    assert simulate([*begin, (2, 0), (4, 100 * MIB)]).peak_reserved_bytes == 200 * MIB


def test_three_blocks_join_around_the_last_one_freed() -> None:
    events = [(1, 90 * MIB), (1, 0), (2, 30 * MIB), (3, 30 * MIB), (4, 30 * MIB), (2, 0), (4, 0), (3, 0), (5, 90 * MIB)]
    assert simulate(events).peak_reserved_bytes == 90 * MIB


def test_small_blocks_fill_their_segment_to_the_end() -> None:
    # 4,096 blocks of 512 bytes are 2 MiB; one more needs a second segment.
    full = [(number, 1) for number in range(4096)]
    assert simulate(full).peak_reserved_bytes == 2 * MIB
    assert simulate([*full, (4096, 1)]).peak_reserved_bytes == 4 * MIB


def test_expandable_segments_grow_by_pages_and_have_no_holes_between_segments() -> None:
    # 100 is freed and 12 taken from it: 100 more needs 12 beyond what is there, one page of 20.
    events = [(1, 100 * MIB), (1, 0), (2, 12 * MIB), (3, 100 * MIB)]
    assert simulate(events, expandable=True) == Usage(112 * MIB, 120 * MIB, 112 * MIB, 120 * MIB)


def test_an_expandable_rest_is_always_cut_off() -> None:
    assert simulate([(1, 19 * MIB + 512 * KIB)], expandable=True).peak_allocated_bytes == 19 * MIB + 512 * KIB


def test_an_expandable_end_is_the_last_choice() -> None:
    # Free: 20 MiB at the front and 10 at the end, of a segment of 60. 10 MiB goes to the front and leaves the end.
    events = [(1, 20 * MIB), (2, 30 * MIB), (1, 0), (3, 10 * MIB)]
    allocator = CachingAllocator(expandable=True)
    for id_, size in events:
        allocator.allocate(id_, size) if size else allocator.release(id_)
    assert allocator.reserved_bytes == 60 * MIB
    # Only a free end of 10 serves 30 with one page; had 10 been taken there, two were needed.
    allocator.allocate(4, 30 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_a_full_card_gives_the_cache_back_before_it_fails() -> None:
    events = [(1, 60 * MIB), (1, 0), (2, 80 * MIB)]
    assert simulate(events, capacity_bytes=100 * MIB) == Usage(80 * MIB, 80 * MIB, 80 * MIB, 80 * MIB, True, 1)
    assert simulate(events, capacity_bytes=140 * MIB).retries == 0
    assert not simulate([(1, 60 * MIB), (2, 50 * MIB)], capacity_bytes=100 * MIB).fits
    assert not simulate([(1, 60 * MIB), (2, 50 * MIB)], capacity_bytes=100 * MIB, expandable=True).fits


def test_a_segment_that_is_used_in_part_cannot_be_given_back() -> None:
    # 12 of 100 are in use: the cache cannot give the rest back, and 60 do not fit beside it.
    events = [(1, 100 * MIB), (1, 0), (2, 12 * MIB), (3, 90 * MIB)]
    assert not simulate(events, capacity_bytes=150 * MIB).fits
    # An expandable segment has 88 at its end already, and grows by one page of 20.
    assert simulate(events, capacity_bytes=150 * MIB, expandable=True).fits


def test_an_id_is_used_again_after_it_was_freed() -> None:
    assert simulate([(7, 12 * MIB), (7, 0), (7, 14 * MIB)]).peak_reserved_bytes == 26 * MIB


def test_workspaces_are_those_torch_makes() -> None:
    assert workspace_bytes((8, 6)) == (8_519_680, 8_519_680)
    assert workspace_bytes((9, 0)) == (HOPPER_WORKSPACE_BYTES,) * 2 == (33_554_432,) * 2
    assert workspace_bytes(None) == ()


def test_a_context_is_taken_on_cards_only() -> None:
    assert context_bytes(None) == 0
    assert 300 * MIB <= context_bytes((8, 9)) <= context_bytes((9, 0)) <= 1000 * MIB
