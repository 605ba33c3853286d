"""The requests of the equality matrix, and the requests around them (read `matrix.py` first)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from held_load import HELD, HELD_SLOWLY, all_held

from martlet import SamplingParams
from martlet.types import Request, Scheduling

SHUFFLED = (0, 1, 5, 3, 2, 4)


@dataclass(frozen=True, eq=False)
class Load:
    """Requests as token ids with parameters; a beam search shares the fifth's prompt."""

    context: int
    few: int  # pages: fewer than the running sequences need
    some: int  # pages: fewer than the kept prefixes need
    requests: tuple[Request, ...]
    fillers: tuple[tuple[int, ...], ...]  # prompts that evict others
    is_held: bool = False  # a grammar holds every request, and the beams

    @cached_property
    def held(self) -> Load:
        """The same requests, each held to a grammar."""
        return replace(self, requests=all_held(self.requests), is_held=True)


def asked_of(load: Load, around: Sequence[str], shuffled: bool) -> list[Request]:
    """Return the requests, with others before and after each, or after all."""
    groups, again = [], []
    for number in SHUFFLED if shuffled else range(len(load.requests)):
        request = load.requests[number]
        group = [request]
        if "like" in around:
            group.insert(0, like(request))
        repeated = replace(request, request_id=f"{request.request_id}-again")
        if "filler" in around and number > 0:
            group += [_other(request, "filler", load.fillers[number % len(load.fillers)]), repeated]
        elif "again" in around:
            again.insert(0, repeated)
        groups.append(group)
    return [request for group in [*groups, again] for request in group]


def like(request: Request) -> Request:
    """Return a request that begins as `request` does and then differs."""
    cut = max(1, len(request.prompt_ids) * 5 // 8)
    return _other(request, "like", (*request.prompt_ids[:cut], *(id_ ^ 1 for id_ in request.prompt_ids[cut : cut + 9])))


def _other(request: Request, what: str, ids: tuple[int, ...]) -> Request:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return replace(request, request_id=f"{request.request_id}-{what}", prompt_ids=ids, params=params)


def make_load(
    vocab: int, prompts: Sequence[int], n_new: int, *, context: int, few: int, some: int, seed: int = 5
) -> Load:
    """Make six requests of random ids below `vocab`; `prompts` are the prompts' lengths.

    The first has a long answer. The third shares most of the second's prompt, and a schema holds
    its answer. A pattern holds the last answer; the others are free.
    """
    rng = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab) for _ in range(count))

    made = [ids(count) for count in prompts]
    made[2] = made[1][: len(made[2]) - 20] + made[2][-20:]
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5, "logprobs": 1, "max_tokens": 4 * n_new},
        {"temperature": 0.0, "logprobs": 2, "max_tokens": 2 * n_new},
        {"temperature": 1.0, "top_p": 0.95, "seed": 7, "logprobs": 2, **HELD},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
        {
            "temperature": 0.7,
            "min_p": 0.02,
            "seed": 3,
            "repetition_penalty": 1.2,
            "logprobs": 0,
            "max_tokens": n_new // 2,
        },
        {"temperature": 1.2, "top_k": 40, "seed": 11, "n": 3, "logprobs": 1, **HELD_SLOWLY},
    ]
    requests = tuple(
        Request(
            str(number),
            prompt,
            SamplingParams(**{"max_tokens": n_new, "ignore_eos": True, **more}),
            # all at the same time, so that policies order them by their other properties
            arrival_s=1.0,
            scheduling=Scheduling(priority=place, tenant="a" if number < 4 else "b", ttft_target_s=10.0 + place),
        )
        for number, (prompt, more, place) in enumerate(zip(made, settings, (0, 1, 4, 3, 2, 5), strict=True))
    )
    return Load(context, few, some, requests, tuple(ids(max(prompts) - 10) for _ in range(2)))
