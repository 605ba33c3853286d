"""The queue: waiting sequences in the policy's order, bounded (read `policy.py` next)."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from itertools import islice

from martlet.errors import CapacityError
from martlet.sched.limits import SchedulerLimits
from martlet.sched.policy import Policy, SchedulerView
from martlet.types import Sequence

QUEUE_TIMEOUT = "queue_timeout"  # stop reason of a request that waited too long

RATE_WEIGHT = 0.1  # of the newest step in the mean rate of tokens


def rank(seq: Sequence) -> tuple[float, int]:
    """A sequence's sort key in the policy's order."""
    return seq.key, seq.seq_id


class WaitingQueue:
    """Sorted by rank; under a policy whose keys change, by arrival, and compared at each call."""

    def __init__(self, policy: Policy, view: SchedulerView, limits: SchedulerLimits) -> None:
        self._policy = policy
        self._view = view
        self._limits = limits
        self._sequences: list[Sequence] = []
        self._timeouts: list[tuple[float, int, Sequence]] = []  # a heap
        self._rate: float | None = None  # tokens computed per second
        self.n_tokens = 0  # prompt tokens of the waiting sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def check_room(self, n_seqs: int, n_tokens: int) -> None:
        """Raise CapacityError, with a time to try again, if the queue has no room for the request.

        An empty queue takes any request: otherwise a request beyond the bound could never run.
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
        """Learn that a step computed `n_tokens` in `seconds`."""
        if seconds > 0.0:
            rate = n_tokens / seconds
            self._rate = rate if self._rate is None else self._rate + RATE_WEIGHT * (rate - self._rate)

    def add(self, seq: Sequence) -> None:
        """Add a sequence, in order."""
        seq.key = 0.0 if self._policy.changes else self._policy.key(seq, self._view)
        insort(self._sequences, seq, key=rank)
        self.n_tokens += seq.n_prompt

    def watch(self, seq: Sequence) -> None:
        """Watch a sequence's queue timeout, if it has one."""
        timeout = seq.request.scheduling.queue_timeout_s
        if timeout is not None:
            heapq.heappush(self._timeouts, (seq.arrival_s + timeout, seq.seq_id, seq))

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence."""
        index = bisect_left(self._sequences, rank(seq), key=rank)
        assert self._sequences[index] is seq
        del self._sequences[index]
        self.n_tokens -= seq.n_prompt

    def first(self, held: Collection[Sequence]) -> Sequence | None:
        """The next sequence to admit that is not in `held`, by its key now."""
        ready = (seq for seq in self._sequences if seq not in held)
        if not self._policy.changes:
            return next(ready, None)
        best: tuple[float, int, Sequence] | None = None
        for seq in islice(ready, self._policy.look_ahead):
            entry = self._policy.key(seq, self._view), seq.seq_id, seq
            if best is None or entry[:2] < best[:2]:
                best = entry
        return None if best is None else best[2]

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose timeout has passed since the last call, waiting or not."""
        late = []
        while self._timeouts and self._timeouts[0][0] <= now:
            late.append(heapq.heappop(self._timeouts)[2])
        return late

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()
        self._timeouts.clear()
        self.n_tokens = 0
