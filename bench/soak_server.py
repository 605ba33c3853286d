"""A server under mixed load for twenty minutes: its memory has to stay as it is (bar: minute 20 ÷
minute 5 ≤ 1.03).

    python bench/soak_server.py --model FILE.gguf [--minutes 20] [--out soak.json]

Clients do what clients do: chats and completions, whole and streamed, short and long, with shared
beginnings and without, n > 1, log-probabilities, embeddings, tokens; some leave in the midst of a
stream, some send what is no request. At the end nothing may run or wait, and a request is answered.
Resident memory is read every five seconds; the mean of a minute counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from compare_serving import _free_port, _running_process

from martlet.bench.load_generator import WORDS
from martlet.bench.report import about

BAR, SAMPLE_S = 1.03, 5.0
SHARED = "You are a helpful assistant who answers in one sentence. " * 20


def main() -> int:
    """Run, and print the verdict."""
    args = _arguments()
    port = _free_port()
    command = [sys.executable, "-m", "martlet", "serve", str(args.model), "-t", str(args.threads), "--port", str(port)]
    # So few KV pages that all have been written by minute 5: memory that is used for the first time
    # is no leak.
    command += ["-c", "2048", "--kv-memory", "128M", "--no-log-requests"]
    with _running_process(command, port) as process:
        found = asyncio.run(_soak(args, port, process))
    found = {**about(), **found}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(
        f"{found['minutes']:g} minutes, {found['requests']:,} requests {found['kinds']}; resident {found['early_mib']:.1f} MiB in"
        f" minute {found['early']}, {found['late_mib']:.1f} in minute {found['late']}: {found['ratio']:.4f} (≤ {BAR})"
        f"{'' if found['ratio'] <= BAR else ' ✗'}; left over: {found['left']}; status of others: {found['status']}"
    )
    return 0 if found["ratio"] <= BAR and not any(found["left"].values()) else 1


async def _soak(args: argparse.Namespace, port: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    stop, kinds, status = time.monotonic() + 60 * args.minutes, Counter[str](), Counter[str]()
    samples: list[tuple[float, int]] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
        clients = [asyncio.ensure_future(_client(http, n, stop, kinds, status)) for n in range(args.clients)]
        start = time.monotonic()
        while time.monotonic() < stop:
            await asyncio.sleep(SAMPLE_S)
            samples.append((time.monotonic() - start, _resident(process.pid)))
        await asyncio.gather(*clients)
        left = await _left(http)
    early, late = max(1, round(args.minutes / 4)), max(1, round(args.minutes))
    mib = {minute: _mean(samples, minute) for minute in (early, late)}
    return {
        "minutes": args.minutes,
        "requests": sum(kinds.values()),
        "kinds": dict(kinds),
        "status": dict(status),
        "early": early,
        "late": late,
        "early_mib": mib[early],
        "late_mib": mib[late],
        "ratio": mib[late] / mib[early],
        "left": left,
        "samples": samples,
    }


async def _client(http: httpx.AsyncClient, seed: int, stop: float, kinds: Counter[str], status: Counter[str]) -> None:
    numbers = random.Random(seed)
    acts = (_whole, _stream, _stream, _leave, _several, _embed, _tokens, _nonsense)
    while time.monotonic() < stop:
        act = numbers.choice(acts)
        code = await act(http, numbers)
        kinds[act.__name__.strip("_")] += 1
        status[str(code)] += 1


def _text(numbers: random.Random, most: int) -> str:
    return " ".join(numbers.choices(WORDS.split(), k=numbers.randint(1, most)))


def _chat(numbers: random.Random, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(numbers, 200)}]
    if numbers.random() < 0.5:
        messages.insert(0, {"role": "system", "content": SHARED})
    return {"messages": messages, "max_tokens": numbers.randint(1, 64), "temperature": 0.8, **more}


async def _whole(http: httpx.AsyncClient, numbers: random.Random) -> int:
    return (await http.post("/v1/chat/completions", json=_chat(numbers))).status_code


async def _several(http: httpx.AsyncClient, numbers: random.Random) -> int:
    body = {"prompt": _text(numbers, 100), "n": 3, "logprobs": 3, "max_tokens": 16}
    return (await http.post("/v1/completions", json=body)).status_code


async def _stream(http: httpx.AsyncClient, numbers: random.Random) -> int:
    async with http.stream("POST", "/v1/chat/completions", json=_chat(numbers, stream=True)) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    if lines[-1] != "data: [DONE]":
        sys.exit(f"a stream ended with {lines[-1][:200]}")
    return answer.status_code


async def _leave(http: httpx.AsyncClient, numbers: random.Random) -> int:
    after = numbers.randint(0, 5)
    async with http.stream("POST", "/v1/chat/completions", json=_chat(numbers, stream=True, max_tokens=400)) as answer:
        async for _ in answer.aiter_lines():
            after -= 1
            if after < 0:
                break
    return answer.status_code


async def _embed(http: httpx.AsyncClient, numbers: random.Random) -> int:
    return (await http.post("/v1/embeddings", json={"input": _text(numbers, 60)})).status_code


async def _tokens(http: httpx.AsyncClient, numbers: random.Random) -> int:
    return (await http.post("/tokenize", json={"prompt": _text(numbers, 500)})).status_code


async def _nonsense(http: httpx.AsyncClient, numbers: random.Random) -> int:
    content = numbers.choice([b"{", b"[]", b'{"messages": 5}', b"\xff" * 1000, b'{"prompt": "a", "n": 100000}'])
    return (await http.post("/v1/chat/completions", content=content)).status_code


async def _left(http: httpx.AsyncClient) -> dict[str, float]:
    """What still runs or waits once everybody is served; 1.0 as `deaf` if no token comes."""
    deaf = 0.0 if (await http.get("/ready?deep=1")).status_code == 200 else 1.0
    text = (await http.get("/metrics")).text
    found = {"deaf": deaf}
    for line in text.splitlines():
        for name in ("num_requests_running", "num_requests_waiting"):
            if line.startswith(f"martlet:{name}{{"):
                found[name] = float(line.rsplit(" ", 1)[1])
    return found


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _mean(samples: list[tuple[float, int]], minute: int) -> float:
    """Of the minute that ends there; MiB."""
    found = [kib for when, kib in samples if minute - 1 <= when / 60 <= minute]
    return statistics.fmean(found) / 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write every sample as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
