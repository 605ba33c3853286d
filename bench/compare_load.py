"""Martlet's server against llama.cpp's under load, asked by one generator, `martlet bench serve`:
the bars of serving.

    python bench/compare_load.py --llama-server BUILD/bin/llama-server --models FOLDER

    load      16 clients, prompts of 128 tokens, answers of 64: output tokens/s, Martlet on Q4_1 ÷
              llama-server on Q4_1 (bar: ≥ 3.5) and ÷ llama-server on Q4_0, its best (≥ 2.0); TTFT
              p95, llama-server's ÷ Martlet's (≥ 3); and the share of the time that Martlet's engine
              was not in a step (≤ 8 %)
    single    one stream: tokens/s through HTTP ÷ those of `martlet bench`, neither with guesses (≥
              0.93); both are there at once and have turns of a second, for a shared machine is now
              quicker and now slower by more than what is measured
    ready     from the start of the process to the first 200 of /health (≤ 1.5 s)

Prompts are the same random token ids for both, answers greedy and of full length. llama-server has
a slot for each client, its continuous batching and its prompt cache as they are by default. Runs
alternate and medians count; each is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare_serving import VOCAB, _free_port, _martlet, _server

from martlet.bench.http_stream import Target
from martlet.bench.load_generator import Load, measure_server
from martlet.bench.load_report import load_summary
from martlet.bench.report import about

CLIENTS, PROMPT, ANSWER, REQUESTS = 16, 128, 64, 48
SINGLE_PROMPT, SINGLE_ANSWER, SINGLE_TURNS = 128, 256, 5
Q4_1, Q4_0 = "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_0.gguf"
BARS = {"Q4_1": 3.5, "Q4_0": 2.0, "TTFT": 3.0, "outside": 0.08, "single": 0.93, "ready": 1.5}
POLL_S = 0.005
# What `martlet bench` does for one run of its decode, each time that a line comes.
BENCH_BY_TURNS = """
import sys
from martlet import LLM
from martlet.commands.bench import _decode
depth, count = int(sys.argv[3]), int(sys.argv[4])
with LLM(sys.argv[1], threads=int(sys.argv[2]), draft="off", max_context=depth + count + 1) as llm:
    _decode(llm, depth, count, 0)
    for turn, _ in enumerate(iter(sys.stdin.readline, ""), 1):
        print(_decode(llm, depth, count, turn), flush=True)
"""


def main() -> int:
    """Measure and print the table."""
    args = _arguments()
    found: dict[str, Any] = {**about(), "threads": args.threads, "clients": CLIENTS, "requests": args.requests}
    found["load_average"] = found.pop("load")
    for name, measure in (("load", _load_round), ("single", _single_round), ("ready", _ready_round)):
        if name not in args.only:
            continue
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            rounds.append(measure(args))
            print(f"{name}: {json.dumps(_short(rounds[-1]))}", file=sys.stderr)
        found[name] = rounds
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(_table(found))
    return 0


def _load_round(args: argparse.Namespace) -> dict[str, Any]:
    """Each server once."""
    load = Load(args.requests, CLIENTS, prompt_tokens=PROMPT, gen_tokens=ANSWER, vocab=VOCAB, warmup=0)
    found: dict[str, Any] = {}
    with _served(args, Q4_1, "martlet") as port:
        _measure(port, replace(load, requests=2, seed=1))
        before = _step_seconds(port)
        found["martlet Q4_1"] = report = _measure(port, load)
        report["outside"] = 1 - (_step_seconds(port) - before) / report["seconds"]
    for file, name in ((Q4_1, "llama-server Q4_1"), (Q4_0, "llama-server Q4_0")):
        if args.llama_server is not None and (args.models / file).exists():
            with _served(args, file, "llama-server") as port:
                _measure(port, replace(load, requests=2, seed=1))
                found[name] = _measure(port, load)
    return found


def _single_round(args: argparse.Namespace) -> dict[str, Any]:
    """One stream through HTTP, and the same tokens without; nobody guesses tokens, as `martlet
    bench` does not.
    """
    load = Load(1, 1, prompt_tokens=SINGLE_PROMPT, gen_tokens=SINGLE_ANSWER, vocab=VOCAB, warmup=0)
    command = [*args.serve_with.split(), sys.executable, "-c", BENCH_BY_TURNS, str(args.models / Q4_1)]
    command += [str(number) for number in (args.threads, SINGLE_PROMPT, SINGLE_ANSWER)]
    http, bench, audit = [], [], set[str]()
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        _served(args, Q4_1, "martlet", "--draft", "off") as port,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        _measure(port, replace(load, seed=SINGLE_TURNS))
        for turn in range(SINGLE_TURNS):
            print(file=other.stdin, flush=True)
            bench.append(float(other.stdout.readline()))
            report = _measure(port, replace(load, seed=turn))
            http.append(1000 / report["tpot_ms"]["p50"])
            audit |= set(report["audit"])
        other.stdin.close()
    ratio = statistics.median(a / b for a, b in zip(http, bench, strict=True))
    return {"http": statistics.median(http), "bench": statistics.median(bench), "ratio": ratio, "audit": sorted(audit)}


def _ready_round(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first answer."""
    found = {}
    port = _free_port()
    command = [sys.executable, "-m", "martlet", "serve", str(args.models / Q4_1), "-t", str(args.threads)]
    found["martlet"] = _time_to_health([*command, "--port", str(port), "--no-log-requests"], port)
    if args.llama_server is not None:
        port = _free_port()
        command = [str(args.llama_server), "-m", str(args.models / Q4_1), "-t", str(args.threads)]
        found["llama-server"] = _time_to_health([*command, "--port", str(port)], port)
    return found


def _served(args: argparse.Namespace, file: str, which: str, *options: str) -> Any:
    args.model = args.models / file
    return _martlet(args, *options) if which == "martlet" else _server(args, PROMPT + ANSWER + 64, CLIENTS)


def _measure(port: int, load: Load) -> dict[str, Any]:
    model, run = measure_server(Target.of(f"http://127.0.0.1:{port}"), None, load, ({}, ()), 600.0)
    found = load_summary(load, run, {}, {"url": f"port {port}", "model": model})
    if found["failed"]:
        sys.exit(f"{found['failed']} requests failed: {found['errors']}")
    return found


def _step_seconds(port: int) -> float:
    """What Martlet's engine has spent in steps."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    match = re.search(r"^martlet:step_time_seconds_sum\S* (\S+)", text, re.M)
    return float(match[1]) if match else 0.0


def _time_to_health(command: list[str], port: int) -> float:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return time.perf_counter() - start
            except OSError:
                if process.poll() is not None or time.perf_counter() - start > 120:
                    sys.exit(f"{' '.join(command)} did not start")
                time.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait()


# -- the report ------------------------------------------------------------------------------------
def _table(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [f"{machine['processor']}, {found['threads']} threads, commit {found['commit']}; medians", ""]
    lines += ["| what | Martlet | llama-server | ratio (bar) |", "|---|---|---|---|"]
    if rounds := found.get("load"):
        ours = _median(rounds, lambda r: r["martlet Q4_1"]["generated_tokens_per_s"])
        ttft = _median(rounds, lambda r: r["martlet Q4_1"]["ttft_ms"]["p95"])
        for kind in ("Q4_1", "Q4_0"):
            name = f"llama-server {kind}"
            if name in rounds[0]:
                theirs = _median(rounds, lambda r, name=name: r[name]["generated_tokens_per_s"])
                lines.append(
                    f"| output tokens/s, theirs on {kind} | {ours:.1f} | {theirs:.1f} |{_mark(ours / theirs, kind)}"
                )
                late = _median(rounds, lambda r, name=name: r[name]["ttft_ms"]["p95"])
                lines.append(
                    f"| TTFT p95, ms, theirs on {kind} | {ttft:.0f} | {late:.0f} |{_mark(late / ttft, 'TTFT')}"
                )
        outside = _median(rounds, lambda r: r["martlet Q4_1"]["outside"])
        lines.append(f"| share of time outside of a step | {outside:.1%} | |{_mark(outside, 'outside', most=True)}")
    if rounds := found.get("single"):
        http, bare = _median(rounds, lambda r: r["http"]), _median(rounds, lambda r: r["bench"])
        ratio = _median(rounds, lambda r: r["ratio"])
        lines.append(
            f"| one stream, tokens/s: HTTP, `martlet bench` | {http:.1f}, {bare:.1f} | |{_mark(ratio, 'single')}"
        )
    if rounds := found.get("ready"):
        ours = _median(rounds, lambda r: r["martlet"])
        theirs = _median(rounds, lambda r: r.get("llama-server", float("nan")))
        lines.append(f"| ready, s | {ours:.2f} | {theirs:.2f} |{_mark(ours, 'ready', most=True)}")
    return "\n".join(lines)


def _mark(value: float, bar: str, *, most: bool = False) -> str:
    kept = value <= BARS[bar] if most else value >= BARS[bar]
    return f" {value:.3f} ({'≤' if most else '≥'} {BARS[bar]:g}){'' if kept else ' ✗'} |"


def _median(rounds: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(of, rounds))


def _short(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("generated_tokens_per_s", "outside", "audit")
    return {
        name: {key: value[key] for key in keys if key in value} | {"ttft_p95": value["ttft_ms"]["p95"]}
        if isinstance(value, dict)
        else value
        for name, value in result.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="the program (none: Martlet alone is measured)")
    parser.add_argument("--models", type=Path, required=True, help=f"the folder with {Q4_1} and {Q4_0}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--serve-with", default="nice -n 5", help="what both servers are started with (default: nice -n 5,"
                        " so that they leave the client, which takes the times, its turn)")  # fmt: skip
    parser.add_argument("--only", nargs="*", default=("load", "single", "ready"), choices=("load", "single", "ready"))
    parser.add_argument("--out", type=Path, help="write every run as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
