"""KV memory that is lost, by the way it is handed out: contiguous buffers against pages, on the
same requests.

    python bench/fragmentation.py [--tokens 65536] [--context 2048] [--requests 600]
                                  [--seed 0] [--json]

The claim that 60 to 80 % of the KV memory is lost to fragmentation and over-reservation is
arXiv:2309.06180's (figure 2 there: 20 to 38 % of it held tokens in the systems of the time, 96 %
with pages). This program replays it with integers only: a queue of requests that never runs dry,
one token a step for each that runs, and four ways to hand out the same memory:

    whole context    a buffer of the model's context for each sequence
    up to its limit  prompt + max_tokens, contiguous, first fit
    doubling         a buddy allocator; a buffer that is full moves to one of twice its size
    pages            Martlet's own: `cache/pages.py`, 32 tokens each

Lengths are log-normal, as in logs of chat services: prompts around 160 tokens (5 % above 1,000),
answers around 215; clients ask for a max_tokens of 256, 512 or 1,024, whatever covers their answer.
The averages are over the steps in which a request waits.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from martlet.cache.pages import PagePool

PAGE = 32
LIMITS = (256, 512, 1024)


@dataclass(eq=False)
class Job:
    """A request: what it needs is known to the simulation only."""

    n_prompt: int
    n_answer: int
    limit: int  # prompt + max_tokens
    n_tokens: int = 0
    held: Any = None

    @property
    def n_total(self) -> int:
        """Positions that it will have written."""
        return self.n_prompt + self.n_answer


class Memory(Protocol):
    """A way to hand memory out; sizes in tokens."""

    reserved: int

    def start(self, job: Job) -> bool:
        """Reserve for a request's prompt; False if it has to wait."""

    def grow(self, job: Job) -> bool:
        """Room for one more token; False if there is none."""

    def stop(self, job: Job) -> None:
        """Take everything back."""


@dataclass
class Contiguous:
    """One buffer a request, of a size fixed at its start; first fit over a list of holes."""

    tokens: int
    context: int | None = None  # the size of every buffer; None: the request's own limit
    reserved: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, size), in order

    def __post_init__(self) -> None:
        self.holes = [(0, self.tokens)]

    def start(self, job: Job) -> bool:
        """Take the first hole that is large enough."""
        size = self.context or job.limit
        for number, (start, room) in enumerate(self.holes):
            if room >= size:
                self.holes[number : number + 1] = [(start + size, room - size)] if room > size else []
                job.held = (start, size)
                self.reserved += size
                return True
        return False

    def grow(self, job: Job) -> bool:
        """Everything was reserved at the start."""
        return True

    def stop(self, job: Job) -> None:
        """Give the buffer back; holes that touch become one."""
        self.reserved -= job.held[1]
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self.holes, job.held]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.holes = merged


@dataclass
class Buddies:
    """Buffers of powers of two; one that is full moves to one of twice its size, and needs both for
    a moment.
    """

    tokens: int
    reserved: int = 0
    free: dict[int, set[int]] = field(default_factory=dict)  # size → starts

    def __post_init__(self) -> None:
        assert self.tokens & (self.tokens - 1) == 0, "a power of two"
        self.free = {self.tokens: {0}}

    def start(self, job: Job) -> bool:
        """The smallest power of two that holds the prompt and a token."""
        job.held = self._take(1 << job.n_prompt.bit_length())
        return job.held is not None

    def grow(self, job: Job) -> bool:
        """Move when the buffer is full."""
        if job.n_tokens < job.held[1]:
            return True
        larger = self._take(2 * job.held[1])
        if larger is None:
            return False
        self.stop(job)
        job.held = larger
        return True

    def stop(self, job: Job) -> None:
        """Give the buffer back; buddies that are both free become one."""
        start, size = job.held
        self.reserved -= size
        while size < self.tokens and start ^ size in self.free.get(size, ()):
            self.free[size].remove(start ^ size)
            start, size = start & ~size, 2 * size
        self.free.setdefault(size, set()).add(start)

    def _take(self, size: int) -> tuple[int, int] | None:
        room = next((s for s in sorted(self.free) if s >= size and self.free[s]), None)
        if room is None:
            return None
        start = min(self.free[room])
        self.free[room].remove(start)
        while room > size:  # the upper half stays free
            room //= 2
            self.free.setdefault(room, set()).add(start + room)
        self.reserved += size
        return start, size


class Pages:
    """Martlet's pages."""

    def __init__(self, tokens: int) -> None:
        self.pool = PagePool(tokens // PAGE, PAGE)

    @property
    def reserved(self) -> int:
        """Tokens that the pages in use could hold."""
        return (self.pool.n_pages - self.pool.n_free) * PAGE

    def start(self, job: Job) -> bool:
        """Pages for the prompt and a token."""
        need = self.pool.pages_for(job.n_prompt + 1)
        if need > self.pool.n_free:
            return False
        job.held = list(self.pool.alloc(need))
        return True

    def grow(self, job: Job) -> bool:
        """A page when the last one is full."""
        if job.n_tokens < len(job.held) * PAGE:
            return True
        if self.pool.n_free == 0:
            return False
        job.held += self.pool.alloc(1)
        return True

    def stop(self, job: Job) -> None:
        """Free the pages."""
        self.pool.free(job.held)


def requests(count: int, context: int, seed: int) -> list[Job]:
    """The same mix for everybody."""
    numbers = random.Random(seed)
    jobs = []
    for _ in range(count):
        n_prompt = max(4, min(context - 64, int(numbers.lognormvariate(5.1, 1.1))))
        n_answer = max(4, min(1024, context - n_prompt, int(numbers.lognormvariate(5.37, 0.8))))
        most = next((limit for limit in LIMITS if limit >= n_answer), n_answer)
        jobs.append(Job(n_prompt, n_answer, min(context, n_prompt + most)))
    return jobs


def simulate(memory: Memory, jobs: list[Job], tokens: int) -> dict[str, float]:
    """Run all jobs; averages over the steps in which one waits, as shares of the memory."""
    waiting, running = deque(jobs), list[Job]()
    held = reserved = n_running = 0.0
    measured = steps = preempted = 0
    while waiting or running:
        while waiting and memory.start(waiting[0]):
            job = waiting.popleft()
            job.n_tokens = max(job.n_tokens, job.n_prompt)
            running.append(job)
        steps += 1
        for job in list(running):
            if job not in running:
                continue
            # the newest gives way and starts over later
            while job in running and not memory.grow(job):
                newest = running.pop()
                memory.stop(newest)
                newest.n_prompt, newest.n_answer = newest.n_tokens, newest.n_total - newest.n_tokens
                waiting.appendleft(newest)
                preempted += 1
            if job in running:
                job.n_tokens += 1
        if waiting:
            measured += 1
            held += sum(job.n_tokens for job in running) / tokens
            reserved += memory.reserved / tokens
            n_running += len(running)
        for job in [job for job in running if job.n_tokens >= job.n_total]:
            running.remove(job)
            memory.stop(job)
    return {
        "tokens": held / measured,
        "reserved_empty": (reserved - held) / measured,
        "free_unusable": 1 - reserved / measured,
        "running": n_running / measured,
        "steps": steps,
        "preempted": preempted,
    }


def main() -> int:
    """Simulate the four ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 16, help="KV memory, in tokens: a power of two")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tokens < args.context or args.tokens & (args.tokens - 1):
        parser.error("--tokens: a power of two, and at least the context")
    ways: dict[str, Memory] = {
        "whole context": Contiguous(args.tokens, args.context),
        "up to its limit": Contiguous(args.tokens),
        "doubling": Buddies(args.tokens),
        "pages": Pages(args.tokens),
    }
    found = {
        name: simulate(memory, requests(args.requests, args.context, args.seed), args.tokens)
        for name, memory in ways.items()
    }
    if args.json:
        print(json.dumps({**vars(args), "found": found}, indent=1))
        return 0
    print(
        f"{args.tokens:,} tokens of KV memory, context {args.context:,}, {args.requests} requests, seed {args.seed}\n"
    )
    print("| memory handed out as | holds tokens | reserved, empty | free, of no use | lost | running | steps |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        shares = " | ".join(f"{row[key]:.1%}" for key in ("tokens", "reserved_empty", "free_unusable"))
        print(f"| {name} | {shares} | {1 - row['tokens']:.1%} | {row['running']:.1f} | {row['steps']:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
