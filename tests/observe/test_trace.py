"""The trace is what the Trace Event Format says, its slices nest, and its durations are those of
the metrics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from martlet.cache.pages import PagePool
from martlet.engine.assemble import assemble
from martlet.errors import FormatError
from martlet.metrics import RequestMetrics
from martlet.observe.trace import TraceWriter, read_trace
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from tests.observe.test_metrics import PAGE, Clock, SlowExecutor, drain, request

STEPS, REQUESTS = 1, 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def run(path: Path, *, n_pages: int = 64, close: bool = True) -> dict[str, RequestMetrics]:
    clock = Clock()
    pool = PagePool(n_pages, PAGE)
    scheduler = Scheduler(pool, SchedulerLimits(32, 4, 4, 8), frozenset())
    engine = assemble(scheduler, SlowExecutor(clock), pool, clock=clock, observers=[TraceWriter(path)])
    found = {"a": engine.add(request("a", 6, 16))}
    clock.now += 0.5
    found["b"] = engine.add(request("b", 6, 16))
    engine.step()
    drain(engine)
    if close:
        engine.close()
    return found


def slices(events: list[dict[str, Any]], pid: int, tid: int) -> list[tuple[float, float, str]]:
    """(start, end, name) of a track's slices, from X events and from B and E pairs, in the order in
    which they begin.
    """
    found: list[tuple[float, float, str]] = []
    stack: list[tuple[float, str]] = []
    for event in events:
        if (event["pid"], event["tid"]) != (pid, tid):
            continue
        if event["ph"] == "X":
            found.append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "B":
            stack.append((event["ts"], event["name"]))
        elif event["ph"] == "E":
            start, name = stack.pop()
            assert name == event["name"]
            found.append((start, event["ts"], name))
    assert not stack, "a phase has no end"
    return sorted(found, key=lambda s: (s[0], -s[1]))


def assert_nested(found: list[tuple[float, float, str]]) -> None:
    open_ends: list[float] = []
    for start, end, name in found:
        while open_ends and open_ends[-1] <= start + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3, f"{name} ends after what it began in"
        open_ends.append(end)


def track_of(events: list[dict[str, Any]], name: str) -> int:
    [tid] = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name]
    return int(tid)


def test_every_event_is_of_the_format(path: Path) -> None:
    """The fields that "Trace Event Format" (Google, 2016) asks for, by type of event."""
    run(path)
    events = json.loads(path.read_text())
    needed = {"X": {"ts", "dur"}, "B": {"ts"}, "E": {"ts"}, "i": {"ts", "s"}, "C": {"ts", "args"}, "M": {"args"}}
    for event in events:
        assert {"name", "ph", "pid", "tid"} | needed[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0
        assert event.get("ts", 0) >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    assert {e["ph"] for e in events} == set(needed)


def test_slices_nest(path: Path) -> None:
    run(path, n_pages=8)
    events = read_trace(path)
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["ph"] in "XB"}:
        assert_nested(slices(events, pid, tid))


def test_durations_are_those_of_the_metrics(path: Path) -> None:
    metrics = run(path)
    events = read_trace(path)
    for name, found in metrics.items():
        phases = {n: (s, e) for s, e, n in slices(events, REQUESTS, track_of(events, f"request {name}"))}
        for phase, seconds in (("queue", found.queue_s), ("prefill", found.prefill_s), ("decode", found.decode_s)):
            start, end = phases[phase]
            assert seconds is not None
            assert end - start == pytest.approx(1e6 * seconds, abs=0.01)


def test_a_step_has_its_phases_and_names_who_shared_it(path: Path) -> None:
    """A step of decode and prompt together: 1 + 0.25 × 4 rows = 2 seconds of run, in
    microseconds.
    """
    run(path)
    events = read_trace(path)
    steps = [e for e in events if e["pid"] == STEPS and e["ph"] == "X" and e["name"].startswith("step ")]
    assert steps[0]["args"] == {"tokens": 4, "sequences": 1, "together": "a: 0+4"}
    assert steps[1]["args"] == {"tokens": 4, "sequences": 2, "together": "a: 4+2, b: 0+2"}
    assert [n for _, _, n in slices(events, STEPS, 1)][:4] == ["step 1", "plan", "run", "commit"] or steps[0][
        "dur"
    ] == 2e6
    assert steps[0]["dur"] == 2e6
    spans = [n for _, _, n in slices(events, REQUESTS, track_of(events, "request b"))]
    assert spans[:4] == ["queue", "prefill", "0+2", "2+3"]


def test_a_preempted_phase_is_shown(path: Path) -> None:
    metrics = run(path, n_pages=8)
    assert metrics["b"].n_preempted > 0
    events = read_trace(path)
    names = [n for _, _, n in slices(events, REQUESTS, track_of(events, "request b"))]
    assert names.count("preempted") == metrics["b"].n_preempted
    assert names.index("preempted") < len(names) - names[::-1].index("prefill") - 1, "computed again afterwards"


def test_a_trace_that_was_cut_can_be_read(path: Path) -> None:
    """A program that was killed leaves an array without its end, or half a line; viewers take the
    first as it is.
    """
    run(path, close=False)
    text = path.read_text()
    assert not text.endswith("]")
    whole = read_trace(path)
    assert whole[-1]["name"] == "cached tokens"
    path.write_text(text[:-9])
    assert read_trace(path) == whole[:-1]


def test_what_is_no_trace(path: Path) -> None:
    path.write_text("hello")
    with pytest.raises(FormatError, match="not a trace"):
        read_trace(path)
    path.write_text("{}")
    with pytest.raises(FormatError, match="expected an array"):
        read_trace(path)


def test_a_full_disk_ends_the_trace_and_nothing_else(path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with pytest.warns(RuntimeWarning, match="ends early"):
        metrics = run(Path("/dev/full"))
    assert metrics["a"].n_generated == 16


def test_memory_is_bounded(path: Path) -> None:
    """Tracks are forgotten when their sequences end, and lines when they are written."""
    clock = Clock()
    pool = PagePool(64, PAGE)
    writer = TraceWriter(path)
    engine = assemble(
        Scheduler(pool, SchedulerLimits(32, 4, 4, 8), frozenset()),
        SlowExecutor(clock),
        pool,
        clock=clock,
        observers=[writer],
    )
    for number in range(50):
        engine.add(request(str(number), 2, 2))
    drain(engine)
    assert not writer._tracks
    assert not writer._lines
