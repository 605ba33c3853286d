"""The answers of a run of the equality matrix, and the engine's work for them (read `matrix.py`
next).
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from martlet import LLM
from martlet.kv_types import share_granularity
from martlet.metrics import Observer, StepRecord
from martlet.types import Event, MissReason, SeqId, Started, StepPlan, StepResult
from martlet.types import Sequence as Running


@dataclass
class Answers:
    """Everything that must be equal, by (request, completion)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[str, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, int], str] = field(default_factory=dict)
    # digests, also by position
    logits: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    beams: list[Any] | None = None

    def of(self, name: str) -> Any:
        """Return the answers to a request, and the digests of its logits."""
        keys = sorted(key for key in self.ends if key[0] == name)
        rows = {key[1:]: digest for key, digest in self.logits.items() if key[0] == name}
        return [(self.tokens[key], self.logprobs[key], self.ends[key]) for key in keys], rows


class Seen(Observer):
    """Stands before the executor and observes the engine: the answers, and counts of the work for
    them.
    """

    def __init__(self, llm: LLM, *, forces: bool = True) -> None:
        """With `forces` False the engine learns of no forced token, so that they come one at a
        time.
        """
        self.answers = Answers()
        self.sequences: dict[SeqId, Running] = {}
        self.most_spans = self.n_mixed = self.n_copies = self.n_loads = self.n_swapped = self.n_shared = 0
        self.n_accepted = self.n_refused = 0  # guesses
        self.n_forced = self.n_masks = 0  # tokens that grammars forced; masks that were computed
        self._forces = forces
        # the tokens that a sequence's grammar forces next
        self._told: dict[SeqId, tuple[int, ...]] = {}
        self.n_preempted = self.n_again = self.n_failed = self.n_evicted = 0
        self.n_threads = 1 + sum(thread.name.startswith("martlet-") for thread in threading.enumerate())
        # a shared prefix ends at a multiple of it
        self.share = share_granularity(llm.config.kv_dtype)
        self.n_layered = 0  # spans through some of the layers
        self.chunks: dict[SeqId, int] = defaultdict(int)  # spans of a prompt
        self.started: list[str] = []  # requests in the order of their first spans
        self.joined = 0  # sequences whose first span ran beside a decoding sequence
        # steps with an adapter; with another adapter or none beside it
        self.n_adapted = self.n_beside = 0
        self.beside_beams = 0  # steps that a beam search shared with requests
        self._reach: dict[SeqId, int] = defaultdict(int)
        self._inner = llm.engine.executor
        self._sampling: Any = llm.engine.executor._sampling
        self._sample = self._sampling._sample
        self._sampling._sample = self._spy
        self._scheduler = llm.engine.scheduler
        cache = llm.engine.scheduler.cache
        if cache is not None:
            evict = cache.evict
            cache.evict = lambda n, *, save=True: self._count_evicted(evict(n, save=save))
        llm.engine.executor = self
        llm.engine.watch(self)

    # -- as an executor ----------------------------------------------------------------------------
    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        """Count what a plan does, and run it."""
        known = set(self.sequences)
        self.sequences |= {seq.seq_id: seq for seq in self._scheduler.started}
        decodes = [span for span in plan.spans if span.start >= self.sequences[span.seq].n_prompt]
        self.most_spans = max(self.most_spans, len(plan.spans))
        self.n_mixed += 0 < len(decodes) < len(plan.spans)
        self.joined += sum(new.seq not in known for new in plan.added) if decodes else 0
        adapters = {self.sequences[span.seq].request.adapter for span in plan.spans}
        self.n_adapted += bool(adapters - {""})
        self.n_beside += len(adapters) > 1
        self.n_copies += len(plan.copies)
        self.n_loads += len(plan.loads)
        self.n_preempted += len(plan.preempted)
        again = {page for seq in self.sequences.values() if seq.n_preempted for page in seq.pages}
        self.n_swapped += sum(load.page in again for load in plan.loads)
        names = set()
        for span in plan.spans:
            seq = self.sequences[span.seq]
            names.add(seq.request.request_id.startswith("beams"))
            if seq.request.request_id not in self.started:
                self.started.append(seq.request.request_id)
            self.chunks[span.seq] += span.start < seq.n_prompt
            self.n_layered += span.is_layered
            if span.stop_layer is not None:
                continue
            end = span.start + span.count - len(span.draft)
            self.n_again += max(0, min(end, self._reach[span.seq]) - span.start)
            self._reach[span.seq] = max(self._reach[span.seq], end)
        self.beside_beams += len(names) == 2
        siblings = [self.sequences[span.seq] for span in plan.spans]
        for one, other in itertools.combinations(siblings, 2):
            same = one.request.request_id == other.request.request_id
            self.n_shared += same and not set(one.pages).isdisjoint(other.pages)
        result = self._inner.run(plan, started)
        self.n_failed += len(result.failed_loads) + len(result.failed_saves)
        return result

    def embed(self, ids: Any, pages: Any) -> Any:
        return self._inner.embed(ids, pages)

    def close(self) -> None:
        self._inner.close()

    # -- as an observer ----------------------------------------------------------------------------
    def stepped(self, record: StepRecord) -> None:
        self.take(record.events)

    def ended(self, events: Any, now: float) -> None:
        self.take(events)

    def take(self, events: Sequence[Event]) -> None:
        """Record answers."""
        for event in events:
            key = event.request_id, event.index
            if event.token_id is not None:
                self.answers.tokens[key].append(event.token_id)
            self.answers.logprobs[key] += event.prompt_logprobs
            if event.logprobs is not None:
                self.answers.logprobs[key].append(event.logprobs)
            if event.finish is not None:
                assert key not in self.answers.ends, f"{key} ended twice"
                self.answers.ends[key] = f"{event.finish} {event.stop_reason} {event.error}"

    def uses(self) -> Iterator[tuple[int, int, MissReason]]:
        """Yield for each sequence but beams: cached positions, prompt length, why not more were
        cached.
        """
        for seq in self.sequences.values():
            if not seq.request.request_id.startswith("beams"):
                yield seq.cache_use.n_tokens, seq.n_prompt, seq.cache_use.reason

    def _spy(self, span: Any, logits: Any) -> Any:
        seq, sampled = self.sequences[span.seq], self._sample(span, logits)
        # Rows after a wrong guess belong to no text.
        rows = range(1 + len(sampled.more)) if span.draft else range(span.n_logits)
        told = self._told.get(span.seq, ())
        forced = bool(span.draft) and told[: len(span.draft)] == span.draft
        self.n_forced += len(sampled.more) if forced else 0
        self.n_accepted += len(sampled.more)
        self.n_refused += span.n_draft - len(sampled.more)
        sampler = self._sampling._sequences[span.seq].sampler
        self.n_masks += sampler is not None and sampler.constraint is not None and sampler._bits_at >= 0
        self._told[span.seq] = sampled.forced
        if not self._forces:
            sampled.forced = ()
        first = span.start if span.draft else span.start + span.count - span.n_logits
        for place, row in enumerate(rows):
            position = first + place
            key = seq.request.request_id, seq.index, position
            digest = blake2b(logits[row].tobytes(), digest_size=16).digest()
            assert self.answers.logits.setdefault(key, digest) == digest, f"other logits when computed again: {key}"
        return sampled

    def _count_evicted(self, count: int) -> int:
        self.n_evicted += count
        return count


def hit(seen: Seen, good: Callable[[int, int, MissReason], bool]) -> bool:
    """Whether `good` holds for any prompt: cached positions, prompt length, why not more were
    cached.
    """
    return any(good(*use) for use in seen.uses())


def whole(seen: Seen, n_prompt: int) -> int:
    """The most positions of a prompt that can be cached: its last position is always computed."""
    return (n_prompt - 1) // seen.share * seen.share


def order_differs(seen: Seen) -> bool:
    """Whether requests started in another order than they arrived."""
    names = [name for name in seen.started if name.isdigit()]
    return names != sorted(names)
