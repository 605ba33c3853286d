"""Decode steps by depth and KV type: `python bench/kv_speed.py MODEL [--depths 512 8192] [--types
f16 q8 q4]`.

No prompt is computed: a step's time depends on how many pages it reads, not on what is in them.
Types alternate, and the median of each counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from martlet.config import PAGE_SIZE, cache_dir, resolve_config
from martlet.formats.checkpoint import open_checkpoint
from martlet.kv_types import parse_kv_types
from martlet.models.decoder import forward
from martlet.models.weights import load_model
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import StepInputs, StepLimits
from martlet.runtime.kv import allocate_caches, kv_bytes_per_token


def main() -> None:
    """Print a line a depth and type."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--types", nargs="+", default=["f16", "q8", "q4"])
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-r", "--rounds", type=int, default=30)
    args = parser.parse_args()
    config = resolve_config({"model": args.model, "threads": args.threads})
    ops, context = CpuBackend(config.threads, cache_dir() / "kernels"), max(args.depths) + PAGE_SIZE
    limits = StepLimits(8, 1, 1, -(-context // PAGE_SIZE))
    with open_checkpoint(args.model) as checkpoint:
        model = load_model(checkpoint, ops, context=context)
        programs = {}
        for name in args.types:
            kv = allocate_caches(ops, model.spec, limits.max_pages_per_seq, PAGE_SIZE, name, limits)
            # memory that nothing was written to is one page of zeros, which a cache holds
            for cache in kv.caches:
                nothing = np.zeros(ops.page_bytes(cache), np.uint8)
                for page in range(limits.max_pages_per_seq):
                    ops.write_page(cache, page, nothing)
            programs[name] = ops.capture(lambda kv=kv: forward(ops, model, kv.caches), limits)
    table = np.random.default_rng(0).permutation(limits.max_pages_per_seq).astype(np.int32)[None]
    zero = np.zeros(1, np.int32)
    for depth in args.depths:
        place = table[0, depth // PAGE_SIZE : depth // PAGE_SIZE + 1] * PAGE_SIZE + depth % PAGE_SIZE
        inputs = StepInputs(
            zero, zero + depth, place, np.array([0, 1], np.int32), table, zero, zero, np.zeros_like(table)
        )
        times: dict[str, list[float]] = {name: [] for name in args.types}
        for _ in range(args.rounds):
            for name, program in programs.items():
                start = time.perf_counter()
                program.run(inputs)
                times[name].append(time.perf_counter() - start)
        for name, runs in times.items():
            took = statistics.median(runs)
            nbytes = depth * kv_bytes_per_token(model.spec, parse_kv_types(name))
            print(f"{depth:>7,} {name:>5} {took * 1e3:8.2f} ms {1 / took:8.1f} tok/s   KV {nbytes / 1e6:,.0f} MB")
    ops.close()


if __name__ == "__main__":
    main()
