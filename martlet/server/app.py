"""The server's routes (read `service.py` next, which they share, then `chat_api.py`).

    gate.py → a route here → registry.py (which model) → body.py, protocol.py → service.py
            → bridge.py → engine … → sse.py or replies.py

It uses Starlette, the base of FastAPI, and not FastAPI: bodies are read with limits and errors of
our own, so FastAPI would add only 0.25 s of import time to a start of about one second.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from martlet.errors import MartletError
from martlet.server.chat_api import chat_completions
from martlet.server.completions_api import completions
from martlet.server.embeddings_api import embeddings
from martlet.server.error_replies import ApiError, api_error, error_response
from martlet.server.gate import Gate
from martlet.server.health import abort, health, metrics, model, models, ready, version
from martlet.server.messages_api import count_tokens, messages
from martlet.server.mini import MINI_ROUTES
from martlet.server.registry import Registry, for_model, load_lora_adapter, unload_lora_adapter
from martlet.server.responses_api import responses
from martlet.server.tokenize_api import detokenize, explain, tokenize
from martlet.server.web import WEB_ROUTES

logger = logging.getLogger("martlet.server")


async def _openapi(request: Request) -> Response:
    from martlet.server.openapi import openapi  # imported here: no other route needs it

    return await openapi(request)


ROUTES = (
    Route("/v1/chat/completions", for_model(chat_completions), methods=["POST"]),
    Route("/v1/completions", for_model(completions), methods=["POST"]),
    Route("/v1/responses", for_model(responses), methods=["POST"]),
    Route("/v1/messages", for_model(messages), methods=["POST"]),
    Route("/v1/messages/count_tokens", for_model(count_tokens), methods=["POST"]),
    Route("/v1/embeddings", for_model(embeddings), methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/v1/explain", for_model(explain), methods=["POST"]),
    Route("/tokenize", for_model(tokenize), methods=["POST"]),
    Route("/detokenize", for_model(detokenize), methods=["POST"]),
    Route("/abort", abort, methods=["POST"]),
    Route("/health", health),
    Route("/ready", ready),
    Route("/version", version),
    Route("/metrics", metrics),
    Route("/openapi.json", _openapi),
)


def create_app(registry: Registry) -> ASGIApp:
    """The ASGI application; its lifespan starts the engines' threads and closes the models."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        registry.start()
        try:
            yield
        finally:
            registry.close()

    app = Starlette(
        routes=(*ROUTES, *((*WEB_ROUTES, *MINI_ROUTES) if registry.settings.web else ())),
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, MartletError: _our_error, Exception: _our_error},
    )
    app.state.registry = registry
    return Gate(app, registry.settings)


async def _our_error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {
        404: f"There is no route {path!r:.200}.",
        405: f"The route {path!r:.200} does not take {request.method}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})), path)
