"""What a snapshot at the engine is turned into, by hand: letters of pages, stretches of the tree,
counts of histograms.
"""

from __future__ import annotations

from array import array

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.metrics import EngineTotals, SpanRecord, StepRecord
from martlet.observe.snapshot import MAX_NODES, EngineSnapshot, SequenceSnapshot, _nodes
from martlet.sampling_params import SamplingParams
from martlet.server.live_frames import MAX_CELLS, Names, counts_of, frame
from martlet.types import PageId, Request, Sampled, SeqId, Span, StepPlan, StepResult

SIZE = 4


def sequence(name: str, pages: tuple[int, ...], n_prompt: int = 4) -> SequenceSnapshot:
    request = Request(name, tuple(range(n_prompt)), SamplingParams())
    return SequenceSnapshot(request, 0, n_prompt + 2, n_prompt + 1, 32, 0, tuple(PageId(page) for page in pages))


def shown(
    pool: PagePool, cache: RadixCache | None, *running: SequenceSnapshot, decode: object = None
) -> dict[str, object]:
    cached, nodes = ([], []) if cache is None else (cache.pages(), _nodes(cache.roots.values()))
    snapshot = EngineSnapshot(running, (), 0, pool.counts(), cached, nodes)
    return frame(snapshot, (), EngineTotals(), Names(), decode)  # type: ignore[arg-type]


def test_letters_of_pages() -> None:
    """Page 0 free, 1 the tree's alone, 2 one sequence's, 3 of two, 4 of one and the tree, 5 of
    nobody known.
    """
    pool = PagePool(6, SIZE)
    cache = RadixCache(pool)
    pages = pool.alloc(6)
    cache.insert("", [1, 1, 1, 1], [pages[1]])
    cache.insert("", [2, 2, 2, 2], [pages[4]])
    pool.free([pages[0], pages[1]])
    pool.share([pages[3]])
    found = shown(pool, cache, sequence("a", (pages[2], pages[3], pages[4])), sequence("b", (pages[3],)))
    cells = found["pages"]["cells"]  # type: ignore[index]
    assert [cells[pages[number]] for number in range(6)] == ["f", "c", "o", "s", "o", "h"]
    assert found["pages"]["whose"] == ["1", "1"]  # type: ignore[index]
    assert found["pages"]["counts"] == {"f": 1, "c": 1, "o": 2, "s": 1, "h": 1}  # type: ignore[index]


def test_cells_of_many_pages_are_of_as_many_neighbours() -> None:
    pool = PagePool(3 * MAX_CELLS - 2, SIZE)
    taken = pool.alloc(5)
    found = shown(pool, None, sequence("a", taken))["pages"]
    assert found["each"] == 3  # type: ignore[index]
    assert len(found["cells"]) == MAX_CELLS  # type: ignore[index]
    # Pages 0 to 4 were taken: the first cell is full, of the second two of three are.
    assert found["cells"][:3] == "oof"  # type: ignore[index]
    assert found["whose"] == ["1", "1"]  # type: ignore[index]
    assert found["counts"] == {"f": 3 * MAX_CELLS - 7, "c": 0, "o": 5, "s": 0, "h": 0}  # type: ignore[index]


def test_stretches_of_the_tree() -> None:
    """Two texts of 5 and 4 pages part after 3; a sequence uses the first 2 and one of the second
    text's.
    """
    pool = PagePool(32, SIZE)
    cache = RadixCache(pool)
    a = [*range(12), *range(100, 108)]
    b = [*range(12), *range(200, 203)]
    pages_a = pool.alloc(5)
    cache.insert("", a, pages_a)
    pages_b = pool.alloc(1)
    cache.insert("", b, [*pages_a[:3], *pages_b])
    pool.free(pages_a[2:])
    pool.free(pages_b)
    found = shown(pool, cache, sequence("a", pages_a[:2]))["tree"]
    keys = ("parent", "start", "tokens", "pages", "kind", "users")
    assert [tuple(stretch[key] for key in keys) for stretch in found["stretches"]] == [  # type: ignore[index]
        (None, 0, 8, 2, "o", ["1"]),
        (0, 8, 4, 1, "c", []),
        (1, 12, 8, 2, "c", []),
        (1, 12, 3, 1, "c", []),
    ]
    assert (found["n_pages"], found["n_hidden"]) == (6, 0)  # type: ignore[index]
    assert all("text" not in stretch for stretch in found["stretches"])  # type: ignore[index]


def test_salts_are_numbered_and_text_is_decoded_if_wanted() -> None:
    pool = PagePool(8, SIZE)
    cache = RadixCache(pool)
    for salt, ids in (("", [1, 1, 1, 1]), ("mine", [2, 2, 2, 2]), ("yours", [3, 3, 3, 3])):
        cache.insert(salt, ids, pool.alloc(1))
    found = shown(pool, cache, decode=lambda ids: "".join(map(str, ids)))["tree"]
    stretches = found["stretches"]  # type: ignore[index]
    assert stretches[0]["salt"] == 0
    assert len({stretch["salt"] for stretch in stretches}) == 3
    assert [stretch["text"] for stretch in stretches] == ["1111", "2222", "3333"]
    assert "mine" not in str(found)


def test_a_large_tree_is_shown_from_its_root_on() -> None:
    pool = PagePool(MAX_NODES + 10, SIZE)
    cache = RadixCache(pool)
    cache.insert("", list(range(SIZE * (MAX_NODES + 10))), pool.alloc(MAX_NODES + 10))
    found = shown(pool, cache)["tree"]
    assert [stretch["pages"] for stretch in found["stretches"]] == [MAX_NODES]  # type: ignore[index]
    assert (found["n_pages"], found["n_hidden"]) == (MAX_NODES + 10, 10)  # type: ignore[index]


def test_guesses_of_a_step() -> None:
    """A sequence that verifies three guesses of which one was right, beside a prompt."""
    plan = StepPlan(7, (Span(SeqId(0), 9, 4, (9, 1, 2, 3), (), 4, n_draft=3), Span(SeqId(1), 0, 8, (7,) * 8, (), 0)))
    result = StepResult(7, (Sampled(SeqId(0), 1, more=((5, None),)),))
    spans = (SpanRecord("a", 0, 9, 4, True, "9+4"), SpanRecord("b", 0, 0, 8, False, "0+8"))
    record = StepRecord(7, 1.5, 0.001, 0.01, 0.002, spans, (), 2, 0, 3, 0, plan, result, (), ())
    snapshot = EngineSnapshot((), (), 0, [0], [], [])
    [step] = frame(snapshot, [record], EngineTotals(), Names(), None)["steps"]
    assert step["spans"] == [["1", 9, 4, True, 1], ["2", 0, 8, False]]
    assert (step["step"], step["tokens"], step["ms"]) == (7, 12, [1.0, 10.0, 2.0])


def test_names_are_short_and_do_not_come_back() -> None:
    names = Names()
    assert [names.of("x", 0), names.of("y", 0), names.of("x", 2), names.of("x", 0)] == ["1", "2", "1.2", "1"]
    for number in range(5000):
        names.of(f"r{number}", 0)
    assert names.of("x", 0) == "5003"  # forgotten, and named anew


def test_counts_of_a_histogram() -> None:
    """Bounds are inclusive, as in Prometheus; the last count is of what is above all of them."""
    gaps = array("d", [0.1, 0.2, 0.15, 9.0])
    assert counts_of([1, 0, 2, 0], (0.1, 0.2, 1.0), [gaps, None, 0.5]) == [2, 2, 3, 1]
    gaps.append(1.0)  # it may grow while a copy of it is read
    assert counts_of([0, 0, 0, 0], (0.1, 0.2, 1.0), []) == [0, 0, 0, 0]
