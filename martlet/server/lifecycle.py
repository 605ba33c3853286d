"""Starts the server and shuts it down (read `app.py` next, which has its routes).

After SIGTERM or SIGINT the server refuses new requests. Running requests get `shutdown_timeout_s`
to finish; then they are cancelled with an error, and the process ends with status 0. A second
signal cancels at once.
"""

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

SWITCH_S = 0.0005  # a thread's longest hold of the GIL while the engine waits; Python's default is 5 ms


class Server(uvicorn.Server):
    """uvicorn's server with Martlet's settings and shutdown."""

    def __init__(
        self,
        service: Service,
        ready: Callable[[str], None] = lambda address: None,
        more: Mapping[str, Load] | None = None,
        loras: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`ready` is called with the address. `more` and `loras` are those of `Registry`."""
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
        await super().startup(sockets)
        if self.started:
            self._ready(self._address())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish within `shutdown_timeout_s`; then cancel them."""
        self._registry.drain()
        timer = asyncio.get_running_loop().call_later(
            0 if self.force_exit else self._settings.shutdown_timeout_s, self._registry.cancel_all
        )
        self.force_exit = False  # if set, uvicorn would abandon its tasks
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down at the first signal; cancel running requests at the second."""
        if self.should_exit:
            self._registry.cancel_all()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's signature
        """Handle signals without re-raising them at the end: a requested shutdown is a success."""
        if threading.current_thread() is not threading.main_thread():  # only it may handle signals
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
    """Serve until a signal; `ready` is called with the address once the server listens.

    `more` loads further models by name; `loras` are the paths of their adapters.
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
