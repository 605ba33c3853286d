"""Random work for the scheduler, with everything that can go wrong, and the invariants after every
step.

`bench/soak.py` runs it for as long as one likes, `test_scheduler_random.py` for seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from martlet.cache.disk_slots import DiskSlots
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.errors import CapacityError, RequestError
from martlet.sampling_params import SamplingParams
from martlet.sched.page_reserve import MAX_PREEMPTED
from martlet.sched.policy import POLICIES
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import ScriptedExecutor
from martlet.types import Event, FinishReason, Load, Request, Scheduling, SeqId, Sequence, Started, StepPlan

EOS = 2
ALPHABET = (10, 11, 12)  # few, so that prompts often begin alike


def rows_of(plan: StepPlan, n_layers: int) -> float:
    """The rows of a step; one that goes through a third of the layers is a third."""
    return sum(
        s.count * ((n_layers if s.stop_layer is None else s.stop_layer) - s.first_layer) / n_layers for s in plan.spans
    )


def next_id(ids: list[int], index: int) -> int:
    """The token after `ids`: it depends on all that a real one depends on, so that a lost or
    doubled one shows.
    """
    mixed = (len(ids) * 7919 + sum(ids[-3:]) * 104729 + index * 31) % 1009
    return EOS if mixed % 23 == 0 else ALPHABET[mixed % 3]


def token_at(seq: Started, number: int) -> int:
    """Token `number` of a sequence's answer."""
    ids = list(seq.request.prompt_ids)
    for _ in range(number + 1):
        ids.append(next_id(ids, seq.index))
    return ids[-1]


def expected_answer(seq: Sequence) -> list[int]:
    """What a sequence would generate alone."""
    ids = list(seq.request.prompt_ids)
    while len(ids) < seq.limit:
        ids.append(next_id(ids, seq.index))
        if ids[-1] in seq.stop_ids:
            break
    return ids[seq.n_prompt :]


@dataclass(frozen=True)
class SoakOptions:
    """One kind of run."""

    policy: str = "fcfs"
    n_pages: int = 14
    page_size: int = 4
    context: int = 40
    step_tokens: int = 12
    max_seqs: int = 4
    cache: bool = True
    n_slots: int = 0
    share_pages: int = 0  # 0: prefixes end anywhere
    stall_s: float | None = None
    layered_rows: int = 0
    n_layers: int = 1
    guesses: int = 0  # at most so many for a sequence,
    failures: bool = True  # of steps and of loads
    check_every: int = 1


class Soak:
    """A scheduler, a stand-in for the model, and a record of what they owe."""

    def __init__(self, seed: int, options: SoakOptions = SoakOptions()) -> None:
        self.random = random.Random(seed)
        self.options = options
        self.pool = PagePool(options.n_pages, options.page_size)
        share = options.share_pages * options.page_size or 1
        tier = DiskSlots(options.n_slots) if options.n_slots else None
        self.cache = (
            RadixCache(self.pool, share_granularity=share, tier=tier, fair=options.policy == "fair")
            if options.cache
            else None
        )
        limits = SchedulerLimits(
            options.context,
            options.step_tokens,
            options.max_seqs,
            options.max_seqs + 2 + options.guesses,
            40,
            400,
            stall_s=options.stall_s,
            layered_rows=options.layered_rows,
            n_layers=options.n_layers,
        )
        self.scheduler = Scheduler(
            self.pool,
            limits,
            frozenset({EOS}),
            cache=self.cache,
            policy=POLICIES[options.policy],
            share_granularity=share,
        )
        self.executor = ScriptedExecutor(token_at, options.page_size, self._fails)
        self.executor.keep_plans = False
        self.now = 1.0
        self.n_operations = self.n_steps = self.n_requests = self.n_refused = self.n_loads = self.n_copies = 0
        self.n_shared = self.n_layered = self.n_guessed = 0
        self.live: dict[tuple[str, int], Sequence] = {}
        self.accepted: set[tuple[str, int]] = set()
        self.prompts: list[tuple[int, ...]] = []
        self.ends: Counter[tuple[str, int]] = Counter()
        self.reasons: Counter[FinishReason] = Counter()
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def run(self, n_operations: int) -> None:
        """Do so many random things, then let everything end, and check that nothing is left."""
        for _ in range(n_operations):
            self.operate()
        self.drain()
        assert not self.live, "a sequence has not ended"
        assert set(self.ends) == self.accepted
        assert set(self.ends.values()) <= {1}, "a sequence has ended twice"
        self.scheduler.check()
        assert self.scheduler.n_free == self.pool.n_pages, "a page is lost"
        if self.cache is not None:
            self.cache.clear()
        assert self.pool.n_free == self.pool.n_pages, "a page is lost"

    def drain(self) -> None:
        """Step until all have ended."""
        for _ in range(200 * (len(self.scheduler._live) + 1)):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody never ends")

    def operate(self) -> None:
        """One random thing."""
        draw = self.random.random()
        if draw < 0.25:
            self.add()
        elif draw < 0.28:
            self.take(self.scheduler.abort(self.any_request()))
        elif draw < 0.30:
            self.take(self.scheduler.stop(self.any_request(), self.random.randrange(3), "x"))
        elif draw < 0.32:
            self.step(self.any_request())
        elif draw < 0.33:
            self.embed()
        elif draw < 0.333 and self.options.failures:
            self.scheduler.plan(self.now)  # and whoever should have run it died
            self.take(self.scheduler.clear("the step failed"))
        else:
            self.step()
        self.n_operations += 1
        if self.n_operations % self.options.check_every == 0:
            self.scheduler.check()

    def any_request(self) -> str:
        return self.random.choice(list(self.live))[0] if self.live else "nobody"

    def add(self) -> None:
        """A request, or a fork of a sequence that runs."""
        name = f"r{self.n_requests}"
        self.n_requests += 1
        rnd = self.random
        prompt = tuple(rnd.choice(ALPHABET) for _ in range(rnd.randint(1, 30)))
        parent = None
        if self.live and rnd.random() < 0.2:
            source = rnd.choice(list(self.live.values()))
            parent = source.request.request_id, source.index
            prompt = (*source.ids[: rnd.randint(1, len(source.ids))], rnd.choice(ALPHABET))
        elif self.prompts and rnd.random() < 0.6:
            earlier = rnd.choice(self.prompts[-50:])
            prompt = earlier[: rnd.randint(1, len(earlier))] + prompt[: rnd.randint(0, 6)] or prompt
        params = SamplingParams(
            max_tokens=rnd.choice([None, 0, 1, 5, rnd.randint(1, 25)]),
            n=rnd.choice([1, 1, 1, 2, 3]),
            prompt_logprobs=rnd.choice([None, None, None, None, 0]),
            ignore_eos=rnd.random() < 0.5,
        )
        scheduling = Scheduling(
            rnd.randint(-2, 2),
            rnd.choice("abc"),
            rnd.choice(["", "", "", "salt"]),
            rnd.choice([None, 0.1, 5.0]),
            rnd.choice([None, 0.05]),
            rnd.choice([None, None, None, 3.0]),
        )
        request = Request(name, prompt, params, scheduling=scheduling)
        try:
            if parent is None:
                self.scheduler.add(request, self.now)
            else:
                self.scheduler.fork(request, parent, self.now)
        except (RequestError, CapacityError):
            self.n_refused += 1
            return
        self.prompts.append(prompt)
        for seq in self.scheduler._requests[name]:
            self.live[name, seq.index] = seq
            self.accepted.add((name, seq.index))
            self.tokens[name, seq.index] = []

    def step(self, abort: str | None = None) -> None:
        """Plan, run and commit; with `abort`, a request that ends while the step runs."""
        plan = self.scheduler.plan(self.now, self.drafts())
        started = [Started.of(seq) for seq in self.scheduler.started]
        self.check_plan(plan)
        if abort is not None:
            self.take(self.scheduler.abort(abort))
        result = self.executor.run(plan, started)
        self.now += 0.001 * len(plan.spans) + 0.0005 * rows_of(plan, self.options.n_layers) + 1e-4
        self.take(self.scheduler.commit(plan, result, self.now))
        self.n_steps += 1
        self.n_loads += len(plan.loads)
        self.n_copies += len(plan.copies)

    def drafts(self) -> dict[SeqId, tuple[int, ...]]:
        """Guesses of some sequences' next tokens, most of them right."""
        rnd, found = self.random, {}
        for seq in self.scheduler.running if self.options.guesses else ():
            if rnd.random() < 0.5:
                continue
            ids = list(seq.ids)
            for _ in range(rnd.randint(1, self.options.guesses)):
                ids.append(next_id(ids, seq.index) if rnd.random() < 0.8 else rnd.choice(ALPHABET))
            found[seq.seq_id] = tuple(ids[len(seq.ids) :])
        return found

    def check_plan(self, plan: StepPlan) -> None:
        """Budgets, and who may be preempted."""
        assert all(span.count > 0 for span in plan.spans)
        # A chunk between layers has a program of its own, and is taken further in a step that
        # guesses have filled.
        most = self.options.step_tokens
        assert sum(span.count for span in plan.spans if not span.is_layered) <= most
        assert self.options.guesses or sum(span.count for span in plan.spans) <= most
        self.n_guessed += sum(len(span.draft) for span in plan.spans)
        self.n_layered += sum(span.is_layered for span in plan.spans)
        assert len(plan.spans) <= self.options.max_seqs
        assert sum(span.n_logits for span in plan.spans) <= self.options.max_seqs + 2 + self.options.guesses
        assert all(seq.n_preempted <= MAX_PREEMPTED for seq in self.scheduler._live.values())
        sources = {copy.source for copy in plan.copies}
        assert not sources & {load.page for load in plan.loads}, "a page is overwritten before it is copied"
        self.n_shared += sum(span.start for span in plan.spans if span.new_pages and span.first_page == 0)

    def embed(self) -> None:
        """Somebody borrows pages between two steps and writes in them."""
        try:
            pages = self.scheduler.borrow(self.random.randint(1, 12))
        except CapacityError:
            return
        self.executor.embed((), pages)
        self.pool.free(pages)

    def take(self, events: list[Event]) -> None:
        """Note what has happened; an answer that ends by itself is what it would be alone."""
        for event in events:
            key = event.request_id, event.index
            if event.token_id is not None:
                self.tokens[key].append(event.token_id)
            if event.finish is None:
                continue
            self.ends[key] += 1
            self.reasons[event.finish] += 1
            answer, tokens = expected_answer(self.live.pop(key)), self.tokens.pop(key)
            if event.finish in (FinishReason.LENGTH, FinishReason.STOP) and event.stop_reason is None:
                assert tokens == answer
            else:
                assert tokens == answer[: len(tokens)]

    def _fails(self, load: Load) -> bool:
        return self.options.failures and self.random.random() < 0.2
