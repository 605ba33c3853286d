"""A timeline of every step and every request, as a trace file (read `metrics.py` for its data).

Open the file at https://ui.perfetto.dev or chrome://tracing. It is a JSON array in the Trace Event
Format. Viewers accept an array without its closing bracket, so the events before a crash are not
lost. Events are written after each step and none is kept in memory. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    engine      steps         |step 7                              |step 8
                              |plan|run                    |commit |…
                counters      free pages · running, waiting · cached tokens
    requests    request 3     |queue |prefill            |decode               |preempted |decode
                                     |0+512    |512+88   |token |token |token
"""

import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from martlet.errors import FormatError
from martlet.metrics import Observer, SpanRecord, StepRecord
from martlet.types import Event, Request

_STEPS, _REQUESTS = 1, 2  # the trace's two processes
_MAX_NAMES = 64  # sequences named in a step's arguments


@dataclass(slots=True)
class _Track:
    """One sequence's row of the timeline."""

    tid: int
    phase: str | None = "queue"
    args: dict[str, Any] = field(default_factory=dict)


class TraceWriter(Observer):
    """Writes the trace while the engine runs; OSError if the file cannot be created."""

    def __init__(self, path: str | Path, title: str = "martlet") -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # open as long as the engine
        self._zero: float | None = None
        self._tracks: dict[tuple[str, int], _Track] = {}
        self._n_tracks = 0
        self._lines: list[str] = []
        self._first = True
        for pid, name, order in ((_STEPS, title, 0), (_REQUESTS, "requests", 1)):
            self._event("M", "process_name", 0.0, pid, 0, {"name": name})
            self._event("M", "process_sort_index", 0.0, pid, 0, {"sort_index": order})
        self._event("M", "thread_name", 0.0, _STEPS, 1, {"name": "steps"})
        self._flush()

    def accepted(self, request: Request, now: float) -> None:
        """Give every sequence of the request a track, which begins with the queue."""
        for index in range(request.params.n):
            self._n_tracks += 1
            track = _Track(self._n_tracks)
            self._tracks[request.request_id, index] = track
            name = f"request {_name(request.request_id, index)}"
            arrival_s = min(request.arrival_s or now, now)
            self._event("M", "thread_name", arrival_s, _REQUESTS, track.tid, {"name": name})
            self._event("B", "queue", arrival_s, _REQUESTS, track.tid, {"prompt_tokens": len(request.prompt_ids)})
        self._flush()

    def stepped(self, record: StepRecord) -> None:
        """Write a step's phases, its spans on their tracks, and the counters after it."""
        run_at = record.start_s + record.plan_s
        commit_at = run_at + record.run_s
        names = [f"{_name(s.request_id, s.index)}: {s.place}" for s in record.spans[:_MAX_NAMES]]
        args: dict[str, Any] = {
            "tokens": record.plan.n_tokens,
            "sequences": len(record.spans),
            "together": ", ".join(names) + (" …" if len(record.spans) > _MAX_NAMES else ""),
        }
        if record.preempted:
            args["preempted"] = ", ".join(_name(*key) for key in record.preempted)
        for key in ("saves", "loads", "copies"):
            if getattr(record.plan, key):
                args[key] = len(getattr(record.plan, key))
        self._slice(f"step {record.step}", record.start_s, record.end_s, _STEPS, 1, args)
        self._slice("plan", record.start_s, run_at, _STEPS, 1)
        self._slice("run", run_at, commit_at, _STEPS, 1)
        self._slice("commit", commit_at, record.end_s, _STEPS, 1)
        for request_id, index in record.preempted:
            self._enter(self._tracks.get((request_id, index)), "preempted", run_at)
        for span in record.spans:
            self._span(span, run_at, commit_at, record)
        for event in record.events:
            if event.token_id is not None and event.finish is None:
                self._enter(self._tracks.get((event.request_id, event.index)), "decode", record.end_s)
            self._end(event, record.end_s)
        self._counters(record)
        self._flush()

    def ended(self, events: Iterable[Event], now: float) -> None:
        """End the tracks of sequences that ended between two steps."""
        for event in events:
            self._end(event, now)
        self._flush()

    def close(self) -> None:
        """Close the array and the file. Idempotent."""
        if not self._file.closed:
            self._write_out("\n]\n")
            self._file.close()

    # -- writing -----------------------------------------------------------------------------------
    def _span(self, span: SpanRecord, run_at: float, commit_at: float, record: StepRecord) -> None:
        track = self._tracks.get((span.request_id, span.index))
        if track is None:
            return
        if track.phase == "queue":
            use = next(
                (
                    seq.cache_use
                    for seq in record.started
                    if (seq.request.request_id, seq.index) == (span.request_id, span.index)
                ),
                None,
            )
            track.args = {} if use is None else {"cached_tokens": use.n_tokens, "cache": str(use.reason)}
        self._enter(track, "decode" if span.decode else "prefill", run_at)
        name = f"token {span.start + 1}" if span.decode else span.place
        if span.decode and span.count > 1:
            name += f" and {span.count - 1} drafted"
        start, end = self._us(run_at), self._us(commit_at)
        self._lines.append(  # formatted by hand: most lines of a trace are spans
            f'{{"ph":"X","name":"{name}","ts":{start},"dur":{round(end - start, 3)},"pid":{_REQUESTS},"tid":{track.tid},'
            f'"args":{{"step":{record.step}}}}}'
        )

    def _enter(self, track: _Track | None, phase: str, now: float) -> None:
        if track is None or track.phase == phase:
            return
        if track.phase is not None:
            self._event("E", track.phase, now, _REQUESTS, track.tid)
        self._event("B", phase, now, _REQUESTS, track.tid, track.args or None)
        track.phase, track.args = phase, {}

    def _end(self, event: Event, now: float) -> None:
        if event.finish is None:
            return
        track = self._tracks.pop((event.request_id, event.index), None)
        if track is not None:
            if track.phase is not None:
                self._event("E", track.phase, now, _REQUESTS, track.tid)
            args = {"reason": str(event.finish)} | ({"error": event.error} if event.error else {})
            self._event("i", "end", now, _REQUESTS, track.tid, args)

    def _counters(self, record: StepRecord) -> None:
        now = record.end_s
        self._event("C", "free pages", now, _STEPS, 0, {"pages": record.n_free_pages})
        self._event("C", "sequences", now, _STEPS, 0, {"running": record.n_running, "waiting": record.n_waiting})
        self._event("C", "cached tokens", now, _STEPS, 0, {"tokens": record.n_cached})

    def _slice(
        self, name: str, start: float, end: float, pid: int, tid: int, args: dict[str, Any] | None = None
    ) -> None:
        start_us, end_us = self._us(start), self._us(end)
        self._write({"ph": "X", "name": name, "ts": start_us, "dur": round(end_us - start_us, 3)}, pid, tid, args)

    def _event(self, phase: str, name: str, now: float, pid: int, tid: int, args: dict[str, Any] | None = None) -> None:
        event: dict[str, Any] = {"ph": phase, "name": name}
        if phase != "M":
            event["ts"] = self._us(now)
        if phase == "i":
            event["s"] = "t"  # the scope of an instant event: its thread
        self._write(event, pid, tid, args)

    def _us(self, seconds: float) -> float:
        if self._zero is None:
            self._zero = seconds
        return round(1e6 * (seconds - self._zero), 3)

    def _write(self, event: dict[str, Any], pid: int, tid: int, args: dict[str, Any] | None) -> None:
        event |= {"pid": pid, "tid": tid}
        if args:
            event["args"] = args
        self._lines.append(json.dumps(event, separators=(",", ":")))

    def _flush(self) -> None:
        """Write whole lines at once, so that a killed process leaves whole events."""
        if self._lines and not self._file.closed:
            self._write_out(("[\n" if self._first else ",\n") + ",\n".join(self._lines))
            self._first = False
        self._lines.clear()

    def _write_out(self, text: str) -> None:
        """A full disk ends the trace, not the requests."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            warnings.warn(f"the trace {self._file.name} ends early: {error}", RuntimeWarning, stacklevel=2)
            with suppress(OSError):  # closing flushes the rest, which fails again
                self._file.close()


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace, also of one that was cut off; FormatError for another file."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        events = json.loads(text)
    except ValueError:
        events = _without_its_end(path, text)
    if not isinstance(events, list):
        raise FormatError(path, "is not a trace: expected an array of events")
    return events


def _without_its_end(path: str | Path, text: str) -> Any:
    """The events of a file without the closing bracket and perhaps a part of its last line."""
    for whole in (text, text.rpartition("\n")[0]):
        try:
            return json.loads(whole.rstrip().removesuffix(",") + "\n]")
        except ValueError:
            continue
    raise FormatError(path, "is not a trace: expected a JSON array with an event a line")


def _name(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}[{index}]"
