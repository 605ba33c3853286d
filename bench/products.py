"""Products of each quantised type: bytes of weights a second, and multiply-adds a second.

    python bench/products.py [--isa avx2] [--types q4_k q6_k …] [--rows 1 2 3 4 8 16 256]
                             [--threads 2] [--rounds 7] [--against CHECKOUT] [--out FILE]

A program multiplies its rows, 2,048 columns each, with enough matrices of 4,096 rows that no cache
holds them; few rows are bound by memory, many by multiply-adds. Beside each type stands the rate at
which the same threads read memory, taken by turns with the products; medians of the rounds count.
`--against` alternates with another checkout's kernels, each run in a process of its own, and shows
the median of the pairs' ratios too (this one ÷ the other, larger is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from martlet.config import cache_dir
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.quant.table import BLOCKS, BlockType, RawTensor

HEIGHT, WIDTH = 4096, 2048  # of a matrix
MOST_BYTES, MOST_MULTIPLY_ADDS = 192 << 20, 8e9  # of a program
# Bytes of which any two make an ordinary float16, so that scales are neither huge nor denormal.
LEAST_BYTE, MOST_BYTE = 0x28, 0x3B
Rates = dict[str, float]  # "memory": bytes/s read; a number of rows: seconds of a product


def main() -> int:
    """Measure and print; see the module's docstring."""
    args = _arguments()
    if args.against is None:
        measured = {name: measure(name, args) for name in args.types}
        if args.json:
            print(json.dumps(measured))
            return 0
        compared = None
    else:
        measured, compared = _alternate(args)
    for line in table(measured, compared):
        print(line)
    if args.out is not None:
        args.out.write_text(json.dumps({"isa": args.isa, "measured": measured, "ratios": compared}, indent=1))
    return 0


def measure(name: str, args: argparse.Namespace) -> Rates:
    """Medians for one type: bytes/s of memory, packed bytes of a product, seconds by rows."""
    ops = CpuBackend(args.threads, cache_dir() / "kernels", args.isa)
    try:
        runs = {rows: _product(ops, BlockType[name.upper()], rows) for rows in args.rows}
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            times.setdefault("memory", []).append(ops.read_bandwidth(0.03))
            for rows, run in runs.items():
                times.setdefault(str(rows), []).append(run())
        medians = {key: statistics.median(values) for key, values in times.items()}
        nbytes = ops.weight_bytes(ops.pack([_matrix(BlockType[name.upper()])]))
        return {**medians, "bytes": nbytes}
    finally:
        ops.close()


def _product(ops: CpuBackend, block_type: BlockType, rows: int) -> Callable[[], float]:
    """A function that runs the program once and returns the seconds of one product."""
    matrix = _matrix(block_type)
    packed = ops.abilities.packed_bytes([matrix])
    n = int(max(2, min(MOST_BYTES // packed, MOST_MULTIPLY_ADDS // (rows * HEIGHT * WIDTH))))
    weights = [ops.pack([matrix]) for _ in range(n)]
    embedding = RawTensor("e", (16, WIDTH), BlockType.F32, np.ones(16 * WIDTH, np.float32).view(np.uint8))
    table = ops.pack([embedding])

    def step() -> None:
        x, out = ops.empty(Rows.TOKENS, WIDTH), ops.empty(Rows.TOKENS, HEIGHT)
        ops.embed(table, 1.0, x)
        for weight in weights:
            ops.linear(x, weight, out)

    program = ops.capture(step, StepLimits(rows, 1, 1, rows))
    zeros, none = np.zeros(rows, np.int32), np.zeros(0, np.int32)
    inputs = StepInputs(zeros, zeros, zeros, np.array([0, rows], np.int32), np.zeros((1, 1), np.int32), none)

    def run() -> float:
        start = time.perf_counter()
        program.run(inputs)
        return (time.perf_counter() - start) / n

    run()
    return run


def _matrix(block_type: BlockType) -> RawTensor:
    block, rng = BLOCKS[block_type], np.random.default_rng(0)
    data = rng.integers(LEAST_BYTE, MOST_BYTE + 1, HEIGHT * WIDTH // block.size * block.nbytes, dtype=np.uint8)
    return RawTensor("w", (HEIGHT, WIDTH), block_type, data)


def table(measured: dict[str, Rates], compared: dict[str, Rates] | None) -> list[str]:
    """Lines: a type and a number of rows each, with the ratio to the other checkout if there is."""
    lines = [
        f"{'type':8} {'rows':>5} {'µs':>8} {'GB/s':>7} {'of read':>8} {'G madd/s':>9}"
        + " ratio" * (compared is not None)
    ]
    for name, rates in measured.items():
        for rows in (key for key in rates if key.isdigit()):
            seconds = rates[rows]
            speed, madds = rates["bytes"] / seconds, int(rows) * HEIGHT * WIDTH / seconds
            ratio = "" if compared is None else f" {compared[name][rows]:.3f}"
            share = f"{speed / rates['memory']:.2f}"
            lines.append(
                f"{name:8} {rows:>5} {1e6 * seconds:8.0f} {speed / 1e9:7.1f} {share:>8} {madds / 1e9:9.1f}{ratio}"
            )
    return lines


def _alternate(args: argparse.Namespace) -> tuple[dict[str, Rates], dict[str, Rates]]:
    here, there = [], []
    for _ in range(args.pairs):
        there.append(_elsewhere(args.against, args))
        here.append(_elsewhere(Path(__file__).parent.parent, args))
    medians = {n: {k: statistics.median(r[n][k] for r in here) for k in here[0][n]} for n in here[0]}
    ratios = {
        n: {k: statistics.median(b[n][k] / a[n][k] for a, b in zip(here, there, strict=True)) for k in here[0][n]}
        for n in here[0]
    }
    return medians, ratios


def _elsewhere(checkout: Path, args: argparse.Namespace) -> dict[str, Rates]:
    """This script, run with a checkout's kernels."""
    command = [sys.executable, __file__, "--json", "--types", *args.types, "--rows", *map(str, args.rows)]
    command += ["--threads", str(args.threads), "--rounds", str(args.rounds)]
    command += [] if args.isa is None else ["--isa", args.isa]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured: dict[str, Rates] = json.loads(done.stdout)
    return measured


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="an instruction set, as MARTLET_ISA takes it")
    parser.add_argument("--types", nargs="+", default=["q4_0", "q4_1", "q4_k", "q6_k"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 4, 8, 16, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=5, help="with --against")
    parser.add_argument("--against", type=Path, help="another checkout of Martlet")
    parser.add_argument("--json", action="store_true", help="print seconds as JSON")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
