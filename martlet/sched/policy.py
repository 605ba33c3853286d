"""Scheduling policies as data: who is admitted first, and who gives its pages back (read `queue.py` next).

A policy is one function from a sequence to its key. The waiting sequence of the lowest key is admitted first, and none
overtakes it; the running one of the highest key is the first to be preempted. Equal keys go by arrival.

Nobody starves. But for the fair share's, a key is a virtual time of arrival: the real one plus a bounded handicap. A sequence can
be overtaken by those only that arrive within this handicap after it, of which there are finitely many. Ageing is the
same thing seen from the other side: waiting for WAIT_PER_LEVEL_S outweighs one level of priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from martlet.types import Sequence

__all__ = ["POLICIES", "Facts", "Policy", "policy_named"]

WAIT_PER_LEVEL_S = 10.0  # seconds of waiting that one level of priority is worth
WAIT_PER_TOKEN_S = 0.01  # the same for one prompt token, to be computed or cached
DEFAULT_TTFT_S = 30.0  # the deadline of a request that names none
DECODE_WEIGHT = 2  # a generated token counts as so many prompt tokens of service (arXiv:2401.00588)


class Facts(Protocol):
    """What a policy may ask of the scheduler."""

    def n_matched(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that the prefix cache holds."""

    def service(self, tenant: str) -> float:
        """Tokens computed for a tenant so far, weighted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A name and a key. `changes`: whether the key of a waiting sequence may change, so that it is computed anew.

    Where that takes long, only so many of the oldest are compared (`look_ahead`).
    """

    name: str
    meaning: str
    key: Callable[[Sequence, Facts], float]
    changes: bool = False
    look_ahead: int | None = None
    serves: bool = False  # it asks how much each tenant has had, so that this is counted


def _fcfs(seq: Sequence, facts: Facts) -> float:
    return 0.0


def _priority(seq: Sequence, facts: Facts) -> float:
    return seq.arrival_s + WAIT_PER_LEVEL_S * seq.request.scheduling.priority


def _shortest(seq: Sequence, facts: Facts) -> float:
    return seq.arrival_s + WAIT_PER_TOKEN_S * seq.n_prompt


def _prefix(seq: Sequence, facts: Facts) -> float:
    return seq.arrival_s - WAIT_PER_TOKEN_S * facts.n_matched(seq)


def _fair(seq: Sequence, facts: Facts) -> float:
    return facts.service(seq.request.scheduling.tenant)


def _deadline(seq: Sequence, facts: Facts) -> float:
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


def policy_named(name: str) -> Policy:
    """The policy of this name, which has been checked."""
    return POLICIES[name]
