"""Microseconds that sampling a token takes, by setting and vocabulary; the least and the median of
many calls.

    python bench/sampler.py [--vocab 49152 152064 262144] [--context 2000] [--calls 50]

Logits are drawn like a model's: a bell of width 3 with a few dozen tokens far above it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from martlet.sample.sampler import Sampler
from martlet.sampling_params import SamplingParams

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0, "repetition_penalty": 1.1},
    {},
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"typical_p": 0.9},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.5},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
    {"mirostat": 2},
    {"logprobs": 5},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
)


def measure(vocab: int, context: int, calls: int, settings: dict[str, Any]) -> list[float]:
    tokenizer: Any = SimpleNamespace(
        vocab_size=vocab, eog_ids=frozenset({0}), unused_ids=frozenset(range(vocab - 9, vocab))
    )
    rng = np.random.default_rng(0)
    row = rng.normal(0, 3, vocab).astype(np.float32)
    row[:: vocab // 40] += 14
    params = SamplingParams(seed=1, max_tokens=None, **settings)
    seq = Sampler(tokenizer).start(params, rng.integers(0, vocab, context).tolist())
    times = []
    for _ in range(calls + 3):
        start = time.perf_counter()
        seq.sample(row)
        times.append((time.perf_counter() - start) * 1e6)
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 152_064, 262_144])
    parser.add_argument("--context", type=int, default=2000, help="tokens before the sampled ones")
    parser.add_argument("--calls", type=int, default=50)
    given = parser.parse_args()
    print(
        f"{'least / median, microseconds':<60}" + "".join(f"{'V = ' + format(vocab, ','):>16}" for vocab in given.vocab)
    )
    for settings in SETTINGS:
        name = ", ".join(f"{key}={value}" for key, value in settings.items()) or "defaults"
        cells = []
        for vocab in given.vocab:
            times = measure(vocab, given.context, given.calls, settings)
            cells.append(f"{min(times):.0f} / {statistics.median(times):.0f}")
        print(f"{name[:58]:<60}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
