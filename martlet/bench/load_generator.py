"""Generates load for a server and collects the answers (read `load_report.py` next).

    open loop     requests arrive at random at a rate (a Poisson process), whatever the server's
    pace closed loop   each of several clients sends its next request after the answer to its last

A request's clock starts when the request is due, so that a slow generator or server cannot hide its
delay. The generator also measures itself: the delay of its event loop and its share of a core.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from martlet.bench.http_stream import Answer, Target, ask, get_json
from martlet.errors import MartletError, RequestError

WATCH_S = 0.05  # between two measurements of the loop's delay; each costs as much as a token
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The load; token counts are per request."""

    requests: int = 64
    concurrency: int = 16  # closed loop: clients; open loop: most open requests, 0 for no bound
    rate: float | None = None  # arrivals per second; None: closed loop
    endpoint: str = "completions"  # or "chat"
    prompt_tokens: int = 128  # not shared
    gen_tokens: int = 64
    shared_tokens: int = 0  # common to the prompts of a group
    groups: int = 1  # of prompts that share a beginning
    vocab: int = 0  # above 0: prompts are random token ids below it, else words
    ignore_eos: bool = True  # so that every answer has its full length
    seed: int = 0
    warmup: int = 1  # requests sent first, one after another, and not counted


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A finished load."""

    answers: tuple[Answer, ...]  # in order of arrival
    start_s: float
    seconds: float
    lags_s: tuple[float, ...]  # samples of the event loop's delay
    cpu_s: float  # CPU time of the generator


def bodies(load: Load, model: str | None, extra: dict[str, Any], dataset: Sequence[Any] = ()) -> list[bytes]:
    """The bodies of the warm-up requests and the counted ones, in order of arrival."""
    numbers = random.Random(load.seed)
    shared = [_text(numbers, load.shared_tokens, load.vocab) for _ in range(load.groups)]
    requests = []
    for number in range(load.warmup + load.requests):
        prompt: Any
        if dataset:
            prompt = dataset[number % len(dataset)]
        else:
            prompt = shared[number % load.groups] + _text(numbers, load.prompt_tokens, load.vocab)
            prompt = prompt if load.vocab else " ".join(prompt)
        requests.append(orjson.dumps(_body(load, model, prompt) | extra))
    return requests


def _body(load: Load, model: str | None, prompt: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": load.gen_tokens, "temperature": 0.0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if model is not None:
        body["model"] = model
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint == "chat":
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return body | {"messages": messages}
    return body | {"prompt": prompt}


def _text(numbers: random.Random, count: int, vocab: int) -> list[Any]:
    words = WORDS.split()
    return [numbers.randrange(vocab) if vocab else numbers.choice(words) for _ in range(count)]


def read_dataset(path: Path, endpoint: str) -> list[Any]:
    """Prompts from a file of JSON lines or a JSON list.

    Entries are {"prompt"}, {"messages"} or ShareGPT's {"conversations"}. Raises RequestError for
    other content, OSError if the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    except ValueError as error:
        raise RequestError(f"{path} is neither a JSON list nor JSON lines: {error}.", param="dataset") from None
    prompts = [_entry(entry, endpoint, f"{path}, entry {number}") for number, entry in enumerate(entries)]
    if not prompts:
        raise RequestError(f"{path} holds no prompts.", param="dataset")
    return prompts


def _entry(entry: Any, endpoint: str, where: str) -> Any:
    if isinstance(entry, dict):
        messages, turns = entry.get("messages"), entry.get("conversations")
        if isinstance(messages, list) and endpoint == "chat":
            return messages
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and isinstance(turns[0].get("value"), str):
            return turns[0]["value"]
        if isinstance(prompt := entry.get("prompt"), str):
            return prompt
    wanted = "prompt, messages or conversations" if endpoint == "chat" else "prompt or conversations"
    raise RequestError(f"{where} has no {wanted}.", param="dataset")


def measure_server(
    target: Target, model: str | None, load: Load, what: tuple[dict[str, Any], Sequence[Any]], timeout_s: float
) -> tuple[str | None, LoadRun]:
    """Run a load; `what` are further fields of the bodies, and prompts. Returns the model's name.

    Without `model` it is the first that the server lists. The generator runs on uvloop where
    available, to use as little of the CPU as possible. Raises MartletError if there is no server.
    """

    async def work() -> tuple[str | None, LoadRun]:
        name = await _first_model(target) if model is None else model
        return name, await run_load(target, load, bodies(load, name, *what), timeout_s)

    if sys.platform == "win32":
        return asyncio.run(work())
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


async def _first_model(target: Target) -> str | None:
    try:
        listed = await get_json(target, f"{target.prefix}/models")
        return str(listed["data"][0]["id"])
    except (OSError, TimeoutError) as error:
        raise MartletError(f"There is no server at {target.host}:{target.port}: {error or 'no answer'}.") from None
    except (MartletError, LookupError, TypeError, ValueError):
        return None  # it may not need a name


async def run_load(target: Target, load: Load, requests: Sequence[bytes], timeout_s: float) -> LoadRun:
    """Send all requests and wait for all answers; RequestError if a warm-up request fails."""
    path = "/chat/completions" if load.endpoint == "chat" else "/completions"
    for body in requests[: load.warmup]:
        answer = await ask(target, path, body, time.perf_counter(), timeout_s)
        if answer.error is not None:
            raise RequestError(f"The first request failed, so none was measured: {answer.error}", param="url")
    counted = requests[load.warmup :]
    lags: list[float] = []
    watching = asyncio.ensure_future(_watch(lags))
    cpu, start = time.process_time(), time.perf_counter()
    try:
        run = _closed if load.rate is None else _open
        answers = await run(target, path, counted, load, timeout_s)
    finally:
        watching.cancel()
    seconds = max(answer.end_s for answer in answers) - start
    return LoadRun(tuple(answers), start, seconds, tuple(lags), time.process_time() - cpu)


async def _closed(target: Target, path: str, requests: Sequence[bytes], load: Load, timeout_s: float) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for number, body in waiting:
            answers[number] = await ask(target, path, body, time.perf_counter(), timeout_s)

    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return [answers[number] for number in range(len(requests))]


async def _open(target: Target, path: str, requests: Sequence[bytes], load: Load, timeout_s: float) -> list[Answer]:
    assert load.rate is not None
    numbers, room = random.Random(load.seed + 1), asyncio.Semaphore(load.concurrency or len(requests))
    due, running = time.perf_counter(), []

    async def send(body: bytes, due: float) -> Answer:
        async with room:
            return await ask(target, path, body, due, timeout_s)

    for body in requests:
        due += numbers.expovariate(load.rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        running.append(asyncio.ensure_future(send(body, due)))
    return list(await asyncio.gather(*running))


async def _watch(lags: list[float]) -> None:
    """Record how much longer each sleep took than asked."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(WATCH_S)
        lags.append(max(0.0, time.perf_counter() - before - WATCH_S))
