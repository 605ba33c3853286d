"""Decode speed of many sequences at a time, or of one after a long prompt: Martlet against
llama.cpp on the same file.

    python bench/batched.py MODEL... --llama-cpp BUILD/bin [--sequences 1 4 16 64] [--prompt 128]
                            [--steps 64] [--out batched]

Every prompt is computed first; then only steps are timed in which all sequences decode. Runs of the
two alternate (ours, theirs, ours, theirs …), so that whatever slows the machine slows both; medians
count, and the report keeps every run. llama.cpp's figure is `llama-batched-bench`'s S_TG, which
does not sample; ours takes the best token of every row. With `--prompt 8064 --sequences 1` it is
the speed at the end of a long context. `--profile` shows where our steps' time goes instead: the
compiled program, and everything around it. Without `--llama-cpp` only our speed is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from martlet.config import resolve_config
from martlet.engine.build import Built, build, measure_for
from martlet.engine.engine import Engine
from martlet.formats.checkpoint import open_checkpoint
from martlet.kv_types import parse_kv_types
from martlet.runtime.kv import kv_bytes_per_token
from martlet.sampling_params import SamplingParams
from martlet.types import Request


def main() -> None:
    """Measure and write the report."""
    args = _arguments()
    report: dict[str, Any] = {"threads": args.threads, "prompt": args.prompt, "steps": args.steps, "models": {}}
    for path in args.models:
        with_engine = start_engine(path, args)
        try:
            found: dict[int, dict[str, Any]] = {}
            for _ in range(args.rounds):
                for n in args.sequences:
                    run = found.setdefault(n, {"ours": [], "llama.cpp": []})
                    run["ours"].append(our_rate(with_engine.engine, n, args))
                    if args.llama_cpp is not None:
                        run["llama.cpp"].append(their_rate(path, n, args))
            report["models"][path.stem] = {n: _summary(run) for n, run in found.items()}
        finally:
            with_engine.close()
    text = _table(report)
    print(text)
    if args.out is not None:
        Path(f"{args.out}.json").write_text(json.dumps(report, indent=1))
        Path(f"{args.out}.md").write_text(text + "\n", encoding="utf-8")


def start_engine(path: Path, args: argparse.Namespace) -> Built:
    """An engine with room for the largest run."""
    most = max(args.sequences)
    # the first prompts go on while the last are computed
    each = args.prompt + args.steps + 40 + most
    options: dict[str, Any] = {"model": str(path), "threads": args.threads, "max_seqs": most, "kv_dtype": args.kv_dtype}
    options["stall_ms"] = 1e6  # prompts first
    options["draft"] = "off"  # a token a sequence and step
    with open_checkpoint(path) as checkpoint:
        spec = measure_for(checkpoint, resolve_config(options)).spec
    context = each = min(spec.context, each)
    pages = most * -(-each // 32) + 1
    kv_memory = pages * 32 * kv_bytes_per_token(spec, parse_kv_types(args.kv_dtype))
    return build(resolve_config({**options, "max_context": context, "kv_memory": kv_memory}))


def our_rate(engine: Engine, n: int, args: argparse.Namespace) -> float:
    """Tokens a second of steps in which n sequences decode."""
    rng = np.random.default_rng(1)
    for i in range(n):
        ids = tuple(rng.integers(1000, 40_000, args.prompt).tolist())
        engine.add(
            Request(
                f"{time.monotonic_ns()}-{i}", ids, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
            )
        )
    begun: set[str] = set()
    while len(begun) < n:
        begun |= {event.request_id for event in engine.step() if event.token_id is not None}
    calls = _watch_program(engine) if args.profile else []
    start = time.perf_counter()
    for _ in range(args.steps):
        count = len(engine.step())
        assert count == n, f"{count} of {n} sequences decoded"
    elapsed = time.perf_counter() - start
    if args.profile:
        inside = sum(calls)
        print(
            f"{n} sequences: a step takes {elapsed / args.steps * 1e3:.3f} ms, of it the program"
            f" {inside / args.steps * 1e3:.3f} ms",
            file=sys.stderr,
        )
    for request_id in begun:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return n * args.steps / elapsed


def _watch_program(engine: Any) -> list[float]:
    """Time every run of the compiled program from now on."""
    program, calls = engine.executor._rank._programs.whole, []
    run = type(program).run

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(program, *args)
        finally:
            calls.append(time.perf_counter() - start)

    program.run = timed
    return calls


def their_rate(path: Path, n: int, args: argparse.Namespace) -> float:
    """What llama-batched-bench says: S_TG."""
    context = n * (args.prompt + args.steps)
    options = [
        "-c",
        context,
        "-npp",
        args.prompt,
        "-ntg",
        args.steps,
        "-npl",
        n,
        "-t",
        args.threads,
        "-tb",
        args.threads,
    ]
    command = [str(args.llama_cpp / "llama-batched-bench"), "-m", str(path), *map(str, options)]
    done = subprocess.run([*command, "--output-format", "jsonl"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return float(json.loads(lines[-1])["speed_tg"])


def _summary(run: dict[str, list[float]]) -> dict[str, Any]:
    ours = statistics.median(run["ours"])
    if not run["llama.cpp"]:
        return {"ours": ours, "our runs": run["ours"]}
    theirs = statistics.median(run["llama.cpp"])
    return {
        "ours": ours,
        "llama.cpp": theirs,
        "ratio": ours / theirs,
        "our runs": run["ours"],
        "llama.cpp's runs": run["llama.cpp"],
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"Decode after prompts of {report['prompt']} tokens, {report['threads']} threads, tokens/s of all sequences together.",
        "",
        "| model | sequences | ours | llama.cpp | ours ÷ llama.cpp | ours ÷ ours at one |",
        "|---|---|---|---|---|---|",
    ]
    for model, found in report["models"].items():
        for n, run in found.items():
            theirs, ratio = (f"{run[key]:.2f}" if key in run else "–" for key in ("llama.cpp", "ratio"))
            gain = f"{run['ours'] / found[1]['ours']:.2f}" if 1 in found else "–"
            lines.append(f"| {model} | {n} | {run['ours']:.1f} | {theirs} | {ratio} | {gain} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-batched-bench")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-dtype", default="f16")
    parser.add_argument("--profile", action="store_true", help="say how long the compiled program ran in a step")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
