"""A thousand requests under a random mixed load: each distinct request has exactly one answer (row
26 of what users ask for).

Engines come and go on one disk, each with a policy, a chunk size and a few pages of its own;
requests arrive at random, and beside them others that are given up at random. Nothing of this may
show in an answer.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kinds import write_kind
from matrix import open_row
from seen import Seen
from tiny_head import fit_head

from martlet import SamplingParams
from martlet.sched.policy import POLICIES
from martlet.types import Request, Scheduling

N_DISTINCT, N_REQUESTS, N_ENGINES = 48, 1_000, 12
CONTEXT, PAGES = 160, 8
ABORTED = "aborted"


def distinct_requests(rng: random.Random) -> list[Request]:
    """Prompts of a few stems, of any length, with all kinds of parameters."""
    stems = [[rng.randrange(3, 250) for _ in range(120)] for _ in range(5)]
    made = []
    for number in range(N_DISTINCT):
        ids = rng.choice(stems)[: rng.choice([1, 20, 33, 60, 90, 119])] + [
            rng.randrange(3, 250) for _ in range(rng.randrange(1, 8))
        ]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=number,
            max_tokens=rng.choice([1, 4, 12, 12, 70]),
            n=rng.choice([1, 1, 1, 3]),
            logprobs=2,
            prompt_logprobs=rng.choice([None, None, None, 1]),
            ignore_eos=True,
        )
        wishes = Scheduling(
            priority=rng.randrange(4),
            tenant=rng.choice("abc"),
            cache_salt=rng.choice(["", "", "other"]),
            ttft_target_s=rng.choice([None, 1.0, 50.0]),
            itl_target_s=rng.choice([None, None, 1.0]),
        )
        made.append(Request(str(number), tuple(ids), params, scheduling=wishes))
    return made


def options_of(number: int, rng: random.Random) -> dict[str, Any]:
    """Of the engine with this number: each policy in turn, the rest at random."""
    policy = list(POLICIES)[number % len(POLICIES)]
    chunk = rng.choice([8, 33, 256])
    stall = rng.choice([{}, {"stall_ms": 1.0}])
    return {"policy": policy, "max_step_tokens": chunk, "max_seqs": rng.choice([3, 8]), "prefix_cache": True, **stall}


def serial_of(request: Request, serial: int, guessed: bool) -> Request:
    """The request under a name of its own; with guesses, if there is a drafter."""
    params = replace(request.params, draft_tokens=1 + serial % 5) if guessed else request.params
    return replace(request, request_id=f"{request.request_id}:{serial}", params=params)


class Pressure:
    """Adds requests to an engine at random, beside others that it gives up."""

    def __init__(self, seen: Seen, engine: Any, rng: random.Random) -> None:
        self.seen, self.engine, self.rng = seen, engine, rng
        self.doomed: list[str] = []
        self.n_in_prefill = 0  # given up before their first token

    def run(self, asked: list[Request]) -> None:
        while asked or self.engine.has_work:
            if asked and self.rng.random() < 0.3:
                for _ in range(min(len(asked), self.rng.randrange(1, 6))):
                    self.engine.add(asked.pop())
            if asked and self.rng.random() < 0.1:
                request = self.rng.choice(asked)
                self.doomed.append(f"{ABORTED}:{len(self.seen.answers.ends)}:{self.rng.random()}")
                ids = (
                    request.prompt_ids if self.rng.random() < 0.5 else [self.rng.randrange(3, 250) for _ in range(100)]
                )
                self.engine.add(replace(request, request_id=self.doomed[-1], prompt_ids=tuple(ids)))
            prefilling = [name for name in self.doomed if self.is_prefilling(name)]
            if prefilling or (self.doomed and self.rng.random() < 0.02):
                name = self.rng.choice(prefilling or self.doomed)
                self.doomed.remove(name)
                self.n_in_prefill += bool(self.engine.abort(name)) and bool(prefilling)
            if self.engine.has_work:
                self.engine.step()
            if self.rng.random() < 0.2:
                self.engine.scheduler.check()

    def is_prefilling(self, name: str) -> bool:
        """Whether a part of its prompt has been computed, and no token."""
        return name in self.seen.started and (name, 0) not in self.seen.answers.tokens


COMBINATIONS = [
    ("quantised", "f16"),
    *(
        pytest.param(*more, marks=pytest.mark.exhaustive)
        for more in [("window", "q8"), ("softcap", "q4"), ("qk norm", "f32")]
    ),
]


@pytest.mark.parametrize(("kind", "kv_dtype"), COMBINATIONS)
def test_each_distinct_request_has_one_answer(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    """Also faults KVC-09 and SCH-03: what is asked at the same time, or preempted, is answered as
    if alone.
    """
    rng = random.Random(26)
    path = write_kind(kind, tmp_path)
    distinct = distinct_requests(rng)
    plain: dict[str, Any] = {}
    with open_row(path, CONTEXT, kv_dtype, PAGES) as llm:
        alone = Seen(llm)
        for request in distinct:
            llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()
        plain = {request.request_id: alone.answers.of(request.request_id) for request in distinct}
    assert alone.most_spans == 1
    folder = tmp_path.with_name(f"{tmp_path.name}-head")
    head = fit_head(lambda draft: open_row(path, CONTEXT, kv_dtype, 64, draft=draft), path, distinct, folder)
    answers: dict[str, list[Any]] = defaultdict(list)
    happened: Counter[str] = Counter()
    for number in range(N_ENGINES):
        first, stop = (N_REQUESTS * n // N_ENGINES for n in (number, number + 1))
        asked = [(rng.choice(distinct), serial) for serial in range(first, stop)]
        options = options_of(number, rng) | {"kv_disk": str(tmp_path), "kv_disk_size": 1 << 20}
        options["draft"] = ("ngram", f"model={path}", "off", f"eagle={head}")[number % 4]
        with open_row(path, CONTEXT, kv_dtype, PAGES, **options) as llm:
            seen = Seen(llm)
            pressure = Pressure(seen, llm.engine, rng)
            pressure.run([serial_of(request, n, options["draft"] != "off") for request, n in asked])
        for request, serial in asked:
            answers[request.request_id].append(seen.answers.of(f"{request.request_id}:{serial}"))
        happened.update(
            preempted=seen.n_preempted,
            again=seen.n_again,
            swapped=seen.n_swapped,
            loaded=seen.n_loads,
            evicted=seen.n_evicted,
            copied=seen.n_copies,
            shared=seen.n_shared,
            mixed=seen.n_mixed,
            guessed=seen.n_accepted,
            guessed_wrong=seen.n_refused,
            hits=sum(n > 0 for n, _, _ in seen.uses()),
            chunks=sum(count > 1 for count in seen.chunks.values()),
            aborted=sum(end.startswith("abort") for end in seen.answers.ends.values()),
            aborted_in_prefill=pressure.n_in_prefill,
        )
    assert sum(len(found) for found in answers.values()) == N_REQUESTS
    wrong = [name for name, found in answers.items() if any(one != plain[name] for one in found)]
    assert wrong == []
    assert len(answers) == N_DISTINCT
    if seen.share > 1:
        del happened["copied"]  # pages are shared whole, or not at all
    assert [what for what, count in happened.items() if count < 5] == [], happened
