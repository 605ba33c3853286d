"""The pages: the chat at /, the live view at /engine, and its stream of events.

The pages are static files without secrets and need no API key. Their requests to the API do need
one, so the pages ask the user for it. They load nothing from other hosts. Their policy (CSP) lets
only these files' scripts run, even if a model's answer contains a script. Read `static/chat.js` and
`live_view.py` next.
"""

import asyncio
import hashlib
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from martlet.server.error_replies import ApiError
from martlet.server.registry import registry_of
from martlet.server.service import Service, left, service_of
from martlet.server.sse import KEEP_ALIVE

FOLDER = Path(__file__).parent / "static"
TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",  # text cannot become markup
    )
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # revalidated each time; an unchanged file is answered with 304
    }
)


async def chat_page(request: Request) -> Response:
    """The chat page."""
    return _file(request, "chat.html")


async def engine_page(request: Request) -> Response:
    """The page with the live view of the engine."""
    return _file(request, "engine.html")


async def static_file(request: Request) -> Response:
    """A script, style sheet or image of the pages."""
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    if name not in _names():
        raise ApiError(404, f"There is no page {name!r:.100}.")
    data, tag = _read(name)
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=TYPES[Path(name).suffix])


@lru_cache(1)
def _names() -> frozenset[str]:
    """The files that clients may request, by name only."""
    return frozenset(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)


@lru_cache(64)
def _read(name: str) -> tuple[bytes, str]:
    data = (FOLDER / name).read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


class _ViewStream(Response):
    """The engine's frames, for one viewer."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, service: Service) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._service = request, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the viewer leaves, does not read, or the server ends."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(left(self._request))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._service.view.leave()
            for task in (writing, leaving):
                task.cancel()
            ended = await asyncio.gather(writing, leaving, return_exceptions=True)
        if None in ended:  # else the viewer does not read: uvicorn closes the unfinished connection
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        settings, view = self._service.settings, self._service.view

        async def write(data: bytes) -> None:
            async with asyncio.timeout(settings.send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write(b"event: hello\ndata: " + view.hello(self._service.model) + b"\n\n")
        seen = b""
        while (frame := await view.next_frame(seen, settings.keep_alive_s)) is not None:
            await write(b"event: frame\ndata: " + frame + b"\n\n" if frame else KEEP_ALIVE)
            seen = frame or seen


async def engine_events(request: Request) -> Response:
    """The engine's pages, prefixes, queue and steps as server-sent events."""
    name = request.query_params.get("model")
    service = registry_of(request).find(name)[0].service if name else service_of(request)
    if service is None:
        raise ApiError(503, f"The model {name!r:.200} is not loaded; only a request loads it.")
    service.view.enter()
    return _ViewStream(request, service)


WEB_ROUTES = (
    Route("/", chat_page, include_in_schema=False),
    Route("/engine", engine_page, include_in_schema=False),
    Route("/engine/events", engine_events, include_in_schema=False),
    Route("/static/{name}", static_file, include_in_schema=False),
)
