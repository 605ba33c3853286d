"""Random arrivals, forks, aborts, stops, shortages and failures: the invariants hold after every
step.

`bench/soak.py` runs the same for hours.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from martlet.sched.policy import POLICIES
from tests.sched.soak import Soak, SoakOptions

KINDS = {
    "no cache": SoakOptions(cache=False),
    "cache": SoakOptions(),
    "tier": SoakOptions(n_slots=10),
    "groups": SoakOptions(share_pages=2, n_slots=6),
    "roomy": SoakOptions(n_pages=40, max_seqs=8, step_tokens=32),
    "layers": SoakOptions(n_pages=20, step_tokens=24, layered_rows=5, n_layers=7, stall_s=0.002),
    "guesses": SoakOptions(n_pages=30, max_seqs=5, step_tokens=7, layered_rows=5, n_layers=7, stall_s=0.002, guesses=8),
    "tight": SoakOptions(n_pages=10, max_seqs=5, n_slots=20),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_any_order(kind: str, policy: str) -> None:
    """Pages, budgets, one end each, right tokens, bounded preemption; in each page the prefix that
    it should hold.
    """
    options = KINDS[kind]
    seed = 100 * list(KINDS).index(kind) + list(POLICIES).index(policy)
    soak = Soak(seed, replace(options, policy=policy))
    soak.run(700)
    assert soak.n_requests > 100
    assert soak.n_shared > (200 if options.cache else 0)
    assert (soak.n_loads > 0) == (options.n_slots > 0)
    assert (soak.n_guessed > 100) == (options.guesses > 0)
    assert (soak.n_layered > 50) == (options.layered_rows > 0)


def test_many_requests_in_few_pages() -> None:
    """10,000 requests with aborts and a pool of 40 pages: no page leaks, each sequence ends exactly
    once.
    """
    soak = Soak(5, SoakOptions(n_pages=40, max_seqs=8, step_tokens=24, check_every=50))
    while len(soak.accepted) < 10_000:
        soak.operate()
    soak.run(0)
    assert min(soak.reasons.values()) > 50
    assert len(soak.reasons) == 4
