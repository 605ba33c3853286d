"""Admission: where a sequence's pages come from (read `budget.py` next).

A sequence starts after its longest known prefix: in the prefix cache, or in the pages of the
sequence that it was forked from. Full pages are shared, the start of the next page is copied, pages
that only the second tier has are loaded, and all others are new. The last position is always
computed: its logits are needed.

    ids      | full page | full page | full page | 17 of 32 | to be computed …
    pages    | shared    | shared    | loaded    | copied   | new

New pages come from the pool. When that is empty, the cache evicts its least recently used.
"""

from dataclasses import dataclass, replace

from martlet.cache.pages import PagePool
from martlet.cache.radix import Match, RadixCache
from martlet.sched.cost import CostModel
from martlet.types import CacheUse, Copy, Load, MissReason, PageId, Save, Sequence, SlotId


@dataclass(frozen=True, slots=True)
class Admission:
    """The page moves before an admitted sequence's first span."""

    copies: tuple[Copy, ...]
    loads: tuple[Load, ...]


_NOTHING = Match((), (), None, 0, CacheUse(reason=MissReason.OFF))


class PageKeeper:
    """Gives sequences their pages, and takes them back into the cache for later sequences."""

    def __init__(self, pool: PagePool, cache: RadixCache | None, cost: CostModel, share_granularity: int) -> None:
        self.pool = pool
        self.cache = cache
        self._cost = cost
        self._granularity = share_granularity
        self._pinned: list[PageId] = []  # sources of the copies of the plan in the making

    @property
    def n_available(self) -> int:
        """Pages that are free, or that the cache can evict."""
        return self.pool.n_free + (0 if self.cache is None else self.cache.n_evictable)

    def take(self, count: int, *, save: bool = True) -> tuple[PageId, ...] | None:
        """New pages for an owner; None: too few. `save`: evicted pages go to the second tier."""
        missing = count - self.pool.n_free
        if missing > 0 and (self.cache is None or self.cache.evict(missing, save=save) < missing):
            return None
        return self.pool.alloc(count)

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix of a waiting sequence, without side effects."""
        if self.cache is None:
            return _NOTHING
        limit = len(seq.ids) - 1
        scored = seq.n_scored < seq.n_prompt  # the logits of all rows from n_scored on are needed
        if scored:
            limit = min(limit, seq.n_scored)
        match = self.cache.match(seq.request.cache_salt, seq.ids, limit)
        if scored and match.n_tokens == limit // self._granularity * self._granularity:
            return replace(match, use=replace(match.use, reason=MissReason.SCORED))
        return match

    def admit(self, seq: Sequence, parent: Sequence | None, reserve: int) -> Admission | None:
        """Give a waiting sequence its ids' pages, leaving `reserve` available; None: too few."""
        match = self._cheaper(seq, self.match(seq))
        forked = None if parent is None else self._fork(seq, parent, match)
        match = forked or match
        if not self._fits(seq, match, reserve):
            if match.tail is None:
                return None
            n_whole = len(match.pages) * self.pool.page_size  # the page to be copied must stay too
            match = replace(match, tail=None, n_tokens=n_whole, use=replace(match.use, n_tokens=n_whole))
            if not self._fits(seq, match, reserve):
                return None
        tail = [] if match.tail is None else [match.tail[0]]
        need = self.pool.pages_for(len(seq.ids)) - len(match.pages)
        if self.cache is not None and forked is None:
            self.cache.acquire(match)
        else:
            self.pool.share((*match.pages, *tail))
        new = self.take(need)
        if new is None:
            self.pool.free((*match.pages, *tail))
            return None
        # owned until the plan is made: it must not be evicted before it is copied
        self._pinned += tail
        seq.pages = [*match.pages, *new]
        seq.n_sent = 0
        seq.n_cached = match.n_tokens - len(match.slots) * self.pool.page_size
        loads = tuple(Load(slot, page, key) for (slot, key), page in zip(match.slots, new, strict=False))
        copies = (Copy(tail[0], new[0]),) if tail else ()
        if seq.n_generated == 0 and seq.n_preempted == 0:
            seq.cache_use = match.use
        return Admission(copies, loads)

    def _fits(self, seq: Sequence, match: Match, reserve: int) -> bool:
        """Whether the pages that `match` does not give are available, with `reserve` left."""
        shared = match.pages if match.tail is None else (*match.pages, match.tail[0])
        kept = sum(self.pool.refs(page) == 1 for page in shared)  # evictable so far, soon in use
        need = self.pool.pages_for(len(seq.ids)) - len(match.pages)
        return need + reserve <= self.n_available - kept

    def unpin(self) -> None:
        """Release the sources of the plan's copies: later plans may evict them."""
        self.pool.free(self._pinned)
        self._pinned.clear()

    def publish(self, seq: Sequence) -> None:
        """Put the full pages that a sequence has computed so far into the cache."""
        if self.cache is not None:
            n_full = seq.n_cached // self.pool.page_size
            if n_full:
                n_tokens = n_full * self.pool.page_size
                self._insert(seq, n_tokens, n_full)

    def give_back(self, seq: Sequence) -> None:
        """Take back a sequence's pages; the cache keeps the computed ones."""
        if self.cache is not None and seq.n_cached:
            n_pages = self.pool.pages_for(seq.n_cached)
            self._insert(seq, seq.n_cached, n_pages)
        self.pool.free(seq.pages)
        seq.pages = []
        seq.n_cached = seq.n_sent = 0

    def _insert(self, seq: Sequence, n_tokens: int, n_pages: int) -> None:
        assert self.cache is not None
        request = seq.request
        self.cache.insert(request.cache_salt, seq.ids[:n_tokens], seq.pages[:n_pages], request.scheduling.tenant)

    def saves(self, most: int) -> tuple[Save, ...]:
        """The saves of the plan in the making: evicted pages, and up to `most` pages in all."""
        return () if self.cache is None else self.cache.drain_saves(most)

    def failed(self, loads: tuple[SlotId, ...], saves: tuple[SlotId, ...]) -> None:
        """These slots of the second tier could not be read, or not be written."""
        if self.cache is not None:
            self.cache.forget(loads)
            self.cache.retire(saves)

    def clear(self) -> None:
        """Give up all pages, whose content is unknown."""
        self._pinned.clear()
        if self.cache is not None:
            self.cache.clear()
        self.pool.reset()

    def _cheaper(self, seq: Sequence, match: Match) -> Match:
        """Drop the loads where computing takes less time."""
        if not match.slots:
            return match
        start = len(match.pages) * self.pool.page_size
        n_tokens = len(match.slots) * self.pool.page_size
        if self._cost.load_s(len(match.slots)) <= self._cost.prefill_s(start, n_tokens):
            return match
        return replace(match, slots=(), tail=None, n_tokens=start, use=replace(match.use, n_tokens=start, n_loaded=0))

    def _fork(self, seq: Sequence, parent: Sequence, match: Match) -> Match | None:
        """The parent's pages as a match, if they hold more than the cache."""
        size = self.pool.page_size
        n_tokens = min(seq.n_common, parent.n_cached, len(seq.ids) - 1)
        if seq.n_scored < seq.n_prompt:
            n_tokens = min(n_tokens, seq.n_scored)
        n_tokens -= n_tokens % self._granularity
        if n_tokens <= match.n_tokens - len(match.slots) * size:
            return None
        n_full, rest = divmod(n_tokens, size)
        tail = (parent.pages[n_full], rest) if rest else None
        use = CacheUse(n_tokens, reason=MissReason.END if n_tokens == len(seq.ids) - 1 else match.use.reason)
        return Match(tuple(parent.pages[:n_full]), (), tail, n_tokens, use)


def common_ids(a: list[int], b: list[int]) -> int:
    """The length of the longest common prefix; by halves, since slices compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # equal up to low
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
