"""Pages of read texts: what is found, what goes first, and that their bytes are counted once."""

from __future__ import annotations

import torch

from onecard.serve.prefixes import PAGE_TOKENS, PrefixStore

# A page of these is [2, 1, 16, 1] floats.
PAGE_BYTES = 2 * PAGE_TOKENS * 4


def text(*starts: int) -> list[int]:
    """One page for each number."""
    return [start * 100 + place for start in starts for place in range(PAGE_TOKENS)]


def keep(store: PrefixStore, ids: list[int]) -> None:
    def read(first: int, last: int) -> torch.Tensor:
        return torch.tensor(ids[first:last], dtype=torch.float32).reshape(1, 1, -1, 1).expand(2, 1, -1, 1)

    store.keep(ids, read)


def found(store: PrefixStore, ids: list[int]) -> list[int]:
    stored = store.find(ids)
    return [] if stored is None else stored[0, 0, :, 0].int().tolist()


def test_the_longest_known_beginning_is_found() -> None:
    store = PrefixStore(100 * PAGE_BYTES)
    keep(store, text(1, 2, 3))
    assert found(store, text(1, 2, 4)) == text(1, 2)
    assert found(store, text(2)) == []
    assert store.used_bytes == 3 * PAGE_BYTES


def test_the_last_pages_of_a_text_go_first_also_after_it_was_found() -> None:
    store = PrefixStore(3 * PAGE_BYTES)
    keep(store, text(1, 2, 3))
    assert found(store, text(1, 2, 3)) == text(1, 2, 3)
    keep(store, text(9))
    # Were the first page gone, the others would lie there without being of any use.
    assert found(store, text(1, 2, 3)) == text(1, 2)
    assert store.used_bytes == 3 * PAGE_BYTES


def test_a_page_that_stayed_is_not_counted_twice() -> None:
    store = PrefixStore(100 * PAGE_BYTES)
    keep(store, text(1, 2, 3))
    first = store._names(text(1))[0]
    store.used_bytes -= store._pages.pop(first).nbytes  # as if it had been evicted alone
    keep(store, text(1, 2, 3))
    assert found(store, text(1, 2, 3)) == text(1, 2, 3)
    assert store.used_bytes == sum(page.nbytes for page in store._pages.values()) == 3 * PAGE_BYTES
