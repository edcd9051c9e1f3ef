"""What PyTorch's CUDA caching allocator makes of a step's allocations, and what a card loses beside it.

In: events in their order, `(id, bytes)` with bytes > 0 to allocate and 0 to free, of one stream. Out: the most bytes
handed out and the most bytes taken from the card. The allocator rounds, cuts large segments into blocks, keeps what is
freed and gives nothing back until the card is full: which blocks fit where decides how much more is reserved than used.
Knows no tensors and no models. The rules are those of c10/cuda/CUDACachingAllocator (unchanged from torch 1.10 to 2.13)
with its default settings; expandable segments are those of `PYTORCH_ALLOC_CONF=expandable_segments:True`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
SMALLEST_BLOCK = 512  # everything is a multiple of it
SMALL = 1 * MIB  # up to here from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # one of these serves requests below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # from here on a request gets a segment of its own size ...
LARGE_ROUNDING = 2 * MIB  # ... rounded up to this

Event = tuple[int, int]


@dataclass(frozen=True)
class Usage:
    """What a run of events took: blocks handed out, and memory held from the card; at their peaks, and at the end.

    `fits` is False where even a card emptied of what is cached could not serve a request (only with a capacity).
    `retries` counts how often the cache had to be emptied for a request to be served.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    fits: bool = True
    retries: int = 0


class _Block:
    """A piece of a segment, between its neighbours in memory."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, *, small: bool) -> None:
        self.address, self.size, self.small, self.free = address, size, small, True
        self.before: _Block | None = None
        self.after: _Block | None = None


# Sorted as the allocator sorts: the smallest block that is large enough, and among equals the lowest address.
_Free = list[tuple[int, int, _Block]]


class CachingAllocator:
    """One card's allocator. `capacity_bytes` is what it may reserve (None: without limit)."""

    def __init__(self, *, expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self._expandable, self._capacity = expandable, capacity_bytes
        self._free: dict[bool, _Free] = {True: [], False: []}
        self._held: dict[int, _Block] = {}
        # With expandable segments: the block at the end of the one segment of each pool.
        self._last: dict[bool, _Block] = {}
        self._next_address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self.fits = True

    def allocate(self, id_: int, requested_bytes: int) -> None:
        """Serve a request and remember it as `id_`, which must not be held."""
        assert id_ not in self._held and requested_bytes > 0
        size = rounded(requested_bytes)
        block = self._take(size) or self._from_card(size)
        self._split(block, size)
        block.free = False
        self._held[id_] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def release(self, id_: int) -> None:
        """Take back what `id_` holds, and join it with free neighbours."""
        block = self._held.pop(id_)
        self.allocated_bytes -= block.size
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._unlist(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            self._moved_end(block, before)
            block = before
        if after is not None and after.free:
            self._unlist(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
            self._moved_end(after, block)
        self._list(block)

    def empty_cache(self) -> None:
        """Give back every segment without a block in use (with expandable segments: what is free at the end)."""
        for pool in self._free.values():
            for entry in list(pool):
                block = entry[2]
                if self._expandable:
                    self._shrink(block)
                elif block.before is None and block.after is None:
                    pool.remove(entry)
                    self.reserved_bytes -= block.size

    def usage(self) -> Usage:
        """What was taken so far."""
        return Usage(
            self.peak_allocated_bytes,
            self.peak_reserved_bytes,
            self.allocated_bytes,
            self.reserved_bytes,
            self.fits,
            self.retries,
        )

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> _Block | None:
        """The best free block, off the list; None if no block is large enough."""
        small = size <= SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        if at == len(pool):
            return None
        # A block that can still grow counts as endless, and is the last choice.
        if self._expandable and pool[at][2] is self._last.get(small) and at + 1 < len(pool):
            at += 1
        return pool.pop(at)[2]

    def _split(self, block: _Block, size: int) -> None:
        """Cut off what `block` has beyond `size`, where the rest is worth keeping apart."""
        rest = block.size - size
        if rest < SMALLEST_BLOCK or (not block.small and not self._expandable and rest <= SMALL):
            return
        after = _Block(block.address + size, rest, small=block.small)
        after.before, after.after = block, block.after
        if block.after is not None:
            block.after.before = after
        block.after, block.size = after, size
        self._moved_end(block, after)
        self._list(after)

    def _from_card(self, size: int) -> _Block:
        if self._expandable:
            return self._grow(size)
        small = size <= SMALL
        segment = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, LARGE_ROUNDING)
        self._make_room(segment)
        self._reserve(segment)
        block = _Block(self._next_address, segment, small=small)
        self._next_address += segment
        return block

    def _grow(self, size: int) -> _Block:
        """Lengthen the pool's segment by whole pages until its end holds `size`."""
        small = size <= SMALL
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._make_room(_up(size - self._free_end_bytes(small), page))
        last = self._last.get(small)
        free_end = last if last is not None and last.free else None
        more = _up(size - self._free_end_bytes(small), page)
        self._reserve(more)
        if free_end is not None:
            self._unlist(free_end)
            free_end.size += more
            return free_end
        block = _Block(0 if last is None else last.address + last.size, more, small=small)
        if last is not None:
            block.before, last.after = last, block
        self._last[small] = block
        return block

    def _free_end_bytes(self, small: bool) -> int:
        last = self._last.get(small)
        return last.size if last is not None and last.free else 0

    def _shrink(self, block: _Block) -> None:
        if block is not self._last.get(block.small):
            return  # pages in the middle could be given back too, but seldom are whole ones free
        self._unlist(block)
        self.reserved_bytes -= block.size
        if block.before is None:
            del self._last[block.small]
        else:
            block.before.after = None
            self._last[block.small] = block.before

    def _make_room(self, more: int) -> None:
        """Empty the cache where the card has not `more` left."""
        if self._capacity is not None and self.reserved_bytes + more > self._capacity:
            self.retries += 1
            self.empty_cache()

    def _reserve(self, more: int) -> None:
        self.fits = self.fits and (self._capacity is None or self.reserved_bytes + more <= self._capacity)
        self.reserved_bytes += more
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _list(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block))

    def _unlist(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]

    def _moved_end(self, old: _Block, new: _Block) -> None:
        if self._last.get(old.small) is old:
            self._last[old.small] = new


def rounded(requested_bytes: int) -> int:
    """The size of the block that serves a request, before it is cut from a larger one."""
    return max(SMALLEST_BLOCK, _up(requested_bytes, SMALLEST_BLOCK))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def simulate(events: Iterable[Event], *, expandable: bool = False, capacity_bytes: int | None = None) -> Usage:
    """Replay `events` (id, bytes; bytes = 0 frees) on an empty card."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    for id_, size in events:
        if size:
            allocator.allocate(id_, size)
        else:
            allocator.release(id_)
    return allocator.usage()


# --- beside the tensors -----------------------------------------------------------------------------------------------

# One workspace of cuBLAS for each thread that multiplies: forward runs in the main one, backward in autograd's own.
# They are blocks of the caching allocator (torch >= 2.0), made at the first product and never freed.
PRODUCT_THREADS = 2
# :4096:2:16:8 of CUBLAS_WORKSPACE_CONFIG, torch's default; torch 2.0 reported it as an allocation of 8,519,680 bytes.
WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
HOPPER_WORKSPACE_BYTES = 32 * MIB


def workspace_bytes(capability: tuple[int, int] | None) -> tuple[int, ...]:
    """The blocks that matrix products keep on a card of this compute capability; none on a CPU (None).

    8.125 MiB each, from Hopper on 32 MiB (of capability 12.0 some versions of torch take the smaller one: at most 48
    MiB too many). cuDNN is not used by these models; what cuBLASLt takes for a moment (1 MiB) lies in cached blocks.
    """
    if capability is None:
        return ()
    return (HOPPER_WORKSPACE_BYTES if capability >= (9, 0) else WORKSPACE_BYTES,) * PRODUCT_THREADS


# What a process holds on a card before its first tensor, and after its kernels are loaded, is told nowhere exactly.
# With kernels loaded as they are used (CUDA >= 11.7) the maintainers of PyTorch name 300 to 400 MB for the beginning
# (github.com/pytorch/pytorch/issues/107667 and 109888); a training step loads some hundred kernels more, and Hopper's
# are larger. Versions before loaded all at once: 1,343 MiB on a V100.
CONTEXT_BYTES = 500 * MIB
HOPPER_CONTEXT_BYTES = 600 * MIB
CONTEXT_UNCERTAINTY_BYTES = 200 * MIB


def context_bytes(capability: tuple[int, int] | None) -> int:
    """What driver, kernels and libraries take of a card, within about CONTEXT_UNCERTAINTY_BYTES; 0 on a CPU (None).

    `nvidia-smi` shows it for a process that holds a single number; a machine's own measurement is better.
    """
    if capability is None:
        return 0
    return HOPPER_CONTEXT_BYTES if capability[0] in (9, 10) else CONTEXT_BYTES
