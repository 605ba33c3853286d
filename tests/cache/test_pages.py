"""The page pool: arithmetic at multiples of the page, reference counts, invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.cache.pages import PagePool
from martlet.types import PageId


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (12, 3), (13, 4)]
)
def test_pages_for_exact_multiples(tokens: int, pages: int) -> None:
    """fault KVC-11: a full last page is full, and one token more needs a new page."""
    assert PagePool(8, 4).pages_for(tokens) == pages


def test_alloc_and_free_bring_all_pages_back() -> None:
    """fault KVC-11: the free list is complete afterwards."""
    pool = PagePool(5, 4)
    first, second = pool.alloc(2), pool.alloc(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.n_free == 0
    pool.check([first, second])
    pool.free(second)
    pool.check([first])
    pool.free(first)
    pool.check([])
    assert sorted(pool.alloc(5)) == [0, 1, 2, 3, 4]


def test_a_shared_page_is_free_when_its_last_owner_goes() -> None:
    pool = PagePool(2, 4)
    pages = pool.alloc(1)
    pool.share(pages)
    pool.check([pages, pages])
    pool.free(pages)
    assert pool.n_free == 1
    pool.free(pages)
    assert pool.n_free == 2


def test_whoever_watches_learns_when_a_page_is_shared_and_when_no_longer() -> None:
    pool = PagePool(2, 4)
    seen: list[tuple[PageId, bool]] = []
    pool.watch = lambda page, shared: seen.append((page, shared))
    first, second = pool.alloc(2)
    pool.share([first, first])  # three owners: one call
    assert seen == [(first, True)]
    assert [pool.refs(first), pool.refs(second)] == [3, 1]
    pool.free([first])
    assert seen == [(first, True)]
    pool.free([first])
    assert seen == [(first, True), (first, False)]
    pool.free([first, second])
    assert len(seen) == 2
    assert [pool.refs(first), pool.refs(second)] == [0, 0]


def test_faults_of_our_own_are_assertions() -> None:
    pool = PagePool(2, 4)
    with pytest.raises(AssertionError, match="free already"):
        pool.free([PageId(0)])
    with pytest.raises(AssertionError):
        pool.alloc(3)
    pages = pool.alloc(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([pages, pages])


@given(st.lists(st.tuples(st.sampled_from(["alloc", "share", "free"]), st.integers(0, 7)), max_size=60))
def test_invariants_hold_after_every_operation(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(8, 4)
    owned: list[tuple[PageId, ...]] = []
    shared: set[PageId] = set()
    pool.watch = lambda page, more: shared.add(page) if more else shared.remove(page)
    for name, number in operations:
        if name == "alloc" and number <= pool.n_free:
            owned.append(pool.alloc(number))
        elif name == "share" and owned:
            pages = owned[number % len(owned)]
            pool.share(pages)
            owned.append(pages)
        elif name == "free" and owned:
            pool.free(owned.pop(number % len(owned)))
        pool.check(owned)
        assert shared == {page for page in range(8) if pool.refs(PageId(page)) > 1}
    assert pool.n_free == 8 - len({page for pages in owned for page in pages})
