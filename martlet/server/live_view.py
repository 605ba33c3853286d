"""What the engine does, as it does it, for those who look at /engine (read `live_frames.py` next, `web.py` for the route).

    engine thread ── a reference to each step's record ──▸ a short deque ──▸ sampler, on the event loop ──▸ viewers
                  ◂── `look`, between two steps, now and then ──┘

Nobody looks: nothing is kept, the engine knows of no observer. Somebody looks: a step appends a reference to a deque of
bounded length; a sampler takes a look four times a second at most, seldom enough that looks take at most 1 % of the engine's
time, and only if something has happened. All viewers get the same frame; who reads slowly misses frames and delays nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import orjson

from martlet.engine.build import Built
from martlet.errors import MartletError
from martlet.metrics import Observer, StepRecord
from martlet.observe.snapshot import Look, look
from martlet.server.bridge import Bridge
from martlet.server.error_replies import ApiError
from martlet.server.live_frames import Names, counts_of, frame
from martlet.server.prometheus import Measures

__all__ = ["EngineView"]

INTERVAL_S = 0.25
MOST_SHARE = 0.01  # of the engine's time for looks
MAX_STEPS = 48  # that a frame shows: the newest
MAX_VIEWERS = 16


class _Steps(Observer):
    """Keeps the newest steps."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def stepped(self, record: StepRecord) -> None:
        """A step was committed. In the engine's thread: this is all that looking costs there, but for the looks."""
        self.records.append(record)

    def take(self) -> list[StepRecord]:
        """Those since the last call."""
        found = []
        while self.records:
            found.append(self.records.popleft())
        return found


class EngineView:
    """The frames of one engine, and who looks. Of the event loop, as the bridge is."""

    def __init__(self, built: Built, bridge: Bridge, measures: Measures, *, with_text: bool) -> None:
        self._built, self._bridge, self._measures = built, bridge, measures
        self._with_text = with_text
        self._names = Names()
        self._steps = _Steps()
        self._n_viewers = 0
        self._sampler: asyncio.Task[None] | None = None
        self._closed = False
        self._frame = b""
        self._news = asyncio.Event()  # a new one for each frame

    @property
    def n_viewers(self) -> int:
        """How many look."""
        return self._n_viewers

    def hello(self, model: str) -> bytes:
        """What does not change while the server runs, as JSON."""
        built = self._built
        return orjson.dumps(
            {
                "model": model,
                "page_tokens": built.engine.pages.page_size,
                "n_pages": built.engine.n_pages,
                "context": built.plan.context,
                "max_seqs": built.config.max_seqs,
                "with_text": self._with_text,
                "ttft_bounds": self._measures.histograms["time_to_first_token_seconds"][0].bounds,
                "itl_bounds": self._measures.histograms["inter_token_latency_seconds"][0].bounds,
            }
        )

    def enter(self) -> None:
        """Somebody looks; the first one starts the sampler. ApiError if there are too many."""
        if self._closed or self._n_viewers >= MAX_VIEWERS:
            why = "The server shuts down." if self._closed else f"{MAX_VIEWERS} look at the engine; no more may."
            raise ApiError(503, why, code="too_many_viewers", headers={"Retry-After": "5"})
        self._n_viewers += 1
        if self._n_viewers == 1:
            self._frame, self._news = b"", asyncio.Event()
            self._built.engine.watch(self._steps)
            self._sampler = asyncio.ensure_future(self._sample())

    def leave(self) -> None:
        """Somebody has gone; with the last one goes everything."""
        self._n_viewers -= 1
        if self._n_viewers == 0:
            self._built.engine.unwatch(self._steps)
            self._steps.records.clear()
            if self._sampler is not None:
                self._sampler.cancel()

    def close(self) -> None:
        """End all views: the server shuts down."""
        self._closed = True
        self._news.set()

    async def next_frame(self, seen: bytes, timeout_s: float) -> bytes | None:
        """The newest frame, as JSON, once it is another than `seen`; b"" if none comes in time, None at the end."""
        if self._frame is seen or not self._frame:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return b"" if not self._closed else None
        return None if self._closed else self._frame

    async def _sample(self) -> None:
        shown: tuple[int, ...] | None = None
        while not self._bridge.has_ended:
            totals = self._built.engine.totals
            state = (totals.n_steps, totals.n_requests, totals.n_finished, totals.n_aborted, totals.n_failed)
            took = 0.0
            if state != shown:
                shown = state
                try:
                    found, took = await self._bridge.call(self._look)
                except MartletError:  # it has ended just now
                    break
                self._show(found)
            await asyncio.sleep(max(INTERVAL_S, took / MOST_SHARE))
        self.close()

    def _look(self) -> tuple[Look, float]:
        """In the engine's thread."""
        start = time.perf_counter()
        found = look(self._built.engine.scheduler, self._built.engine.pages)
        return found, time.perf_counter() - start

    def _show(self, found: Look) -> None:
        tokenizer = self._built.tokenizer
        decode = (lambda ids: tokenizer.decode(list(ids), skip_special=False)) if self._with_text else None
        data: dict[str, Any] = frame(found, self._steps.take(), self._built.engine.totals, self._names, decode)
        outputs = [output for ticket in self._bridge.open_tickets for output in ticket.outputs]
        open_ = [output.metrics for output in outputs if output.metrics is not None and not output.finished]
        for name, key, values in (
            ("ttft", "time_to_first_token_seconds", [metrics.ttft_s for metrics in open_]),
            ("itl", "inter_token_latency_seconds", [metrics.gaps_s for metrics in open_]),
        ):
            histogram, _ = self._measures.histograms[key]
            data[name] = counts_of(histogram.counts, histogram.bounds, values)
        data["now"] = self._built.engine.clock()
        self._frame = orjson.dumps(data)
        news, self._news = self._news, asyncio.Event()
        news.set()
