"""The prefix cache: hand-worked trees, and random ones against a naive model."""

from __future__ import annotations

import random

import pytest

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.types import MissReason, PageId

SIZE = 4


def fresh(n_pages: int = 16, share_tokens: int = 1) -> tuple[PagePool, RadixCache]:
    pool = PagePool(n_pages, SIZE)
    return pool, RadixCache(pool, share_tokens=share_tokens)


def put(pool: PagePool, cache: RadixCache, ids: list[int], salt: str = "") -> tuple[PageId, ...]:
    """A sequence that computed all of `ids` by itself and has ended."""
    pages = pool.alloc(pool.pages_for(len(ids)))
    cache.insert(salt, ids, pages)
    cache.check()
    pool.free(pages)
    cache.check()
    return pages


def test_full_pages_are_shared_and_a_part_is_copied() -> None:
    pool, cache = fresh()
    a, b, c = put(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert pool.n_free == 13
    whole = cache.match("", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 10)
    assert (whole.pages, whole.tail, whole.n_tokens, whole.use.reason) == ((a, b), (c, 2), 10, MissReason.END)
    part = cache.match("", [1, 2, 3, 4, 5, 6, 0, 8, 9], 8)
    assert (part.pages, part.tail, part.n_tokens) == ((a,), (b, 2), 6)
    assert (part.use.reason, part.use.cached_id) == (MissReason.DIFFERS, 7)
    assert cache.match("", [0, 2], 1).n_tokens == 0


class Model:
    """Sequences that share, write and end at random, beside the content of each page and all that was ever inserted."""

    def __init__(self, seed: int, n_pages: int, share_tokens: int = 1) -> None:
        self.random = random.Random(seed)
        self.pool, self.cache = fresh(n_pages, share_tokens)
        self.share_tokens = share_tokens
        self.content: dict[
            PageId, list[tuple[int, ...]]
        ] = {}  # what a page's positions were computed for: the whole prefix's ids
        self.inserted: dict[str, set[tuple[int, ...]]] = {"": set(), "x": set()}
        self.live: list[tuple[str, list[int], list[PageId]]] = []
        self.evicted = False

    def naive(self, salt: str, ids: list[int], limit: int) -> int:
        """The longest prefix of `ids` that begins something inserted."""
        for n in range(limit // self.share_tokens * self.share_tokens, 0, -self.share_tokens):
            if tuple(ids[:n]) in self.inserted[salt]:
                return n
        return 0

    def room(self, n: int) -> bool:
        if n > self.pool.n_free:
            before = self.pool.n_free
            evictable = self.cache.n_evictable
            freed = self.cache.evict(n - before)
            assert freed == min(n - before, evictable) == self.pool.n_free - before
            self.evicted = self.evicted or freed > 0
        return n <= self.pool.n_free

    def prompt(self) -> tuple[str, list[int]]:
        salt = self.random.choice(["", "", "x"])
        if self.live and self.random.random() < 0.6:
            ids = self.random.choice(self.live)[1]
            ids = ids[: self.random.randint(1, len(ids))]
        else:
            ids = []
        return salt, ids + [self.random.randrange(3) for _ in range(self.random.randint(1, 9))]

    def start(self) -> None:
        salt, ids = self.prompt()
        match = self.cache.match(salt, ids, len(ids) - 1)
        naive = self.naive(salt, ids, len(ids) - 1)
        assert match.n_tokens <= naive
        if not self.evicted:
            assert match.n_tokens == naive
        self.cache.acquire(match)
        need = self.pool.pages_for(len(ids)) - len(match.pages)
        pages = list(match.pages)
        if self.room(need):
            pages += self.pool.alloc(need)
            for page in pages[len(match.pages) :]:
                self.content[page] = []
            if match.tail is not None:
                source, good = match.tail
                self.content[pages[len(match.pages)]] = list(self.content[source])[:good]
            for index, page in enumerate(pages):
                have = [one for one in self.content[page] if one]
                expect = [tuple(ids[: index * SIZE + k + 1]) for k in range(SIZE)]
                good = max(0, min(SIZE, match.n_tokens - index * SIZE))
                assert have[:good] == expect[:good], "another prefix's page"
            self.write(ids, pages, match.n_tokens)
            self.live.append((salt, ids, pages))
        else:
            self.pool.free(match.pages)
        if match.tail is not None:
            self.pool.free(match.tail[:1])

    def write(self, ids: list[int], pages: list[PageId], first: int) -> None:
        for position in range(first, len(ids)):
            cells = self.content[pages[position // SIZE]]
            del cells[position % SIZE :]
            cells.append(tuple(ids[: position + 1]))

    def grow(self) -> None:
        if self.live:
            _, ids, pages = self.random.choice(self.live)
            if len(pages) * SIZE > len(ids) or self.room(1):
                if len(pages) * SIZE == len(ids):
                    pages += self.pool.alloc(1)
                    self.content[pages[-1]] = []
                ids.append(self.random.randrange(3))
                self.write(ids, pages, len(ids) - 1)

    def insert(self) -> None:
        if self.live:
            self.keep(self.random.choice(self.live))

    def keep(self, seq: tuple[str, list[int], list[PageId]]) -> None:
        salt, ids, pages = seq
        n = self.random.randint(0, len(ids))
        self.cache.insert(salt, ids[:n], pages)
        n = n // self.share_tokens * self.share_tokens
        self.inserted[salt] |= {tuple(ids[:k]) for k in range(1, n + 1)}

    def end(self) -> None:
        if self.live:
            seq = self.live.pop(self.random.randrange(len(self.live)))
            if self.random.random() < 0.7:
                self.keep(seq)
            self.pool.free(seq[2])

    def step(self) -> None:
        self.random.choice([self.start, self.start, self.grow, self.grow, self.insert, self.end])()

    def check(self) -> None:
        self.cache.check()
        self.pool.check([self.cache.pages(), *(pages for _, _, pages in self.live)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("n_pages", "share_tokens"), [(12, 1), (40, 1), (2000, 1), (30, 8)])
def test_random_sequences(seed: int, n_pages: int, share_tokens: int) -> None:
    model = Model(seed, n_pages, share_tokens)
    for _ in range(1500):
        model.step()
        model.check()
    while model.live:
        model.end()
        model.check()
    model.cache.evict(n_pages)
    model.check()
    assert model.pool.n_free == n_pages
