"""Records the metrics of requests while the engine steps (read `metrics.py` for their meaning).

Without observers it only counts, which takes a few dozen microseconds per step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from martlet.metrics import EngineTotals, Observer, RequestMetrics, SpanRecord, StepRecord
from martlet.types import Event, FinishReason, Request, SeqId, StepPlan, StepResult
from martlet.types import Sequence as Running

MIN_PREFILL = 32  # tokens of a step that counts for the prefill speed
MEMORY_S = 10.0  # prefill time after which earlier measurements count half

Load = Callable[[], tuple[int, int, int]]  # running sequences, waiting sequences, free pages


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    metrics: RequestMetrics
    last_s: dict[int, float | None]  # time of the last token, by open sequence


class Recorder:
    """Fills in the metrics of every request, and calls the observers."""

    def __init__(self, clock: Callable[[], float], load: Load, observers: Sequence[Observer] = ()) -> None:
        self.totals = EngineTotals()
        self._clock = clock
        self._load = load
        self._observers: tuple[Observer, ...] = ()
        self._readers: tuple[Observer, ...] = ()  # observers that read step records
        self._open: dict[str, _Open] = {}
        self._sequences: dict[SeqId, tuple[RequestMetrics, str, int]] = {}
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._step_prefill = 0  # prompt tokens of the running step
        self._plan: StepPlan | None = None  # of the running step
        self._started: Sequence[Running] = ()
        for observer in observers:
            self.watch(observer)

    def accepted(self, request: Request) -> RequestMetrics:
        """A request was accepted; return its metrics, which are filled in while it runs."""
        now = self._clock()
        metrics = RequestMetrics(request.arrival_s or now, len(request.prompt_ids))
        self._open[request.request_id] = _Open(metrics, dict.fromkeys(range(request.params.n)))
        self.totals.n_requests += 1
        for observer in self._observers:
            observer.accepted(request, now)
        return metrics

    def planned(self, plan: StepPlan, started: Sequence[Running], now: float) -> None:
        """A step is about to run."""
        self._plan, self._started = plan, started
        for seq in started:
            metrics = self._open[seq.request.request_id].metrics
            self._sequences[seq.seq_id] = metrics, seq.request.request_id, seq.index
            if metrics.scheduled_s is None:
                metrics.scheduled_s, metrics.cache = now, seq.cache_use
                self.totals.n_prompt += metrics.n_prompt
                self.totals.n_cached += metrics.n_cached
        for seq_id in plan.preempted:
            if seq_id in self._sequences:
                self._sequences[seq_id][0].n_preempted += 1
        self.totals.n_preempted += len(plan.preempted)
        prefilled = 0
        for span in plan.spans:
            entry = self._sequences.get(span.seq)
            if span.stop_layer is not None:  # counted with its last layers
                continue
            if entry is not None and (span.count - span.n_draft > 1 or span.start < entry[0].n_prompt):
                metrics = entry[0]
                metrics.n_chunks += 1
                metrics.n_prefilled = max(metrics.n_prefilled, min(span.start + span.count, metrics.n_prompt))
                prefilled += span.count
        self._step_prefill = prefilled

    def committed(self, plan: StepPlan, result: StepResult, events: list[Event], times: tuple[float, ...]) -> None:
        """A step was committed; `times` are its start and the ends of planning and running."""
        start, planned, ran = times
        now = self._clock()
        self._plan = None
        self._prefilled(ran - planned)
        self._take(events, now)
        self._count_drafts(plan, result)
        self.totals.n_steps += 1
        for observer in self._observers:
            observer.ran(plan, now - start)
        if self._readers:
            record = self._record(plan, result, tuple(events), (start, planned, ran, now))
            for observer in self._readers:
                observer.stepped(record)
        for seq_id in plan.dropped:
            self._sequences.pop(seq_id, None)

    def ended(self, events: list[Event]) -> None:
        """Sequences ended outside of a step."""
        if not events:
            return
        now = self._clock()
        self._take(events, now)
        for observer in self._observers:
            observer.ended(events, now)

    def cleared(self, events: list[Event]) -> None:
        """Every request ended, perhaps because the running step failed."""
        plan, self._plan = self._plan, None
        if plan is not None:
            for observer in self._observers:
                observer.broke(plan)
        self.ended(events)

    def watch(self, observer: Observer) -> None:
        self._set_observers((*self._observers, observer))

    def unwatch(self, observer: Observer) -> None:
        """Remove an observer; a call under way may still reach it."""
        self._set_observers(tuple(other for other in self._observers if other is not observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self._readers = tuple(each for each in observers if type(each).stepped is not Observer.stepped)
        self._observers = observers

    def close(self) -> None:
        for observer in self._observers:
            observer.close()

    def saved_s(self, n_tokens: int) -> float | None:
        """Seconds to compute `n_tokens` of prompts at the measured speed; None without one."""
        return n_tokens * self._prefill_s / self._prefill_tokens if self._prefill_tokens else None

    def _prefilled(self, run_s: float) -> None:
        self.totals.n_prefilled += self._step_prefill
        if self._step_prefill < MIN_PREFILL:
            return
        if self._prefill_s > MEMORY_S:
            self._prefill_s, self._prefill_tokens = self._prefill_s / 2, self._prefill_tokens / 2
        self._prefill_s += run_s
        self._prefill_tokens += self._step_prefill

    def _take(self, events: Iterable[Event], now: float) -> None:
        for event in events:
            entry = self._open[event.request_id]
            metrics = entry.metrics
            if event.token_id is not None:
                last_s = entry.last_s[event.index]
                if last_s is not None:
                    metrics.gaps_s.append(now - last_s)
                entry.last_s[event.index] = now
                if metrics.first_token_s is None:
                    metrics.first_token_s = now
                metrics.n_generated += 1
                metrics.n_first += metrics.first_token_s == now
                metrics.last_token_s = now
                self.totals.n_generated += 1
            if event.finish is not None:
                self._count(event.finish)
                del entry.last_s[event.index]
                if not entry.last_s:
                    metrics.finished_s = now
                    metrics.saved_s = self.saved_s(metrics.n_cached)
                    del self._open[event.request_id]

    def _count_drafts(self, plan: StepPlan, result: StepResult) -> None:
        drafted = [span for span in plan.spans if span.draft]
        if not drafted:
            return
        accepted = {sampled.seq: len(sampled.more) for sampled in result.sampled}
        for span in drafted:
            if span.seq in self._sequences:
                metrics = self._sequences[span.seq][0]
                metrics.n_drafted += len(span.draft)
                metrics.n_accepted += accepted.get(span.seq, 0)

    def _count(self, finish: FinishReason) -> None:
        if finish is FinishReason.ABORT:
            self.totals.n_aborted += 1
        elif finish is FinishReason.ERROR:
            self.totals.n_failed += 1
        else:
            self.totals.n_finished += 1

    def _record(
        self, plan: StepPlan, result: StepResult, events: tuple[Event, ...], times: tuple[float, float, float, float]
    ) -> StepRecord:
        start, planned, ran, now = times
        spans = []
        for span in plan.spans:
            if span.seq not in self._sequences:
                continue
            metrics, request_id, index = self._sequences[span.seq]
            decode = span.count - span.n_draft == 1 and span.start >= metrics.n_prompt
            spans.append(SpanRecord(request_id, index, span.start, span.count, decode, span.place))
        preempted = [self._sequences[seq_id][1:] for seq_id in plan.preempted if seq_id in self._sequences]
        running, waiting, free = self._load()
        return StepRecord(
            step=plan.step,
            start_s=start,
            plan_s=planned - start,
            run_s=ran - planned,
            commit_s=now - ran,
            spans=tuple(spans),
            preempted=tuple(preempted),
            n_running=running,
            n_waiting=waiting,
            n_free_pages=free,
            n_cached=self.totals.n_cached,
            plan=plan,
            result=result,
            started=tuple(self._started),
            events=events,
        )
