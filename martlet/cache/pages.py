"""The pool of KV pages: page numbers and reference counts, no memory (`radix.py` shares them).

A page holds the keys and values of `page_size` consecutive positions, so sequences of any length
share the memory without gaps (arXiv:2309.06180). An owner is a sequence's page table or the prefix
cache. Positions that an owner may read are never written by another owner: the writer copies the
page first. The bytes live in `runtime/kv.py`.
"""

from collections.abc import Callable, Iterable

from martlet.types import PageId


class PagePool:
    """Page numbers 0 … n_pages - 1: each is free or has a number of owners."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        assert n_pages >= 1
        assert page_size >= 1
        self.n_pages = n_pages
        self.page_size = page_size
        # Called with a page and True when it gets a second owner, with False when it is left with
        # one. So the prefix cache always knows how many of its pages have no other owner.
        self.watch: Callable[[PageId, bool], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Make every page free, whatever its owners."""
        self._refs = [0] * self.n_pages
        self._free = [
            PageId(page) for page in reversed(range(self.n_pages))
        ]  # a stack: the last freed is still in cache

    @property
    def n_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def refs(self, page: PageId) -> int:
        """How many owners a page has."""
        return self._refs[page]

    def counts(self) -> list[int]:
        """How many owners each page has, as a copy."""
        return self._refs.copy()

    def pages_for(self, n_tokens: int) -> int:
        """Pages that n_tokens positions occupy."""
        return -(-n_tokens // self.page_size)

    def alloc(self, count: int) -> tuple[PageId, ...]:
        """Take `count` free pages, each with a single owner; the caller has checked `n_free`."""
        assert 0 <= count <= len(self._free)
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[PageId]) -> None:
        """Add an owner to each page."""
        refs, watch = self._refs, self.watch
        for page in pages:
            assert refs[page] > 0, f"page {page} is free"
            refs[page] += 1
            if refs[page] == 2 and watch is not None:
                watch(page, True)

    def free(self, pages: Iterable[PageId]) -> None:
        """Remove an owner from each page; a page without owners is free."""
        refs, watch = self._refs, self.watch
        for page in pages:
            assert refs[page] > 0, f"page {page} is free already"
            refs[page] -= 1
            if refs[page] == 0:
                self._free.append(page)
            elif refs[page] == 1 and watch is not None:
                watch(page, False)

    def check(self, owned: Iterable[Iterable[PageId]]) -> None:
        """Assert that `owned`, all owners' page lists, explains every count; all else is free."""
        expected = [0] * self.n_pages
        for pages in owned:
            for page in pages:
                expected[page] += 1
        assert self._refs == expected, "reference counts differ from the owners'"
        assert sorted(self._free) == [page for page in range(self.n_pages) if expected[page] == 0], "free list is wrong"
