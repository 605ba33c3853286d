"""What a step costs beside the model: plan, flatten, sample and commit, with a backend that
computes nothing.

    python bench/overhead.py MODEL [--sequences 64] [--steps 500]

All sequences decode and none arrives. The null backend's logits are not looked at either: what work
on a whole vocabulary costs is `bench/sampler.py`'s subject. Prints the median step in microseconds,
and its parts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from martlet.config import resolve_config
from martlet.engine.build import build
from martlet.sampling_params import SamplingParams
from martlet.types import Request


class NullSampler:
    """Chooses the same token always."""

    constraint, needs_mask = None, False

    def start(self, *args: Any) -> NullSampler:
        """A sequence's sampler."""
        return self

    def sample(self, logits: Any, mask: Any = None) -> tuple[int, None]:
        """The next token."""
        return 5, None


def main() -> None:
    """Measure and print."""
    args = _arguments()
    room = args.prompt + args.steps + 50
    options = {"backend": "null", "max_seqs": args.sequences, "max_context": room, "draft": args.draft}
    built = build(resolve_config({"model": str(args.model), **options, "kv_memory": args.kv_memory << 20}))
    engine = built.engine
    executor: Any = engine.executor
    executor._sampling._sampler = NullSampler()
    for i in range(args.sequences):
        ids = tuple(range(100 + i, 100 + i + args.prompt))
        engine.add(Request(str(i), ids, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)))
    while len(engine.step()) < args.sequences:
        pass
    steps: list[float] = []
    parts: dict[str, list[float]] = {"plan": [], "run": [], "fill": [], "commit": []}
    for target, name, part in (
        (engine.scheduler, "plan", "plan"),
        (engine.executor, "run", "run"),
        (executor._rank._buffers, "fill", "fill"),
        (engine.scheduler, "commit", "commit"),
    ):
        _time_calls(target, name, parts[part])
    for _ in range(args.steps):
        start = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - start) * 1e6)
    print(f"{args.sequences} sequences decode: {statistics.median(steps):.0f} µs a step (least {min(steps):.0f})")
    for part, found in parts.items():
        print(f"  {part:8} {statistics.median(found):6.0f} µs{' (within run)' if part == 'fill' else ''}")
    built.close()


def _time_calls(target: Any, name: str, found: list[float]) -> None:
    function = getattr(target, name)

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        found.append((time.perf_counter() - start) * 1e6)
        return result

    setattr(target, name, timed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kv-memory", type=int, default=2048, help="MiB that the pages would take")
    parser.add_argument("--draft", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
