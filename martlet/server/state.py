"""What an operator asks: health, readiness, versions, models, metrics, and ending a request (read `bridge.py` for how it is known)."""

from __future__ import annotations

import asyncio
import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.prompts import PromptTokens
from martlet.errors import MartletError
from martlet.server.errors import ApiError
from martlet.server.measures import exposition
from martlet.server.protocol import AbortRequest
from martlet.server.replies import json_reply
from martlet.server.service import Service, service_of
from martlet.types import Scheduling

__all__ = ["abort", "health", "metrics", "model", "models", "ready", "version"]

DEEP_S = 10.0  # for the one token of a deep check


async def health(request: Request) -> Response:
    """200 while the process can be of use, 503 when only a restart helps."""
    trouble = service_of(request).bridge.error
    return json_reply(
        {"status": "ok" if trouble is None else "failed", "trouble": trouble}, 200 if trouble is None else 503
    )


async def ready(request: Request) -> Response:
    """200 if a request would be answered now; with deep=1, one has been. Busy is not dead: a full queue is ready."""
    service = service_of(request)
    trouble = "the server shuts down" if service.draining else None
    if trouble is None and request.query_params.get("deep") in ("1", "true"):
        trouble = await _deep_trouble(service)
    if trouble is None:
        trouble = service.bridge.trouble(service.settings.heartbeat_s)
    open_ = len(service.bridge.open_tickets)
    return json_reply({"ready": trouble is None, "trouble": trouble, "open": open_}, 200 if trouble is None else 503)


async def _deep_trouble(service: Service) -> str | None:
    """Decode one token, ahead of everybody; why that failed, if it did."""
    tokenizer = service.built.tokenizer
    prompt = PromptTokens(tokenizer.encode("a") or [0])
    params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    asked = service.asker.asked(f"ready-{uuid.uuid4().hex}", prompt, params, Scheduling(priority=-(1 << 30)))
    try:
        async with asyncio.timeout(DEEP_S):
            ticket = await service.bridge.submit(asked.request.request_id, [asked])
            try:
                [output] = await ticket.result()
            finally:
                ticket.cancel()
    except TimeoutError:
        return f"no token came within {DEEP_S:g} s"
    except MartletError as error:
        return str(error)
    return output.error


async def version(request: Request) -> Response:
    """The version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("martlet")
    except PackageNotFoundError:
        found = "unknown"
    return json_reply({"version": found})


async def models(request: Request) -> Response:
    """The model that is here."""
    service = service_of(request)
    return json_reply({"object": "list", "data": [_model(service)]})


async def model(request: Request) -> Response:
    """One model."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return json_reply(_model(service))


def _model(service: Service) -> dict[str, object]:
    built = service.built
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "martlet",
        "max_model_len": built.plan.context,
        "architecture": built.spec.family,
        "vocab_size": built.spec.vocab,
        "chat_template": built.template.note or "the model's own",
        "warnings": list(built.warnings),
    }


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service = service_of(request)
    text = exposition(service.measures, service.built.engine, service.settings.metrics_prefix)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def abort(request: Request) -> Response:
    """End a request by the id of its reply; of what was generated its reader still gets what was there."""
    service = service_of(request)
    parsed = await service.parse(request, AbortRequest, sampling=False)
    ticket = service.bridge.find(parsed.body.request_id)
    if ticket is None:
        raise ApiError(404, "There is no open request of that id.", param="request_id", code="request_not_found")
    ticket.cancel()
    return json_reply({"aborted": ticket.ticket_id, "at": int(time.time())})
