"""Synthetic workloads: who asks for what, and when (read `drive.py` next, which runs them).

Everything follows from a seed, so that two engines, or two versions of one, can be given the same requests. Prompts are
random tokens: no kernel's speed depends on them, and none can be in a cache by accident. Every answer has a fixed length.

    throughput   requests that are all there at once, so many at a time
    latency      arrivals at random (a Poisson process), and if wanted one long prompt in their midst
    prefix       requests that share the start of their prompts, so many at a time
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["WORKLOADS", "Arrival", "Workload", "arrivals"]

WORKLOADS: Mapping[str, Mapping[str, int | float]] = {  # what is taken for the settings that are left open
    "throughput": {"requests": 64, "concurrency": 16, "prompt_tokens": 128, "gen_tokens": 64},
    "latency": {"requests": 32, "concurrency": 16, "prompt_tokens": 128, "gen_tokens": 64, "rate": 2.0},
    "prefix": {"requests": 32, "concurrency": 8, "prompt_tokens": 32, "gen_tokens": 32, "shared_tokens": 1000},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload's settings; tokens are a request's."""

    name: str
    requests: int
    concurrency: int  # requests that run at a time, at most
    prompt_tokens: int  # of its own
    gen_tokens: int
    shared_tokens: int = 0  # that all prompts begin with
    rate: float | None = None  # arrivals a second; None: the next one when another ends
    intrusion_tokens: int = 0  # of one long prompt that arrives when half of the others have
    seed: int = 0

    @property
    def longest(self) -> int:
        """Positions that the longest request takes."""
        return max(self.shared_tokens + self.prompt_tokens, self.intrusion_tokens) + self.gen_tokens + 1

    @property
    def tokens_at_a_time(self) -> int:
        """Positions that the requests which run together take, sharing nothing."""
        each = self.shared_tokens + self.prompt_tokens + self.gen_tokens + 1
        return self.concurrency * each + (self.longest if self.intrusion_tokens else 0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload; `at_s` is None for "as soon as there is room"."""

    name: str
    ids: tuple[int, ...]
    max_tokens: int
    at_s: float | None = None


def arrivals(workload: Workload, vocab: int) -> list[Arrival]:
    """The requests, in order of arrival."""
    numbers = random.Random(workload.seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(vocab) for _ in range(count))

    shared, now = tokens(workload.shared_tokens), 0.0
    found: list[Arrival] = []
    for number in range(workload.requests):
        if workload.rate is not None:
            now += numbers.expovariate(workload.rate)
        at_s = now if workload.rate is not None else None
        if workload.intrusion_tokens and number == workload.requests // 2:
            found.append(Arrival("long", tokens(workload.intrusion_tokens), workload.gen_tokens, at_s))
        found.append(Arrival(str(number), shared + tokens(workload.prompt_tokens), workload.gen_tokens, at_s))
    return found
