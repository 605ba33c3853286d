"""The checks before every route: origin, API key, rate limit; and the access log.

    Host and Origin (browsers) → CORS preflight → API key → rate → the route → response headers

Every web page that a user opens can reach a server on loopback. So the gate refuses pages of
another origin unless `--cors-origin` names it, and host names that are not this machine's (DNS
rebinding). It is plain ASGI and buffers nothing. Read `app.py` next, which has the routes.
"""

import hmac
import ipaddress
import logging
import time
import uuid
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from martlet.server.error_replies import ApiError, error_response
from martlet.server.rates import RATE_HEADERS, Account, Rates
from martlet.server.settings import ServerSettings

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/", "/engine", "/mini", "/mini/"))  # probes and pages
OPEN_FOLDER = "/static/"  # the pages' files, which have no secrets
logger = logging.getLogger("martlet.server.access")


class Gate:
    """The outermost application."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        limited = settings.requests_per_minute is not None or settings.tokens_per_minute is not None
        self._rates = Rates(settings) if limited else None
        self._loopback = settings.unix_socket is None and _is_local(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to its route, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, headers = time.perf_counter(), Headers(scope=scope)
        allowed = self._cors(headers)
        shown = {"X-Request-Id": headers.get("x-request-id", "")[:64] or uuid.uuid4().hex, **allowed}
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                account: Account | None = scope.get("martlet.account")
                for name, value in (shown | (account.headers() if account is not None else {})).items():
                    response_headers[name] = value
                if scope.get("martlet.ignored"):
                    response_headers["X-Martlet-Ignored"] = ", ".join(map(_header_safe, scope["martlet.ignored"]))[
                        :1000
                    ]
            await send(message)

        try:
            refusal = self._refusal(scope, headers, allowed)
            if refusal is not None:
                await refusal(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            if (lease := scope.get("martlet.lease")) is not None:
                lease.release()
            if self._settings.log_requests:
                self._log(scope, status, time.perf_counter() - start, shown["X-Request-Id"])

    def _cors(self, headers: Headers) -> dict[str, str]:
        """The CORS headers for an allowed origin; none for another."""
        origin, origins = headers.get("origin"), self._settings.cors_origins
        if origin is None or not ("*" in origins or origin in origins):
            return {}
        exposed = ", ".join(
            ("X-Request-Id", "X-Martlet-Ignored", "Retry-After", *(RATE_HEADERS if self._rates else ()))
        )
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": exposed}

    def _refusal(self, scope: Scope, headers: Headers, allowed: dict[str, str]) -> Response | None:
        try:
            self._check_browser(headers, allowed)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return _preflight(headers)
            caller = self._caller(scope, headers)
            scope["martlet.caller"] = caller
            if self._rates is not None and not _is_open(scope["path"]):
                account = self._rates.account(caller or (scope.get("client") or ("local",))[0])
                scope["martlet.account"] = account  # the route takes tokens from it
                account.take_request()
        except ApiError as error:
            return error_response(error, scope["path"])
        return None

    def _check_browser(self, headers: Headers, allowed: dict[str, str]) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not self._settings.api_keys and host and not _is_local(_name_of(host)):
            raise ApiError(
                403, f"This server serves this machine only; {host!r:.100} is not its name.", code="unknown_host"
            )
        if origin is not None and not allowed and urlsplit(origin).netloc != host:
            raise ApiError(
                403,
                f"Pages of {origin!r:.100} may not use this server; start it with --cors-origin to allow it.",
                code="origin_not_allowed",
            )

    def _caller(self, scope: Scope, headers: Headers) -> str:
        """The caller's API key as `key-NUMBER`; "" if the server has no keys. ApiError 401."""
        keys = self._settings.api_keys
        if not keys or _is_open(scope["path"]):
            return ""
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        given = headers.get("x-api-key", "").strip() or (token.strip() if scheme.lower() == "bearer" else "")
        match = -1
        for number, key in enumerate(keys):  # always all keys, each in constant time
            if hmac.compare_digest(key.encode(), given.encode("utf-8", "replace")):
                match = number
        if match < 0:
            raise ApiError(
                401,
                "The API key is missing or wrong: send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key-{match}"

    def _log(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        method, path = scope["method"], scope["path"][:200]
        if self._settings.log_json:
            line = {"time": time.time(), "method": method, "path": path, "status": status, "ms": round(1000 * seconds, 1),
                    "request_id": request_id, "caller": scope.get("martlet.caller", "")}  # fmt: skip
            logger.info("%s", orjson.dumps(line).decode())
        else:
            logger.info("%s %s %d %.0f ms %s", method, path.encode("unicode_escape").decode(), status,
                        1000 * seconds, _header_safe(request_id))  # fmt: skip


def _preflight(headers: Headers) -> Response:
    """The answer to a CORS preflight, which carries no API key."""
    if "access-control-request-method" not in headers or "origin" not in headers:
        return Response(status_code=400)
    wanted = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    return Response(status_code=204, headers=allowed)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _name_of(host: str) -> str:
    return urlsplit(f"//{host}").hostname or ""


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _header_safe(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in text)[:100]
