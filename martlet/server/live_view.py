"""The live view of the engine, as frames for the viewers of /engine (read `live_frames.py` next).

    engine thread ── each step's record ──▸ a short deque ──▸ sampler on the event loop ──▸ viewers
                  ◂── snapshots between two steps ───────────────┘

Without viewers it costs nothing: the engine has no observer. With viewers, a step appends a
reference to a deque of bounded length. A sampler takes a snapshot after new steps: at most four a
second, and rarely enough that snapshots take at most 1 % of the engine's time. All viewers get the
same frame. A slow viewer misses frames and delays nobody. `web.py` has the route.
"""

import asyncio
import time
from collections import deque
from typing import Any

import orjson

from martlet.engine.build import Built
from martlet.errors import MartletError
from martlet.metrics import Observer, StepRecord
from martlet.observe.snapshot import EngineSnapshot, take_snapshot
from martlet.server.bridge import Bridge
from martlet.server.error_replies import ApiError
from martlet.server.live_frames import Names, counts_of, frame
from martlet.server.prometheus import ServerMetrics

INTERVAL_S = 0.25
MAX_SHARE = 0.01  # of the engine's time for snapshots
MAX_STEPS = 48  # in a frame: the newest
MAX_VIEWERS = 16


class _Steps(Observer):
    """Keeps the newest steps."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def stepped(self, record: StepRecord) -> None:
        """Keep a reference, in the engine's thread."""
        self.records.append(record)

    def take(self) -> list[StepRecord]:
        """The records since the last call."""
        records = []
        while self.records:
            records.append(self.records.popleft())
        return records


class EngineView:
    """The frames of one engine and the count of its viewers; the event loop calls everything."""

    def __init__(self, built: Built, bridge: Bridge, metrics: ServerMetrics, *, with_text: bool) -> None:
        self._built, self._bridge, self._metrics = built, bridge, metrics
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
        """How many clients view the engine now."""
        return self._n_viewers

    def hello(self, model: str) -> bytes:
        """Facts that do not change while the server runs, as JSON."""
        built = self._built
        return orjson.dumps(
            {
                "model": model,
                "page_tokens": built.engine.pages.page_size,
                "n_pages": built.engine.n_pages,
                "context": built.plan.context,
                "max_seqs": built.config.max_seqs,
                "with_text": self._with_text,
                "ttft_bounds": self._metrics.histograms["time_to_first_token_seconds"][0].bounds,
                "itl_bounds": self._metrics.histograms["inter_token_latency_seconds"][0].bounds,
            }
        )

    def enter(self) -> None:
        """Add a viewer; the first starts the sampler. ApiError 503 if there are too many."""
        if self._closed or self._n_viewers >= MAX_VIEWERS:
            full = f"The engine has {MAX_VIEWERS} viewers, which is the limit."
            raise ApiError(
                503,
                "The server shuts down." if self._closed else full,
                code="too_many_viewers",
                headers={"Retry-After": "5"},
            )
        self._n_viewers += 1
        if self._n_viewers == 1:
            self._frame, self._news = b"", asyncio.Event()
            self._built.engine.watch(self._steps)
            self._sampler = asyncio.ensure_future(self._sample())

    def leave(self) -> None:
        """Remove a viewer; the last stops the sampler."""
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
        """The newest frame as JSON, once it differs from `seen`.

        b"" if there is none within `timeout_s`; None once the view is closed.
        """
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
                    snapshot, took = await self._bridge.call(self._snapshot)
                except MartletError:  # the engine has just stopped
                    break
                self._show(snapshot)
            await asyncio.sleep(max(INTERVAL_S, took / MAX_SHARE))
        self.close()

    def _snapshot(self) -> tuple[EngineSnapshot, float]:
        """A snapshot and the seconds that it took; runs in the engine's thread."""
        start = time.perf_counter()
        snapshot = take_snapshot(self._built.engine.scheduler, self._built.engine.pages)
        return snapshot, time.perf_counter() - start

    def _show(self, snapshot: EngineSnapshot) -> None:
        tokenizer = self._built.tokenizer
        decode = (lambda ids: tokenizer.decode(list(ids), skip_special=False)) if self._with_text else None
        data: dict[str, Any] = frame(snapshot, self._steps.take(), self._built.engine.totals, self._names, decode)
        outputs = [output for ticket in self._bridge.open_tickets for output in ticket.outputs]
        open_ = [output.metrics for output in outputs if output.metrics is not None and not output.finished]
        for name, key, values in (
            ("ttft", "time_to_first_token_seconds", [metrics.ttft_s for metrics in open_]),
            ("itl", "inter_token_latency_seconds", [metrics.gaps_s for metrics in open_]),
        ):
            histogram, _ = self._metrics.histograms[key]
            data[name] = counts_of(histogram.counts, histogram.bounds, values)
        data["now"] = self._built.engine.clock()
        self._frame = orjson.dumps(data)
        news, self._news = self._news, asyncio.Event()
        news.set()
