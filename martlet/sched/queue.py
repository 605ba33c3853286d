"""The queue: sequences that wait, in the policy's order, bounded (read `admission.py` next)."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from itertools import islice

from martlet.errors import CapacityError
from martlet.sched.limits import SchedulerLimits
from martlet.sched.policy import Facts, Policy
from martlet.types import Sequence

__all__ = ["QUEUE_TIMEOUT", "WaitingQueue", "rank"]

QUEUE_TIMEOUT = "queue_timeout"  # the stop reason of a request that fails because it waited too long

RATE_WEIGHT = 0.1  # of the newest step in the mean rate of tokens


def rank(seq: Sequence) -> tuple[float, int]:
    """Its place in the policy's order."""
    return seq.key, seq.seq_id


class WaitingQueue:
    """Sorted by rank; under a policy whose keys change, by arrival, and compared when asked."""

    def __init__(self, policy: Policy, facts: Facts, limits: SchedulerLimits) -> None:
        self._policy = policy
        self._facts = facts
        self._limits = limits
        self._sequences: list[Sequence] = []
        self._timeouts: list[tuple[float, int, Sequence]] = []  # a heap
        self._rate: float | None = None  # tokens computed a second
        self.n_tokens = 0  # prompt tokens of those that wait

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def check_room(self, n_seqs: int, n_tokens: int) -> None:
        """Raise CapacityError, with a time to try again, if a request of so many sequences and tokens finds it full.

        An empty queue takes any request: one that is larger than the bound would be refused for ever.
        """
        limits, seqs = self._limits, self._sequences
        if not seqs:
            return
        mean = self.n_tokens / len(seqs)
        if limits.max_waiting is not None and len(seqs) + n_seqs > limits.max_waiting:
            excess = mean * (len(seqs) + n_seqs - limits.max_waiting)
            what, option = f"{len(seqs):,} sequences wait and at most {limits.max_waiting:,} may", "max_waiting"
        elif limits.max_waiting_tokens is not None and self.n_tokens + n_tokens > limits.max_waiting_tokens:
            excess = float(self.n_tokens + n_tokens - limits.max_waiting_tokens)
            what = f"{self.n_tokens:,} prompt tokens wait, {n_tokens:,} more would come and at most"
            what, option = f"{what} {limits.max_waiting_tokens:,} may", "max_waiting_tokens"
        else:
            return
        seconds = 1.0 if self._rate is None else max(1.0, excess / self._rate)
        raise CapacityError(
            f"The queue is full: {what}. Try again in {seconds:.0f} s, or raise {option}.", retry_after_s=seconds
        )

    def measure(self, n_tokens: int, seconds: float) -> None:
        """Note that a step computed so many tokens."""
        if seconds > 0.0:
            found = n_tokens / seconds
            self._rate = found if self._rate is None else self._rate + RATE_WEIGHT * (found - self._rate)

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait, in its place."""
        seq.key = 0.0 if self._policy.changes else self._policy.key(seq, self._facts)
        insort(self._sequences, seq, key=rank)
        self.n_tokens += seq.n_prompt

    def watch(self, seq: Sequence) -> None:
        """Heed its queue timeout."""
        timeout = seq.request.scheduling.queue_timeout_s
        if timeout is not None:
            heapq.heappush(self._timeouts, (seq.arrival_s + timeout, seq.seq_id, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out."""
        place = bisect_left(self._sequences, rank(seq), key=rank)
        assert self._sequences[place] is seq
        del self._sequences[place]
        self.n_tokens -= seq.n_prompt

    def first(self, held: Collection[Sequence]) -> Sequence | None:
        """The next to be admitted, but for those that are held; under a policy whose keys change it is its key now."""
        free = (seq for seq in self._sequences if seq not in held)
        if not self._policy.changes:
            return next(free, None)
        best: tuple[float, int, Sequence] | None = None
        for seq in islice(free, self._policy.look_ahead):
            entry = self._policy.key(seq, self._facts), seq.seq_id, seq
            if best is None or entry[:2] < best[:2]:
                best = entry
        return None if best is None else best[2]

    def expired(self, now: float) -> list[Sequence]:
        """Those whose timeout has passed since the last call, whether they still wait or not."""
        found = []
        while self._timeouts and self._timeouts[0][0] <= now:
            found.append(heapq.heappop(self._timeouts)[2])
        return found

    def clear(self) -> None:
        """Forget all."""
        self._sequences.clear()
        self._timeouts.clear()
        self.n_tokens = 0
