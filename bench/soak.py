"""Random work for the scheduler for as long as one likes: arrivals, forks, aborts, shortages,
failures.

    python bench/soak.py --seconds 3600 --seed 1

After every step all invariants are checked (`tests/sched/soak.py` says which). A fault ends the run
with the seed and the kind that shows it again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from martlet.sched.policy import POLICIES
from tests.sched.soak import Soak, SoakOptions


def options_of(seed: int) -> SoakOptions:
    """A random kind of run."""
    rnd = random.Random(seed)
    cache = rnd.random() < 0.85
    page_size = rnd.choice([1, 2, 4, 8])
    return SoakOptions(
        policy=rnd.choice(list(POLICIES)),
        n_pages=rnd.randint(40 // page_size, 160 // page_size),
        page_size=page_size,
        step_tokens=rnd.randint(8, 40),
        max_seqs=rnd.randint(1, 8),
        cache=cache,
        n_slots=rnd.choice([0, 0, 5, 20, 60]) if cache else 0,
        share_pages=rnd.choice([0, 0, 0, 1, 2]),
        failures=rnd.random() < 0.7,
    )


def main() -> None:
    """Run until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next")
    parser.add_argument("--operations", type=int, default=500, help="of a run")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    end = time.monotonic() + args.seconds
    for seed in itertools.count(args.seed):
        if time.monotonic() > end:
            break
        options = options_of(seed)
        soak = Soak(seed, options)
        try:
            soak.run(args.operations)
        except BaseException:
            print(f"seed {seed}, {options}", file=sys.stderr)
            raise
        total.update(
            runs=1,
            steps=soak.n_steps,
            sequences=len(soak.accepted),
            shared=soak.n_shared,
            copies=soak.n_copies,
            loads=soak.n_loads,
            preempted=soak.scheduler.n_preempted,
        )
    print(", ".join(f"{name} {count:,}" for name, count in total.items()))


if __name__ == "__main__":
    main()
