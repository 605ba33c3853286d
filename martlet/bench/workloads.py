"""Synthetic workloads: requests and their arrival times (read `drive.py` next, which runs them).

Everything follows from a seed, so that two engines get the same requests. Prompts are random
tokens: no kernel's speed depends on them, no cache has them by chance. Answers have a fixed length.

    throughput   all requests wait from the start; up to `concurrency` run at a time
    latency      random arrivals (a Poisson process), optionally with a long prompt in the middle
    prefix       like throughput; all prompts share their beginning
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

WORKLOADS: Mapping[str, Mapping[str, int | float]] = {  # defaults
    "throughput": {"requests": 64, "concurrency": 16, "prompt_tokens": 128, "gen_tokens": 64},
    "latency": {"requests": 32, "concurrency": 16, "prompt_tokens": 128, "gen_tokens": 64, "rate": 2.0},
    "prefix": {"requests": 32, "concurrency": 8, "prompt_tokens": 32, "gen_tokens": 32, "shared_tokens": 1000},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload's settings; token counts are per request."""

    name: str
    requests: int
    concurrency: int  # most requests that run at a time
    prompt_tokens: int  # not shared
    gen_tokens: int
    shared_tokens: int = 0  # common to all prompts
    rate: float | None = None  # arrivals per second; None: the next one when another ends
    intrusion_tokens: int = 0  # of a long prompt that arrives after half of the others
    seed: int = 0

    @property
    def longest(self) -> int:
        """Positions of the longest request."""
        return max(self.shared_tokens + self.prompt_tokens, self.intrusion_tokens) + self.gen_tokens + 1

    @property
    def tokens_at_a_time(self) -> int:
        """Positions of the requests that run together, if they share nothing."""
        each = self.shared_tokens + self.prompt_tokens + self.gen_tokens + 1
        return self.concurrency * each + (self.longest if self.intrusion_tokens else 0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    name: str
    ids: tuple[int, ...]
    max_tokens: int
    at_s: float | None = None  # None: as soon as another request has ended


def arrivals(workload: Workload, vocab: int) -> list[Arrival]:
    """The requests, in order of arrival."""
    numbers = random.Random(workload.seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(vocab) for _ in range(count))

    shared, now = tokens(workload.shared_tokens), 0.0
    requests: list[Arrival] = []
    for number in range(workload.requests):
        if workload.rate is not None:
            now += numbers.expovariate(workload.rate)
        at_s = now if workload.rate is not None else None
        if workload.intrusion_tokens and number == workload.requests // 2:
            requests.append(Arrival("long", tokens(workload.intrusion_tokens), workload.gen_tokens, at_s))
        requests.append(Arrival(str(number), shared + tokens(workload.prompt_tokens), workload.gen_tokens, at_s))
    return requests
