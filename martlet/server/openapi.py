"""The server's OpenAPI document (read `app.py` for the routes).

It is generated on request: the bodies' schemas come from the models that check them, and the
sampling parameters from `SamplingParams`. Format: https://spec.openapis.org/oas/v3.1.0
"""

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from martlet.sampling_params import SamplingParams
from martlet.server.body import SAMPLING_FIELDS, Body
from martlet.server.messages_api import MessagesRequest
from martlet.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from martlet.server.replies import json_reply
from martlet.server.responses_api import ResponsesRequest

_BODIES: tuple[tuple[str, type[Body], bool], ...] = (  # path, model, with sampling parameters
    ("/v1/chat/completions", ChatRequest, True),
    ("/v1/completions", CompletionRequest, True),
    ("/v1/responses", ResponsesRequest, True),
    ("/v1/messages", MessagesRequest, True),
    ("/v1/messages/count_tokens", MessagesRequest, True),
    ("/v1/explain", ChatRequest, True),
    ("/v1/embeddings", EmbeddingRequest, False),
    ("/tokenize", TokenizeRequest, False),
    ("/detokenize", DetokenizeRequest, False),
    ("/abort", AbortRequest, False),
    ("/v1/load_lora_adapter", LoadAdapterRequest, False),
    ("/v1/unload_lora_adapter", UnloadAdapterRequest, False),
)


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]
    return json_reply(description(routes))


def description(routes: list[Route]) -> dict[str, Any]:
    """An OpenAPI document."""
    models = list(dict.fromkeys(model for _, model, _ in _BODIES))
    refs, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    sampling = {"type": "object", "properties": _sampling()}
    components = {**schemas.get("$defs", {}), "SamplingParams": sampling}
    bodies = {path: (refs[model, "validation"], has) for path, model, has in _BODIES}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Martlet", "version": "1", "description": "See docs/server.md."},
        "paths": {_path(route): _operations(route, bodies.get(route.path)) for route in routes},
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _path(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _operations(route: Route, body: tuple[Any, bool] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").partition("\n")[0],
        "operationId": route.endpoint.__name__,
        "responses": {"200": {"description": "The answer."}, "default": {"description": "An error."}},
    }
    if "{" in route.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        schema, has_sampling = body
        if has_sampling:
            schema = {"allOf": [schema, {"$ref": "#/components/schemas/SamplingParams"}]}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {("get" if body is None else "post"): operation}


def _sampling() -> dict[str, Any]:
    """The schema of each sampling parameter; null means its default."""
    hints = get_type_hints(SamplingParams)
    names = [field.name for field in fields(SamplingParams) if field.name in SAMPLING_FIELDS]
    # Chat completions have a boolean `logprobs`, and the number as `top_logprobs`.
    return {name: TypeAdapter(hints[name] | None).json_schema() for name in names if name != "logprobs"}
