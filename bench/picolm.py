"""The NumPy port against the C program: decode, prefill, and the memory that decoding a file larger
than memory takes.

    python bench/picolm.py MODEL_Q8_0 --c PICOLM [--large MODEL] [--threads 2] [--rounds 3]
                           [--out picolm]

PICOLM is the C program built natively (`make native` in github.com/RightNow-AI/picolm at cf3f2df).
Runs alternate: ours with weights held as float32, the C, ours streaming. Rates are each program's
own, from the same lines on stderr; the C makes N + 1 tokens and counts them. The C knows no
byte-level vocabularies, so it cuts a text into other tokens; a prompt is filled up with digits,
each a token of its own, until the program at hand makes exactly 256 tokens of it; only rates are
compared. With `--large`, that file is decoded in streaming mode while /proc is read 50 times a
second: RssAnon is what the kernel cannot drop, interpreter and all; the same run is repeated with
RLIMIT_DATA at 256 MB, which fails where more is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"
PREFILL = 256  # tokens
LIMIT = 256 << 20


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--c", type=Path)
    parser.add_argument("--large", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"threads": args.threads, "runs": []}
    programs: dict[str, list[str]] = {
        "held": [sys.executable, "-m", "picolm"],
        "C": [str(args.c)],
        "streamed": [sys.executable, "-m", "picolm"],
    }
    for _ in range(args.rounds if args.c else 0):
        for name, program in programs.items():
            more = {"held": ["-m", "100000"], "streamed": ["-m", "0"], "C": []}[name]
            found = rates(
                [*program, str(args.model), "-t", "0", "-j", str(args.threads), "-c", "512", *more], args.steps
            )
            report["runs"].append({"program": name} | found)
            print(report["runs"][-1], flush=True)
    for name in programs if args.c else ():
        runs = [r for r in report["runs"] if r["program"] == name]
        report[name] = {k: statistics.median(r[k] for r in runs) for k in ("decode", "prefill")}
    if args.c:
        for name in ("held", "streamed"):
            report[f"{name} / C"] = {k: report[name][k] / report["C"][k] for k in ("decode", "prefill")}
    if args.large:
        report["memory"] = memory(args.large, args.threads)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.with_suffix(".json").write_text(text + "\n")


def rates(command: list[str], steps: int) -> dict[str, float]:
    """Tokens a second: of a prompt of exactly 256 tokens, and of decoding behind a short one."""
    short = run([*command, "-p", PROMPT, "-n", str(steps)])
    digits = PREFILL - int(re.findall(r"Prompt: (\d+) tokens", short)[0])
    long = run([*command, "-p", PROMPT + "1" * digits, "-n", "1"])
    n, prefill = re.findall(r"Prefill: (\d+) tokens in [\d.]+s \(([\d.]+)", long)[0]
    if int(n) != PREFILL:
        sys.exit(f"{command[0]}: a prompt of {n} tokens instead of {PREFILL}; this vocabulary joins digits")
    made, decode = re.findall(r"Generation: (\d+) tokens in [\d.]+s \(([\d.]+)", short)[0]
    return {"prompt": int(n), "prefill": float(prefill), "made": int(made), "decode": float(decode)}


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, env=environment()).stderr.decode()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def memory(model: Path, threads: int) -> dict[str, Any]:
    """The most anonymous and file memory while decoding; and whether RLIMIT_DATA at 256 MB lets the
    run pass.
    """
    command = [
        sys.executable,
        "-m",
        "picolm",
        str(model),
        "-p",
        "def quicksort(items):",
        "-n",
        "4",
        "-t",
        "0",
        "-m",
        "0",
        "-j",
        str(threads),
    ]
    peak = {"RssAnon": 0, "RssFile": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            for key, kilobytes in re.findall(r"^(RssAnon|RssFile):\s+(\d+)", status, re.M):
                peak[key] = max(peak[key], int(kilobytes) << 10)
            time.sleep(0.02)
        text, told = (stream.read().decode() for stream in (process.stdout, process.stderr) if stream)
    limited = subprocess.run(command, capture_output=True, env=environment(), preexec_fn=limit)
    return {
        "file": model.stat().st_size,
        "anonymous": peak["RssAnon"],
        "file pages": peak["RssFile"],
        "text": text,
        "rates": re.findall(r"\(([\d.]+) tok/s", told),
        "under RLIMIT_DATA": {
            "limit": LIMIT,
            "status": limited.returncode,
            "same text": limited.stdout.decode() == text,
        },
    }


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


if __name__ == "__main__":
    main()
