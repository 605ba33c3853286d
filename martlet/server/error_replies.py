"""Error responses of OpenAI's and Anthropic's APIs, which name the field (read `body.py` next).

Formats: https://platform.openai.com/docs/guides/error-codes and
https://docs.anthropic.com/en/api/errors
"""

import math
from typing import Any

import orjson
from starlette.responses import Response

from martlet.errors import CapacityError, MartletError, RequestError, UnsupportedError

MAX_MESSAGE = 2000  # characters: an error never repeats a request
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 499: "api_error", 503: "overloaded_error"}


class ApiError(MartletError):
    """An error response: its HTTP status, message, field and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}
        super().__init__(message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " …")


def api_error(error: Exception) -> ApiError:
    """The error response for an exception.

    The messages of Martlet's own exceptions go to the client; those of others only to the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), code="unsupported")
    if isinstance(error, CapacityError):
        wait = error.retry_after_s
        headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}
        return ApiError(503, str(error), code="overloaded", headers=headers)
    if isinstance(error, MartletError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "The server failed on this request; its log says more.", code="internal_error")


def openai_error(error: ApiError) -> dict[str, Any]:
    """An error's body in OpenAI's format."""
    error_type = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": error_type, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error's body in Anthropic's format."""
    error_type = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": error_type, "message": str(error)}}


def error_response(error: ApiError, path: str = "") -> Response:
    """The response in the format of the path's API."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else openai_error(error)
    return Response(orjson.dumps(body), error.status, headers=error.headers, media_type="application/json")
