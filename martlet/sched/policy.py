"""Scheduling policies as data: which sequence is admitted first, which is preempted first.

Read `page_reserve.py` next.

A policy is a function from a sequence to its key. The waiting sequence with the lowest key is
admitted first, and none overtakes it; the running sequence with the highest key is preempted first.
Equal keys go by arrival.

Nobody starves. Except under fair share, a key is a virtual time of arrival: the real time plus a
bounded handicap. Only sequences that arrive within this handicap after a sequence can overtake it,
and these are finitely many. Ageing is the same thing from the other side: waiting for
WAIT_PER_LEVEL_S outweighs a level of priority.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from martlet.types import Sequence

WAIT_PER_LEVEL_S = 10.0  # seconds of waiting that a level of priority is worth
WAIT_PER_TOKEN_S = 0.01  # seconds of waiting that a prompt token is worth
DEFAULT_TTFT_S = 30.0  # the deadline of a request without a target
DECODE_WEIGHT = 2  # a generated token counts as so many prompt tokens of service (arXiv:2401.00588)


class SchedulerView(Protocol):
    """What a policy may ask the scheduler."""

    def n_matched(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that the prefix cache holds."""

    def service(self, tenant: str) -> float:
        """Tokens computed for a tenant so far, weighted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A name and a key. `changes`: a waiting sequence's key may change, so it is computed anew.

    Where that takes long, only the `look_ahead` oldest sequences are compared.
    """

    name: str
    meaning: str
    key: Callable[[Sequence, SchedulerView], float]
    changes: bool = False
    look_ahead: int | None = None
    serves: bool = False  # it asks for each tenant's service, so that is counted


def _fcfs(seq: Sequence, view: SchedulerView) -> float:
    return 0.0


def _priority(seq: Sequence, view: SchedulerView) -> float:
    return seq.arrival_s + WAIT_PER_LEVEL_S * seq.request.scheduling.priority


def _shortest(seq: Sequence, view: SchedulerView) -> float:
    return seq.arrival_s + WAIT_PER_TOKEN_S * seq.n_prompt


def _prefix(seq: Sequence, view: SchedulerView) -> float:
    return seq.arrival_s - WAIT_PER_TOKEN_S * view.n_matched(seq)


def _fair(seq: Sequence, view: SchedulerView) -> float:
    return view.service(seq.request.scheduling.tenant)


def _deadline(seq: Sequence, view: SchedulerView) -> float:
    target = seq.request.scheduling.ttft_target_s
    return seq.arrival_s + (DEFAULT_TTFT_S if target is None else target)


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fcfs", "first come, first served", _fcfs),
        Policy("priority", "lowest number first; waiting makes up for it", _priority),
        Policy("shortest", "shortest prompt first; waiting makes up for it", _shortest),
        Policy("prefix", "longest cached prefix first; waiting makes up for it", _prefix, changes=True, look_ahead=64),
        Policy("fair", "the tenant that has had the least first", _fair, changes=True, serves=True),
        Policy("deadline", "the earliest time-to-first-token target first", _deadline),
    )
}
