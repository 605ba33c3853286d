"""What it costs that somebody looks at /engine: tokens a second, and the share of time outside of
the engine's steps.

    python bench/engine_view.py MODEL.gguf [--rounds 4] [--out figures.json]

A server of its own, and rounds of 16 requests at once (128 prompt tokens, 64 new ones), in turn
without and with one viewer, which reads all that it is sent. The share is 1 - (seconds in steps, by
/metrics) / (seconds of the round). The viewer is no browser: drawing costs the machine that draws.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

STREAMS, PROMPT, NEW = 16, 128, 64
VOCAB = 40_000  # ids below it are ordinary tokens


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind (default: 4)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="file for the figures, as JSON")
    args = parser.parse_args()
    with _server(args.model, args.threads) as port:
        _round(port, 0)  # the first steps of a kind are slower
        found: dict[str, list[dict[str, float]]] = {"alone": [], "viewed": []}
        for number in range(1, 2 * args.rounds + 1):
            if number % 2:
                found["alone"].append(_round(port, number))
            else:
                with _viewer(port) as seen:
                    found["viewed"].append(_round(port, number) | {"bytes": 0.0})
                found["viewed"][-1]["bytes"] = float(seen[0])
            kind = "alone" if number % 2 else "viewed"
            print(f"  {kind:8}", json.dumps(found[kind][-1]), flush=True)
    figures: dict[str, Any] = {"rounds": found}
    for kind, rounds in found.items():
        figures[kind] = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        print(f"{kind:8}", "  ".join(f"{name} {value:,.4g}" for name, value in figures[kind].items()))
    ratio = figures["viewed"]["tokens_per_s"] / figures["alone"]["tokens_per_s"]
    more = figures["viewed"]["outside"] - figures["alone"]["outside"]
    figures |= {"ratio": ratio, "outside_more": more}
    print(f"tokens/s viewed ÷ alone {ratio:.4f}; share outside of steps {100 * more:+.2f} points")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


@contextmanager
def _server(model: str, threads: int) -> Iterator[int]:
    command = [sys.executable, "-m", "martlet", "serve", model, "--port", "0", "--threads", str(threads)]
    with subprocess.Popen([*command, "--no-log-requests"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"ready at http://[^:]+:(\d+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        try:
            yield int(found[1])
        finally:
            process.terminate()


def _round(port: int, number: int) -> dict[str, float]:
    dice = random.Random(number)
    bodies = [
        {
            "prompt": [dice.randrange(VOCAB) for _ in range(PROMPT)],
            "max_tokens": NEW,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(STREAMS)
    ]
    before, start = _in_steps(port), time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda body: _ask(port, body), bodies))
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": STREAMS * NEW / seconds,
        "outside": 1 - (_in_steps(port) - before) / seconds,
    }


def _ask(port: int, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-300:]
    connection.close()


def _in_steps(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(value) for value in re.findall(r"^martlet:step_time_seconds_sum\{.*\} (\S+)", text, re.MULTILINE))


@contextmanager
def _viewer(port: int) -> Iterator[list[int]]:
    """Reads the view until the end of the block; the list's number is the bytes that came."""
    seen = [0]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/engine/events")
    response = connection.getresponse()
    sock = connection.sock

    def read() -> None:
        # cut off in the middle, as a page that is closed
        with suppress(http.client.HTTPException, OSError):
            while data := response.read1(1 << 16):
                seen[0] += len(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    time.sleep(0.3)
    try:
        yield seen
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
