"""From settings to a listening server, and to its end (read `app.py` for what it answers).

SIGTERM or SIGINT: no more requests are taken, those that run get `shutdown_timeout_s` to end, then they are cancelled
with an error, and the process ends with status 0. A second signal cancels at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn

from martlet.engine.build import Built
from martlet.server.app import create_app
from martlet.server.http_protocol import BoundedProtocol
from martlet.server.registry import Load, Registry
from martlet.server.service import Service
from martlet.server.settings import ServerSettings

__all__ = ["Server", "serve"]

SWITCH_S = 0.0005  # how long a thread may keep the interpreter while the engine's waits; Python's default is 5 ms


class Server(uvicorn.Server):
    """uvicorn's server, which ends as the settings say."""

    def __init__(
        self,
        service: Service,
        ready: Callable[[str], None] = lambda address: None,
        more: Mapping[str, Load] | None = None,
        loras: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`more`: how further models are loaded, by name; the first one's too, if it may make room for them.

        `loras`: the paths of their adapters, by the model's name and the adapter's.
        """
        settings = service.settings
        self._registry = Registry(service, more, loras)
        super().__init__(
            uvicorn.Config(
                create_app(self._registry),
                host=settings.host,
                port=settings.port,
                uds=settings.unix_socket,
                http=BoundedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                limit_concurrency=settings.max_connections,
                timeout_graceful_shutdown=int(settings.shutdown_timeout_s) + 5,
            )
        )
        self._settings = settings
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        if self.started:
            self._ready(self._address())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, for so long; then cancel them."""
        self._registry.drain()
        timer = asyncio.get_running_loop().call_later(
            0 if self.force_exit else self._settings.shutdown_timeout_s, self._registry.cancel_all
        )
        self.force_exit = False  # uvicorn would leave its tasks behind
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first asks for the end, the second cancels what still runs."""
        if self.should_exit:
            self._registry.cancel_all()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # as uvicorn has it
        """Handle signals, and do not raise them again at the end: a server that was asked to end has done well."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _address(self) -> str:
        settings = self._settings
        if settings.unix_socket is not None:
            return f"unix:{settings.unix_socket}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if settings.tls_cert else ''}://{host}:{port}"


def serve(
    built: Built,
    settings: ServerSettings,
    ready: Callable[[str], None],
    more: Mapping[str, Load] | None = None,
    loras: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Serve until a signal; `ready` is called with the address once requests are taken.

    `more` loads further models, and `loras` are the paths of their adapters.
    """
    sys.setswitchinterval(SWITCH_S)
    _set_up_logs(settings)
    Server(Service(built, settings), ready, more, loras).run()


def _set_up_logs(settings: ServerSettings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = "%(message)s" if settings.log_json else "%(asctime)s %(message)s"
    handler.setFormatter(logging.Formatter(plain))
    for name in ("martlet.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "martlet.server" else logging.WARNING)
