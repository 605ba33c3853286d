"""Two API keys on one server, one of which floods it: what the other one's requests wait.

    python bench/two_tenants.py MODEL [--tokens-per-minute 6000]

The quiet key asks once a second (64 tokens of prompt, 16 of answer); the loud one twenty times a
second (128 and 64), which is several times what the server can do. Prepared by the generator of
`martlet bench serve`: alone, then beside the flood with `--policy fair`, then with
`--tokens-per-minute` as well. Prints time to the first token and to the end, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare_serving import VOCAB, _martlet

from martlet.bench.http_stream import Target
from martlet.bench.load_generator import Load, measure_server
from martlet.bench.load_report import load_summary

QUIET = Load(20, 0, rate=1.0, prompt_tokens=64, gen_tokens=16, vocab=VOCAB, warmup=1)
LOUD = Load(400, 0, rate=20.0, prompt_tokens=128, gen_tokens=64, vocab=VOCAB, warmup=0, seed=1)
# that the flood has when the quiet key begins: it has spent then what its bucket held at first
BEFORE_S = 8.0
TIMEOUT_S = 60.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-minute", default="6000")
    parser.add_argument("--serve-with", default="", help="a command before the server's, such as chrt")
    args = parser.parse_args()
    limited = ("--tokens-per-minute", args.tokens_per_minute)
    for name, flooded, options in (("alone", False, ()), ("fair", True, ()), ("fair, with tokens", True, limited)):
        print(f"{name:>18}: {json.dumps(_quiet(args, flooded, options))}", flush=True)


def _quiet(args: argparse.Namespace, flooded: bool, options: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("quiet\nloud\n")
        keys.flush()
        with _martlet(args, "--policy", "fair", "--api-key-file", keys.name, *options) as port:
            url, done = f"http://127.0.0.1:{port}", threading.Event()
            flood = threading.Thread(target=_flood, args=(url, done), daemon=True)
            if flooded:
                flood.start()
                done.wait(BEFORE_S)
            _, run = measure_server(Target.of(url, "quiet"), None, QUIET, ({}, []), TIMEOUT_S)
            done.set()
    found = load_summary(QUIET, run, {}, {})
    return {name: {share: found[name][share] for share in ("p50", "p95", "max")} for name in ("ttft_ms", "e2e_ms")}


def _flood(url: str, done: threading.Event) -> None:
    """Until the server is gone."""
    number = 0
    while not done.is_set():
        number += 1
        try:
            measure_server(Target.of(url, "loud"), None, replace(LOUD, seed=number), ({}, []), TIMEOUT_S)
        except Exception:
            return


if __name__ == "__main__":
    main()
