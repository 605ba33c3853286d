"""The prefix cache in memory: hand-worked trees, and random ones against a naive model."""

from __future__ import annotations

import pytest
from cache_model import SIZE, Model

from martlet.cache import nodes
from martlet.cache.miss_reason import Evicted
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.types import MissReason, PageId

TEN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def fresh(n_pages: int = 16, share_granularity: int = 1) -> tuple[PagePool, RadixCache]:
    pool = PagePool(n_pages, SIZE)
    return pool, RadixCache(pool, share_granularity=share_granularity)


def put(pool: PagePool, cache: RadixCache, ids: list[int], salt: str = "") -> tuple[PageId, ...]:
    """The pages of a sequence that has computed all of `ids` by itself and has ended."""
    pages = pool.alloc(pool.pages_for(len(ids)))
    cache.insert(salt, ids, pages)
    cache.check()
    pool.free(pages)
    cache.check()
    return pages


# -- matching --------------------------------------------------------------------------------------
def test_full_pages_are_shared_and_a_part_is_copied() -> None:
    pool, cache = fresh()
    a, b, c = put(pool, cache, TEN)
    assert pool.n_free == 13
    whole = cache.match("", [*TEN, 11], 10)
    assert (whole.pages, whole.slots, whole.tail, whole.n_tokens) == ((a, b), (), (c, 2), 10)
    part = cache.match("", [1, 2, 3, 4, 5, 6, 0, 8, 9], 8)
    assert (part.pages, part.tail, part.n_tokens) == ((a,), (b, 2), 6)
    assert cache.match("", [0, 2, 3, 4, 5], 4).n_tokens == 0


@pytest.mark.parametrize(
    ("length", "full", "tail"), [(1, 0, 0), (3, 0, 2), (4, 0, 3), (5, 1, 0), (8, 1, 3), (9, 2, 0), (10, 2, 1)]
)
def test_the_last_token_of_a_repeated_prompt_is_left_to_compute(length: int, full: int, tail: int) -> None:
    """fault KVC-01: a prompt of 1, B - 1, B, B + 1, 2B tokens twice; at most len - 1 of them come
    from the cache.
    """
    pool, cache = fresh()
    pages = put(pool, cache, TEN[:length])
    match = cache.match("", TEN[:length], length - 1)
    assert match.pages == pages[:full]
    assert match.tail == ((pages[full], tail) if tail else None)
    assert match.n_tokens == match.use.n_tokens == length - 1
    assert match.use.reason is MissReason.END


def test_the_longest_of_several_parts_is_found() -> None:
    pool, cache = fresh()
    for ids in ([1, 2, 3, 4], [1, 2, 9], [1, 5, 5], [1, 2, 3, 7], [0]):
        put(pool, cache, ids)
    pages = {ids: node.page for ids, node in cache.roots[""].children.items()}
    assert cache.match("", [1, 2, 3, 6, 6], 4).tail in ((pages[1, 2, 3, 4], 3), (pages[1, 2, 3, 7], 3))
    assert cache.match("", [1, 2, 9, 9, 9], 4).tail == (pages[1, 2, 9], 3)
    assert cache.match("", [1, 5, 5, 5, 5], 4).tail == (pages[1, 5, 5], 3)
    assert cache.match("", [0, 0, 0, 0, 0], 4).tail == (pages[0,], 1)
    assert cache.match("", [1, 2, 3, 7, 1], 4).pages == (pages[1, 2, 3, 7],)


def test_salts_share_nothing() -> None:
    """fault KVC-05: the same prompt under "a", then "b", then "a" again."""
    pool, cache = fresh()
    cached = []
    for salt in ("a", "b", "a"):
        match = cache.match(salt, TEN, 9)
        cached.append(match.n_tokens)
        put(pool, cache, TEN, salt)
    assert cached == [0, 0, 9]
    assert cache.match("", TEN, 9).n_tokens == 0
    assert cache.match("", TEN, 9).use.reason is MissReason.SALT
    cache.evict(100)
    assert pool.n_free == 16
    assert not cache.roots, "a salt that has nothing is forgotten"


def test_groups_are_shared_whole() -> None:
    """Where the positions of a group depend on one another, nothing less than a group is kept or
    found.
    """
    pool, cache = fresh(share_granularity=8)
    pages = put(pool, cache, list(range(20)))
    assert pool.n_free == 16 - 4, "of 20 tokens 16 are whole groups"
    assert cache.match("", list(range(20)), 19).pages == pages[:4]
    short = cache.match("", list(range(16)), 15)
    assert (short.pages, short.tail, short.n_tokens) == (pages[:2], None, 8)
    other = cache.match("", [*range(13), 0, 0, 0, 0, 0], 17)
    assert (other.pages, other.tail, other.n_tokens) == (pages[:2], None, 8)
    assert (other.use.reason, other.use.differs_at, other.use.cached_id) == (MissReason.DIFFERS, 13, 13)
    put(pool, cache, list(range(100, 107)))
    assert pool.n_free == 12, "less than a group is not kept"


# -- keeping ---------------------------------------------------------------------------------------
def test_what_two_sequences_computed_alike_is_kept_once() -> None:
    pool, cache = fresh()
    one, two = pool.alloc(3), pool.alloc(3)
    cache.insert("", TEN, one)
    cache.insert("", TEN, two)
    pool.check([one, one, two])
    pool.free(one)
    pool.free(two)
    assert sorted(cache.pages()) == sorted(one)


def test_a_leaf_grows_with_the_sequence_that_writes_it() -> None:
    """It stays the same page; what it held before is still right, since its owner writes behind it
    only.
    """
    pool, cache = fresh()
    pages = pool.alloc(2)
    for n in (1, 2, 3, 4, 5, 8):
        cache.insert("", TEN[:n], pages)
        cache.check()
        pool.check([pages, pages[: pool.pages_for(n)]])
        assert cache.match("", TEN, 9).n_tokens == n
    cache.insert("", TEN[:6], pages)  # less than there is
    assert cache.match("", TEN, 9).n_tokens == 8
    pool.check([pages, pages])


def test_a_fuller_page_replaces_a_leaf_and_covers_later_ones() -> None:
    pool, cache = fresh()
    (leaf,) = put(pool, cache, [1, 2])
    (fuller,) = put(pool, cache, [1, 2, 3])
    assert cache.pages() == [fuller]
    assert pool.refs(leaf) == 0
    put(pool, cache, [1])
    put(pool, cache, [1, 2])
    assert cache.pages() == [fuller]
    (other,) = put(pool, cache, [1, 2, 4])
    assert sorted(cache.pages()) == sorted([fuller, other])


def test_a_leaf_that_is_replaced_stays_with_its_writer() -> None:
    pool, cache = fresh()
    writer = pool.alloc(1)
    cache.insert("", [1, 2], writer)
    assert cache.n_evictable == 0
    (fuller,) = put(pool, cache, [1, 2, 3])
    assert cache.pages() == [fuller]
    pool.check([writer, [fuller]])
    cache.check()
    cache.insert("", [1, 2, 3, 4], writer)  # and it comes back when its writer has got further
    assert cache.pages() == list(writer)
    pool.check([writer, writer])
    cache.check()


def test_a_page_with_other_tokens_is_a_fault_of_our_own() -> None:
    pool, cache = fresh()
    pages = pool.alloc(2)
    cache.insert("", TEN[:8], pages)
    with pytest.raises(AssertionError, match="other tokens"):
        cache.insert("", [*TEN[:4], 0, 0, 0, 0], pages)


# -- evicting --------------------------------------------------------------------------------------
def test_least_recently_used_leaves_go_first() -> None:
    pool, cache = fresh()
    a, b = put(pool, cache, [1, 1, 1, 1, 2, 2, 2, 2])
    (c,) = put(pool, cache, [3, 3, 3, 3])
    (d,) = put(pool, cache, [1, 1, 1, 1, 4, 4])[1:]
    match = cache.match("", [1, 1, 1, 1, 2, 2, 2, 2, 0], 8)
    cache.acquire(match)
    pool.free(match.pages)  # b, and with it a, is used last
    order = []
    for _ in range(4):
        held = set(cache.pages())
        assert cache.evict(1) == 1
        order += held - set(cache.pages())
        cache.check()
    assert order == [c, d, b, a]
    assert cache.evict(1) == 0


def test_a_page_was_used_when_what_was_below_it_was() -> None:
    pool, cache = fresh()
    a, b = put(pool, cache, [1, 1, 1, 1, 2, 2, 2, 2])
    busy = pool.alloc(1)
    cache.insert("", [3, 3, 3, 3], busy)
    match = cache.match("", [1, 1, 1, 1, 2, 2, 2, 2, 0], 8)
    cache.acquire(match)
    pool.free(match.pages)
    assert cache.evict(1) == 1
    assert b not in cache.pages()
    pool.free(busy)
    assert cache.evict(1) == 1
    assert cache.pages() == [a]


def test_what_a_sequence_owns_is_not_evicted() -> None:
    pool, cache = fresh(4)
    a, b, c = put(pool, cache, TEN)
    match = cache.match("", [*TEN[:8], 0], 8)
    cache.acquire(match)
    assert cache.n_evictable == 1
    assert cache.evict(4) == 1
    assert sorted(cache.pages()) == sorted([a, b])
    pool.free(match.pages)
    assert cache.n_evictable == 2
    assert cache.evict(4) == 2
    pool.check([])
    assert c in pool.alloc(4)


def test_what_is_above_a_page_in_use_is_not_evicted() -> None:
    """A sequence that computed a prefix by itself owns the pages below another's copy of that
    prefix, not that copy.
    """
    pool, cache = fresh()
    first = put(pool, cache, TEN[:8])
    own = pool.alloc(3)
    cache.insert("", [*TEN[:8], 0, 0, 0, 0], own)
    cache.check()
    pool.check([own, first, own[2:]])
    assert [pool.refs(page) for page in first] == [1, 1]
    assert cache.n_evictable == 0
    assert cache.evict(3) == 0
    pool.free(own)
    assert cache.n_evictable == 3
    assert cache.evict(3) == 3


def test_clear_gives_up_everything() -> None:
    pool, cache = fresh()
    pages = pool.alloc(3)
    cache.insert("", TEN, pages)
    cache.clear()
    cache.check()
    pool.check([pages])
    assert cache.match("", TEN, 9).n_tokens == 0
    pool.reset()
    put(pool, cache, TEN)
    assert cache.evict(3) == 3


# -- why a match ends ------------------------------------------------------------------------------
def test_why_a_match_ends() -> None:
    pool, cache = fresh(4)

    def why(ids: list[int], salt: str = "") -> tuple[int, MissReason, int | None, int | None]:
        use = cache.match(salt, ids, len(ids) - 1).use
        return use.n_tokens, use.reason, use.differs_at, use.cached_id

    assert why(TEN) == (0, MissReason.EMPTY, None, None)
    put(pool, cache, TEN)
    assert why(TEN) == (9, MissReason.END, None, None)
    assert why([*TEN, 11, 12]) == (10, MissReason.EMPTY, None, None), "a chat goes on"
    assert why([1, 2, 3, 4, 5, 6, 70, 8]) == (6, MissReason.DIFFERS, 6, 7)
    assert why([1, 2, 3, 4, 50, 6, 7, 8]) == (4, MissReason.DIFFERS, 4, 5)
    assert why([10, 2, 3]) == (0, MissReason.DIFFERS, 0, 1)
    assert why(TEN, "x") == (0, MissReason.SALT, None, None)
    assert why([10, 2, 3], "x") == (0, MissReason.EMPTY, None, None)
    assert cache.evict(2) == 2
    assert why(TEN) == (4, MissReason.EVICTED, None, None)
    assert why([1, 2, 3, 4, 50, 6]) == (4, MissReason.EMPTY, None, None), "that was never there"
    put(pool, cache, [1, 2, 3, 4, 5])
    assert why(TEN) == (5, MissReason.EVICTED, None, None), "more of that page was there once"
    assert cache.evict(2) == 2
    assert why(TEN) == (0, MissReason.EVICTED, None, None)


def test_few_evicted_pages_are_remembered() -> None:
    evicted = Evicted(most=2)
    for first in (1, 2, 3):
        evicted.add(b"", (first, 7))
    evicted.add(b"", (2, 7))  # again, so that 3 is the oldest
    evicted.add(b"x", (2, 7))
    assert len(evicted) == 2
    assert [evicted.agree(b"", (first, 7, 7)) for first in (1, 2, 3)] == [0, 2, 0]
    assert evicted.agree(b"x", (2, 8)) == 1


# -- digests ---------------------------------------------------------------------------------------
def test_digests_are_not_what_pages_are_found_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """fault KVC-03: with a digest that is the same for everything, nobody gets another prompt's
    pages.
    """
    monkeypatch.setattr(nodes, "_digest", lambda data: bytes(31))
    for seed, n_slots in enumerate([None, 8, 30]):
        model = Model(seed, 30, n_slots=n_slots)
        for _ in range(150):
            model.step()
        model.finish()
        assert model.n_matched > 0


def test_keys_tell_position_and_salt() -> None:
    """Keys are chained, and no salt's key is a page's."""
    root = nodes.root_key("")
    one = nodes.page_key(root, (1, 2))
    keys = [root, nodes.root_key("x"), one, nodes.page_key(one, (1, 2)), nodes.page_key(nodes.root_key("x"), (1, 2))]
    keys += [nodes.page_key(root, (1,)), nodes.page_key(root, (2, 1)), nodes.page_key(root, (1, 2 + 2**32))]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert [nodes.is_root_key(key) for key in keys] == [True, True, False, False, False, False, False, False]


# -- at random -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("n_pages", "share_granularity", "n_steps"), [(12, 1, 1500), (40, 1, 1500), (30, 8, 1500), (400, 1, 60)]
)
def test_random_sequences(seed: int, n_pages: int, share_granularity: int, n_steps: int) -> None:
    """fault KVC-09: of many sequences side by side none ever reads what was computed for another
    prefix.
    """
    model = Model(seed, n_pages, share_granularity, failures=0.0 if n_pages == 400 else 0.05)
    for _ in range(n_steps):
        model.step()
    model.finish()
    assert model.n_matched > 0
    assert model.lost or n_pages == 400


# -- shares ----------------------------------------------------------------------------------------
def test_the_salt_with_the_most_pages_makes_room_first() -> None:
    """By hand: "a" has 2 pages, used first; "b" has 6, used after. Four pages come from "b", then
    the two take turns.
    """
    pool = PagePool(8, SIZE)
    cache = RadixCache(pool, fair=True)
    put(pool, cache, list(range(2 * SIZE)), "a")
    for start in (100, 200, 300):
        put(pool, cache, list(range(start, start + 2 * SIZE)), "b")
    assert pool.n_free == 0
    assert cache.evict(4) == 4
    cache.check()
    assert cache.match("a", list(range(2 * SIZE)), 2 * SIZE).n_tokens == 2 * SIZE
    # of a tree, the least recently used go
    assert cache.match("b", list(range(100, 108)), 8).n_tokens == 0
    assert cache.match("b", list(range(200, 208)), 8).n_tokens == 0
    assert cache.match("b", list(range(300, 308)), 8).n_tokens == 8
    assert cache.evict(2) == 2
    assert [
        cache.match(salt, ids, 8).n_tokens for salt, ids in (("a", list(range(8))), ("b", list(range(300, 308))))
    ] == [4, 4]
    assert cache.evict(9) == 2
    assert pool.n_free == 8
    cache.check()


def test_one_who_floods_the_cache_takes_nothing_from_one_below_its_share() -> None:
    """Two tenants, one of whom floods: the other's prefix of three of eight pages is there to the
    end.
    """
    pool = PagePool(8, SIZE)
    cache = RadixCache(pool, fair=True)
    put(pool, cache, list(range(3 * SIZE)), "quiet")
    for flood in range(50):
        cache.evict(max(0, 2 - pool.n_free))
        put(pool, cache, [1000 + flood, *range(2 * SIZE - 1)], "loud")
    assert cache.match("quiet", list(range(3 * SIZE)), 3 * SIZE).n_tokens == 3 * SIZE


def test_many_salts_of_one_tenant_are_one_flood() -> None:
    """idea 19: who floods under a new salt each time (a user's, a conversation's) takes no more
    than under one.
    """
    pool = PagePool(8, SIZE)
    cache = RadixCache(pool, fair=True)
    pages = pool.alloc(3)
    cache.insert("quiet salt", list(range(3 * SIZE)), pages, "quiet")
    pool.free(pages)
    for flood in range(50):
        cache.evict(max(0, 2 - pool.n_free))
        pages = pool.alloc(2)
        cache.insert(f"loud salt {flood}", list(range(2 * SIZE)), pages, "loud")
        pool.free(pages)
        cache.check()
    assert cache.match("quiet salt", list(range(3 * SIZE)), 3 * SIZE).n_tokens == 3 * SIZE
    assert cache.match("loud salt 49", list(range(2 * SIZE)), 2 * SIZE).n_tokens == 2 * SIZE
