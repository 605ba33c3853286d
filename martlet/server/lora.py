"""Adapters of a running server: loaded and let go of without a pause, under names that requests give as "model".

Paths and fields as vLLM has them. They name files of the server's machine, so an operator has to allow them
(`--allow-lora-updates`). Read `models/lora.py` for what an adapter is, `registry.py` for how a request finds it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from martlet.server.error_replies import ApiError
from martlet.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from martlet.server.registry import registry_of
from martlet.server.replies import json_reply
from martlet.server.service import service_of

__all__ = ["load_lora_adapter", "unload_lora_adapter"]


async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter for the first model, or for `base_model_name`."""
    _check_allowed(request)
    parsed = await service_of(request).parse(request, LoadAdapterRequest, sampling=False)
    body = parsed.body
    await registry_of(request).add_adapter(
        request, body.lora_name, body.lora_path, body.base_model_name, body.load_inplace
    )
    return json_reply({"status": "loaded", "lora_name": body.lora_name})


async def unload_lora_adapter(request: Request) -> Response:
    """Take no more requests with an adapter; those that run keep it to their end."""
    _check_allowed(request)
    parsed = await service_of(request).parse(request, UnloadAdapterRequest, sampling=False)
    await registry_of(request).remove_adapter(parsed.body.lora_name)
    return json_reply({"status": "unloaded", "lora_name": parsed.body.lora_name})


def _check_allowed(request: Request) -> None:
    if not registry_of(request).settings.allow_lora_updates:
        raise ApiError(
            403, "Adapters may not be changed here; start the server with --allow-lora-updates.", code="not_allowed"
        )
