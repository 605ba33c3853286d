"""An operator's routes: health, readiness, version, models, metrics, and aborting a request.

Read `bridge.py` next, which knows the state of the engine's thread.
"""

import asyncio
import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.prompts import PromptTokens
from martlet.errors import MartletError
from martlet.server.error_replies import ApiError
from martlet.server.prometheus import exposition
from martlet.server.protocol import AbortRequest
from martlet.server.registry import Entry, Registry, registry_of
from martlet.server.replies import json_reply
from martlet.server.service import Service, service_of
from martlet.types import Scheduling

DEEP_S = 10.0  # limit for the one token of a deep check


async def health(request: Request) -> Response:
    """200 while the server works, 503 if only a restart helps."""
    errors = [service.bridge.error for service in registry_of(request).services]
    trouble = next((error for error in errors if error is not None), None)
    return json_reply(
        {"status": "ok" if trouble is None else "failed", "trouble": trouble}, 200 if trouble is None else 503
    )


async def ready(request: Request) -> Response:
    """200 if a request would be answered; `?deep=1` decodes a token. A full queue is ready."""
    registry = registry_of(request)
    trouble = "the server shuts down" if registry.draining else None
    deep, open_ = request.query_params.get("deep") in ("1", "true"), 0
    for service in registry.services:
        open_ += len(service.bridge.open_tickets)
        if trouble is None and deep:
            trouble = await _deep_trouble(service)
        if trouble is None:
            trouble = service.bridge.trouble(service.settings.heartbeat_s)
    return json_reply({"ready": trouble is None, "trouble": trouble, "open": open_}, 200 if trouble is None else 503)


async def _deep_trouble(service: Service) -> str | None:
    """Decode one token, ahead of all requests; the reason if that fails."""
    tokenizer = service.built.tokenizer
    prompt = PromptTokens(tokenizer.encode("a") or [0])
    params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    prepared = service.request_maker.asked(f"ready-{uuid.uuid4().hex}", prompt, params, Scheduling(priority=-(1 << 30)))
    try:
        async with asyncio.timeout(DEEP_S):
            ticket = await service.bridge.submit(prepared.request.request_id, [prepared])
            try:
                [output] = await ticket.result()
            finally:
                ticket.cancel()
    except TimeoutError:
        return f"no token within {DEEP_S:g} s"
    except MartletError as error:
        return str(error)
    return output.error


async def version(request: Request) -> Response:
    """The version of Martlet."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("martlet")
    except PackageNotFoundError:
        installed = "unknown"
    return json_reply({"version": installed})


async def models(request: Request) -> Response:
    """The models and adapters of this server; the default model comes first."""
    registry = registry_of(request)
    entries = registry.entries.values()
    data = [_model(registry, entry) for entry in entries]
    data += [_adapter(registry, entry, name) for entry in entries for name in entry.adapters]
    return json_reply({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """One model."""
    registry = registry_of(request)
    entry, adapter = registry.find(request.path_params["name"])
    return json_reply(_adapter(registry, entry, adapter) if adapter else _model(registry, entry))


def _adapter(registry: Registry, entry: Entry, name: str) -> dict[str, object]:
    return {**_model(registry, entry), "id": name, "root": entry.adapters[name], "parent": entry.name}


def _model(registry: Registry, entry: Entry) -> dict[str, object]:
    service = entry.service
    about = {"id": entry.name, "object": "model", "created": registry.started, "owned_by": "martlet"}
    if service is None:  # the other facts are known once it is loaded
        return {**about, "loaded": False}
    built = service.built
    return {
        **about,
        "loaded": True,
        "max_model_len": built.plan.context,
        "architecture": built.spec.family,
        "vocab_size": built.spec.vocab,
        "chat_template": built.template.note or "the model's own",
        "warnings": list(built.warnings),
    }


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    registry = registry_of(request)
    text = exposition(registry.model_metrics, registry.settings.metrics_prefix)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def abort(request: Request) -> Response:
    """Abort a request by the id of its reply; its client gets the tokens so far."""
    service = service_of(request)
    parsed = await service.parse(request, AbortRequest, sampling=False)
    tickets = (each.bridge.find(parsed.body.request_id) for each in registry_of(request).services)
    ticket = next((ticket for ticket in tickets if ticket is not None), None)
    if ticket is None:
        raise ApiError(404, "There is no open request with this id.", param="request_id", code="request_not_found")
    ticket.cancel()
    return json_reply({"aborted": ticket.ticket_id, "at": int(time.time())})
