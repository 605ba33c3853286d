"""Runs a workload on an engine and keeps the measurements (read `report.py` next).

A request's clock starts when the request is due, even if the driver is busy with a step then: a
slow engine cannot hide its queue by late arrivals.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from martlet.bench.workloads import Arrival
from martlet.engine.engine import Engine
from martlet.errors import MartletError
from martlet.metrics import RequestMetrics
from martlet.sampling_params import SamplingParams
from martlet.types import Request


@dataclass(frozen=True, slots=True)
class Done:
    """A finished request."""

    arrival: Arrival
    metrics: RequestMetrics
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished workload. `start_s` is a time of the engine's clock."""

    done: tuple[Done, ...]  # in order of arrival
    start_s: float
    seconds: float
    n_steps: int


def drive(engine: Engine, arrivals: Sequence[Arrival], concurrency: int) -> Run:
    """Run all requests to their end: greedy, with answers of exactly the requested length.

    Raises MartletError if a request fails or ends early, since that would improve the figures.
    """
    start, steps = engine.clock(), engine.totals.n_steps
    waiting = deque(arrivals)
    metrics: dict[str, RequestMetrics] = {}
    answers: dict[str, list[int]] = {}
    running = 0
    while waiting or engine.has_work:
        now = engine.clock() - start
        while waiting and (running < concurrency if waiting[0].at_s is None else waiting[0].at_s <= now):
            arrival = waiting.popleft()
            due = start + (now if arrival.at_s is None else arrival.at_s)
            metrics[arrival.name] = engine.add(_request(arrival, due))
            answers[arrival.name] = []
            running += 1
        if not engine.has_work:
            assert waiting[0].at_s is not None
            time.sleep(max(0.0, waiting[0].at_s - now))
            continue
        for event in engine.step():
            if event.token_id is not None:
                answers[event.request_id].append(event.token_id)
            if event.finish is not None:
                running -= 1
                if event.error is not None:
                    raise MartletError(f"Request {event.request_id} of the workload failed: {event.error}")
    done = tuple(Done(arrival, metrics[arrival.name], tuple(answers[arrival.name])) for arrival in arrivals)
    for entry in done:
        if len(entry.token_ids) != entry.arrival.max_tokens:
            raise MartletError(
                f"Request {entry.arrival.name} gave {len(entry.token_ids)} tokens; expected {entry.arrival.max_tokens}."
            )
    return Run(done, start, engine.clock() - start, engine.totals.n_steps - steps)


def _request(arrival: Arrival, due: float) -> Request:
    params = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
    return Request(arrival.name, arrival.ids, params, arrival_s=due)
