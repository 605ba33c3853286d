"""A real server on a free port, in this process, whose model is a script: only the numbers are
missing.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvloop

from martlet.config import resolve_config
from martlet.engine.build import Built
from martlet.server.lifecycle import Server
from martlet.server.service import Service
from martlet.server.settings import ServerSettings
from martlet.toy import Script, ScriptedExecutor, scripted_built
from martlet.types import Started, StepPlan, StepResult

PARTS = (
    "template",
    "max_waiting",
    "max_waiting_tokens",
    "prefix_cache",
)  # of the built engine, not the server's settings


class Slow:
    """An executor that takes a while for each step, and fails where it is told to."""

    def __init__(self, executor: ScriptedExecutor, step_s: float = 0.0) -> None:
        self.executor = executor
        self.step_s = step_s
        self.fail: Callable[[StepPlan], bool] = lambda plan: False

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        time.sleep(self.step_s)
        if self.fail(plan):
            raise RuntimeError("the kernel has caught fire")
        # After a step that failed a plan drops sequences that the executor has never seen, as a
        # real one allows.
        dropped = tuple(seq for seq in plan.dropped if seq in self.executor._sequences)
        return self.executor.run(replace(plan, dropped=dropped), started)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)


@dataclass
class Served:
    """A running server."""

    base: str
    service: Service
    executor: Slow
    http: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.http.post(path, content=content, **options)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def gauge(self, name: str, **labels: str) -> float:
        """A number from /metrics; several of a name are added."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"martlet:{name}{{")]
        wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        assert wanted, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, port = self.base.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def check_idle(self) -> None:
        """Nothing runs, waits or holds pages but the cache, and a request is answered."""
        wait_until(lambda: not self.service.bridge.open_tickets)
        wait_until(lambda: self.gauge("num_requests_running") == self.gauge("num_requests_waiting") == 0)
        self.service.built.engine.scheduler.check()
        assert self.chat(max_tokens=2).status_code == 200


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for what must come true soon."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.005)


def events(response: httpx.Response | str) -> list[Any]:
    """The JSON values of a stream's data lines, without the mark of its end."""
    text = response if isinstance(response, str) else response.text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@contextmanager
def serving(
    script: Script, *, step_s: float = 0.0, context: int = 256, n_pages: int = 512, **options: Any
) -> Iterator[Served]:
    """Serve a script; `template` is a chat template, `max_waiting…` the scheduler's, `more` loads
    further models, other options are the server's settings.
    """
    more: Mapping[str, Callable[[], Built]] | None = options.pop("more", None)
    parts = {name: options.pop(name) for name in PARTS if name in options}
    slow: list[Slow] = []

    def wrap(executor: ScriptedExecutor) -> Slow:
        slow.append(Slow(executor, step_s))
        return slow[0]

    config = resolve_config({"model": __file__, "backend": "null", "max_seqs": 4, "max_context": context})
    built: Built = scripted_built(config, script, context=context, n_pages=n_pages, wrap=wrap, **parts)
    settings = ServerSettings(port=0, **{"model_name": "scripted", "shutdown_timeout_s": 1.0, **options})
    address: list[str] = []
    up = threading.Event()

    def ready(where: str) -> None:
        address.append(where)
        up.set()

    service = Service(built, settings)
    server = Server(service, ready, more)
    thread = threading.Thread(target=lambda: uvloop.run(server.serve()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        with httpx.Client(base_url=address[0], timeout=20, verify=False) as client:
            yield Served(address[0], service, slow[0], client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
