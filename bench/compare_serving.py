"""Many requests at once, Martlet against llama.cpp's server on the same file and threads: two bars.

    python bench/compare_serving.py --llama-server BUILD/bin/llama-server --model FILE.gguf

    shared     32 requests share a prefix of 1,000 tokens, 8 run at a time: total time, llama-server
               ÷ Martlet  (bar: ≥ 5)
    intrusion  4 answers are being decoded when a prompt of 4,000 tokens arrives: the worst gap
               between two tokens of an answer ÷ the steady gap before  (bar: ≤ 4)

Prompts are the same random token ids for both, answers greedy and of fixed length, and both start
with an empty cache. llama-server is asked over HTTP on this machine, with a slot for each request
that runs (`-np`) and its prompt cache on, as is its default; Martlet is driven through its engine
in this process. Over 30 seconds of work the HTTP of one machine is nothing, but it is not the same
thing, and the report says so. Runs alternate; medians count. docs/tuning.md says how llama-server
is built.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from martlet import LLM, SamplingParams
from martlet.bench.drive import drive
from martlet.bench.report import about
from martlet.bench.workloads import Arrival, Workload, arrivals
from martlet.types import Request

SHARED = Workload("prefix", 32, 8, prompt_tokens=32, gen_tokens=32, shared_tokens=1000)
STREAMS, STREAM_PROMPT, STEADY_TOKENS, STREAM_TOKENS, LONG_PROMPT, LONG_TOKENS = 4, 64, 40, 1200, 4000, 8
SHARED_BAR, INTRUSION_BAR = 5.0, 4.0
VOCAB = 40_000  # ids below it are ordinary tokens of the models here
START_S = 120.0


def main() -> int:
    """Measure both bars and print the table."""
    args = _arguments()
    found: dict[str, Any] = {
        **about(),
        "threads": args.threads,
        "model": args.model.name,
        "martlet": "in process" if args.in_process else "HTTP",
        "llama-server": "HTTP",
    }
    measured: tuple[tuple[str, Callable[[argparse.Namespace], Any], Callable[[argparse.Namespace], Any]], ...] = (
        ("shared", our_shared if args.in_process else served_shared, their_shared),
        ("intrusion", our_intrusion if args.in_process else served_intrusion, their_intrusion),
    )
    for name, ours, theirs in measured:
        if args.only and name not in args.only:
            continue
        runs: dict[str, list[Any]] = {"martlet": [], "llama-server": []}
        for _ in range(args.rounds):
            runs["martlet"].append(ours(args))
            if args.llama_server is not None:
                runs["llama-server"].append(theirs(args))
            print(f"{name}: {json.dumps({key: runs[key][-1:] for key in runs})}", file=sys.stderr)
        found[name] = runs
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(_table(found))
    return 0


# -- Martlet ---------------------------------------------------------------------------------------
def our_shared(args: argparse.Namespace) -> dict[str, float]:
    """Total time, and how much came from the prefix cache."""
    with _llm(args, SHARED.longest, SHARED.concurrency, SHARED.tokens_at_a_time) as llm:
        run = drive(llm.engine, arrivals(SHARED, VOCAB), SHARED.concurrency)
    prompt = sum(done.metrics.n_prompt for done in run.done)
    return {"seconds": run.seconds, "cached": sum(done.metrics.n_cached for done in run.done) / prompt}


def our_intrusion(args: argparse.Namespace) -> dict[str, float]:
    """Worst and steady gap, in seconds."""
    streams, long = _intrusion()
    context = LONG_PROMPT + LONG_TOKENS + 1
    with _llm(args, context, STREAMS + 1, context + STREAMS * (STREAM_PROMPT + STREAM_TOKENS)) as llm:
        engine = llm.engine
        metrics = [engine.add(_request(stream)) for stream in streams]
        while min(len(m.gaps_s) for m in metrics) < STEADY_TOKENS:
            engine.step()
        before = [len(m.gaps_s) for m in metrics]
        late = engine.add(_request(long))
        while engine.has_work and late.finished_s is None:
            engine.step()
        for request in (*streams, long):
            engine.abort(request.name)
    steady = statistics.median(gap for m, n in zip(metrics, before, strict=True) for gap in m.gaps_s[2:n])
    worst = max(gap for m, n in zip(metrics, before, strict=True) for gap in m.gaps_s[n:])
    return {"steady": steady, "worst": worst, "long_ttft": late.ttft_s or 0.0}


@contextmanager
def _llm(args: argparse.Namespace, context: int, max_seqs: int, tokens: int) -> Iterator[LLM]:
    with LLM(str(args.model), max_context=context, threads=args.threads) as probe:
        per_token = probe.plan.kv_per_token
    pages = -(-tokens // 32) + 2 * max_seqs + 2
    with LLM(
        str(args.model), max_context=context, threads=args.threads, max_seqs=max_seqs, kv_memory=pages * 32 * per_token
    ) as llm:
        yield llm


def _request(arrival: Arrival) -> Request:
    params = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
    return Request(arrival.name, arrival.ids, params)


def _intrusion() -> tuple[list[Arrival], Arrival]:
    numbers = random.Random(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(VOCAB) for _ in range(count))

    streams = [Arrival(str(n), tokens(STREAM_PROMPT), STREAM_TOKENS) for n in range(STREAMS)]
    return streams, Arrival("long", tokens(LONG_PROMPT), LONG_TOKENS)


# -- over HTTP -------------------------------------------------------------------------------------
def served_shared(args: argparse.Namespace) -> dict[str, float]:
    """Martlet's total time with 8 clients."""
    with _martlet(args) as port:
        return _shared(port, _martlet_body, lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def their_shared(args: argparse.Namespace) -> dict[str, float]:
    """llama-server's, and how much it says it took from its cache."""
    each = SHARED.shared_tokens + SHARED.prompt_tokens
    with _server(args, SHARED.longest, SHARED.concurrency) as port:
        return _shared(port, _llama_body, lambda answer: each - answer["timings"]["prompt_n"])


def served_intrusion(args: argparse.Namespace) -> dict[str, float]:
    """Martlet's worst and steady gap."""
    with _martlet(args) as port:
        return _gaps(port, _martlet_body)


def their_intrusion(args: argparse.Namespace) -> dict[str, float]:
    """llama-server's."""
    with _server(args, LONG_PROMPT + LONG_TOKENS + 1, STREAMS + 1) as port:
        return _gaps(port, _llama_body)


Body = Callable[[Arrival, bool], tuple[str, dict[str, Any]]]  # the path, and what is posted


def _llama_body(arrival: Arrival, stream: bool) -> tuple[str, dict[str, Any]]:
    return "/completion", {
        "prompt": list(arrival.ids),
        "n_predict": arrival.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "cache_prompt": True,
    }


def _martlet_body(arrival: Arrival, stream: bool) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "prompt": list(arrival.ids),
        "max_tokens": arrival.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def _shared(port: int, body: Body, cached: Callable[[dict[str, Any]], int]) -> dict[str, float]:
    with ThreadPoolExecutor(SHARED.concurrency) as clients:
        start = time.perf_counter()
        answers = list(clients.map(lambda arrival: _complete(port, body, arrival), arrivals(SHARED, VOCAB)))
        seconds = time.perf_counter() - start
    prompt = SHARED.requests * (SHARED.shared_tokens + SHARED.prompt_tokens)
    return {"seconds": seconds, "cached": sum(map(cached, answers)) / prompt}


def _gaps(port: int, body: Body) -> dict[str, float]:
    """Worst and steady gap, from the times at which the streams' pieces arrive."""
    streams, long = _intrusion()
    times: list[list[float]] = [[] for _ in streams]
    stop = threading.Event()
    threads = [
        threading.Thread(target=_stream, args=(port, body, stream, times[n], stop), daemon=True)
        for n, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < STEADY_TOKENS:
        time.sleep(0.01)
    sent = time.perf_counter()
    _complete(port, body, long)
    stop.set()
    for thread in threads:
        thread.join()
    gaps = [(b, b - a) for row in times for a, b in itertools.pairwise(row[1:])]
    steady = statistics.median(gap for when, gap in gaps if when < sent)
    return {"steady": steady, "worst": max(gap for when, gap in gaps if when >= sent)}


@contextmanager
def _server(args: argparse.Namespace, context: int, slots: int) -> Iterator[int]:
    """A fresh server with so many slots of so many tokens."""
    port = _free_port()
    context = -(-context // 256) * 256
    command = [str(args.llama_server), "-m", str(args.model), "-t", str(args.threads), "-c", str(context * slots)]
    command += ["-np", str(slots), "--host", "127.0.0.1", "--port", str(port)]
    with _running([*args.serve_with.split(), *command], port):
        yield port


@contextmanager
def _martlet(args: argparse.Namespace, *options: str) -> Iterator[int]:
    """Martlet's server as it starts by default: memory for the model's whole context, shared by all
    that run.
    """
    port = _free_port()
    command = [sys.executable, "-m", "martlet", "serve", str(args.model), "-t", str(args.threads), "--port", str(port)]
    with _running([*args.serve_with.split(), *command, "--no-log-requests", *options], port):
        yield port


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """A server from the moment at which it answers."""
    with _running_process(command, port):
        yield


@contextmanager
def _running_process(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The same, and its process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)} did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def _healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _post(port: int, body: Body, arrival: Arrival, stream: bool) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    path, content = body(arrival, stream)
    connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"port {port} said {response.status}: {response.read()[:500]!r}")
    return response


def _complete(port: int, body: Body, arrival: Arrival) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_post(port, body, arrival, False).read())
    came = answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"]
    if came != arrival.max_tokens:
        sys.exit(f"the server gave {came} tokens; expected {arrival.max_tokens}")
    return answer


def _stream(port: int, body: Body, arrival: Arrival, times: list[float], stop: threading.Event) -> None:
    for line in _post(port, body, arrival, True):
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
        if stop.is_set():
            return


# -- the report ------------------------------------------------------------------------------------
def _table(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [
        f"{machine['processor']}, {found['threads']} threads, commit {found['commit']}; medians;"
        f" Martlet {found['martlet']}, llama-server HTTP; both caches empty at the start.",
        "",
        f"| {found['model']} | Martlet | llama-server | bar |",
        "|---|---|---|---|",
    ]
    if "shared" in found:
        ours, theirs = (_median(found["shared"][key], "seconds") for key in ("martlet", "llama-server"))
        cached = [_median(found["shared"][key], "cached") for key in ("martlet", "llama-server")]
        ratio = theirs / ours
        lines.append(
            f"| {SHARED.requests} requests, {SHARED.shared_tokens:,} tokens shared, {SHARED.concurrency} at a time |"
            f" {ours:.2f} s ({cached[0]:.0%} cached) | {theirs:.2f} s ({cached[1]:.0%} cached) |"
            f" {ratio:.2f} (≥ {SHARED_BAR:g}){'' if ratio >= SHARED_BAR else ' ✗'} |"
        )
    if "intrusion" in found:
        cells, shares = [], []
        for key in ("martlet", "llama-server"):
            steady, worst = (_median(found["intrusion"][key], part) for part in ("steady", "worst"))
            shares.append(worst / steady)
            cells.append(f"{1000 * worst:,.0f} ÷ {1000 * steady:,.0f} ms = {worst / steady:,.1f}")
        lines.append(
            f"| worst ÷ steady gap of {STREAMS} streams, {LONG_PROMPT:,} tokens arrive | {cells[0]} | {cells[1]} |"
            f" {shares[0]:.1f} (≤ {INTRUSION_BAR:g}){'' if shares[0] <= INTRUSION_BAR else ' ✗'} |"
        )
    return "\n".join(lines)


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median([run[key] for run in runs]) if runs else float("nan")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="the program (none: Martlet alone is measured)")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-process", action="store_true", help="drive Martlet's engine, without its server")
    parser.add_argument("--serve-with", default="nice -n 5", help="what both servers are started with (default: nice -n 5,"
                        " so that they leave the client, which takes the times, its turn)")  # fmt: skip
    parser.add_argument("--only", nargs="*", choices=("shared", "intrusion"))
    parser.add_argument("--out", type=Path, help="write every run as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
