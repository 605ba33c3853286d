"""Two checkouts of Martlet against each other: did a change make anything slower?

    python bench/compare_versions.py BEFORE AFTER [--models FOLDER] [--pairs 9] [--rows ROW …]
                                     [--isa avx2] [--out versions.json]

BEFORE and AFTER are folders that hold `martlet/` and `bench/`. Runs alternate (before, after,
before, after …), each in a process of its own. A row's figure is the median of the pairs' ratios,
after ÷ before as speed, so 1.02 is 2 % faster; beside it stands the median's 95 % interval by
bootstrap. `--isa` forces an instruction set by MARTLET_ISA: both checkouts must know the variable.
Rows: decode and prefill of each model of the comparison with llama.cpp, and a step's overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MODELS = {
    "smollm2-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "smollm2-q4_0": "SmolLM2-135M-Instruct.Q4_0.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
    "qwen-1.5b": "qwen2.5-coder-1.5b.gguf",
}
DECODE, PREFILL = ("-p", "0", "-n", "64", "-d", "128"), ("-p", "512", "-n", "0")
RESAMPLES = 2000  # of the bootstrap

Measure = Callable[[Path], float]  # a checkout's figure, larger is faster


def main() -> int:
    """Measure all rows and print a table; the JSON keeps every run."""
    args = _arguments()
    rows = _rows(args.models.expanduser(), args.threads, args.isa)
    report = {}
    print(f"{'row':24} {'before':>9} {'after':>9} {'after ÷ before':>15}  95 % interval")
    for name, measure in rows.items():
        if args.rows and not any(name.startswith(row) for row in args.rows):
            continue
        for checkout in (args.before, args.after):
            measure(checkout)  # caches warm, kernels compiled
        pairs = [(measure(args.before), measure(args.after)) for _ in range(args.pairs)]
        ratios = [after / before for before, after in pairs]
        low, high = interval(ratios)
        before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ratios)
        print(f"{name:24} {before:9.2f} {after:9.2f} {ratio:15.3f}  {low:.3f} to {high:.3f}", flush=True)
        report[name] = {"pairs": pairs, "ratio": ratio, "interval": (low, high)}
        args.out.write_text(json.dumps({"isa": args.isa, "rows": report}, indent=1), encoding="utf-8")
    return 0


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median of `ratios`, by bootstrap with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def _rows(models: Path, threads: int, isa: str | None) -> dict[str, Measure]:
    rows: dict[str, Measure] = {}
    for name, file in MODELS.items():
        path = models / file
        if not path.exists():
            print(f"{path} is not there: left out", file=sys.stderr)
            continue
        for key, arguments in (("decode", DECODE), ("prefill", PREFILL)):
            command = ("-m", "martlet", "bench", str(path), *arguments, "-r", "3", "-t", str(threads), "--json")
            rows[f"{name} {key}"] = lambda checkout, command=command, key=key: float(
                json.loads(_run(checkout, command, isa))[key]["tokens_per_s"]
            )
        if "overhead" not in rows:
            command = ("bench/overhead.py", str(path))
            rows["overhead"] = lambda checkout, command=command: 1e6 / _microseconds(_run(checkout, command, isa))
    return rows


def _microseconds(output: str) -> float:
    """The first figure in µs that `bench/overhead.py` prints: the whole step's."""
    match = re.search(r"([\d.]+) µs", output)
    assert match is not None, output
    return float(match[1])


def _run(checkout: Path, arguments: tuple[str, ...], isa: str | None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    if isa is not None:
        environment["MARTLET_ISA"] = isa
    done = subprocess.run([sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--models", type=Path, default=Path("~/.cache/martlet/models"))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", nargs="*", help="rows whose names begin like this; default: all")
    parser.add_argument("--isa", help="an instruction set, as MARTLET_ISA takes it")
    parser.add_argument("--out", type=Path, default=Path("versions.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
