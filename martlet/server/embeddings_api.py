"""/v1/embeddings: the mean hidden state of each input, scaled to length 1.

Read `rates.py` next, which bounds the tokens of a caller.
Format: https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.prompts import tokens_of
from martlet.errors import RequestError
from martlet.server.error_replies import ApiError
from martlet.server.protocol import EmbeddingRequest, prompts_of
from martlet.server.rates import Account
from martlet.server.replies import json_reply
from martlet.server.service import service_of

MAX_INPUTS = 2048  # OpenAI's own limit


async def embeddings(request: Request) -> Response:
    """Embed one input or several."""
    service = service_of(request)
    parsed = await service.parse(request, EmbeddingRequest, sampling=False)
    body = parsed.body
    service.check_model(body.model)
    if service.adapter:
        raise RequestError(f"{service.model!r} is an adapter; embeddings are of its base model.", param="model")
    if body.dimensions is not None and body.dimensions != service.built.spec.hidden:
        raise RequestError(
            f"dimensions is {body.dimensions}; this model's embeddings have {service.built.spec.hidden} and cannot be"
            " shortened.",
            param="dimensions",
            code="unsupported_parameter",
        )
    inputs = prompts_of(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"input has {len(inputs):,} entries; the limit is {MAX_INPUTS:,}.", param="input")
    tokenizer = service.built.tokenizer
    prompts = await service.text(lambda: [list(tokens_of(entry, tokenizer).ids) for entry in inputs])
    limit = service.built.plan.context
    for number, ids in enumerate(prompts):
        if not 1 <= len(ids) <= limit:
            raise RequestError(f"input[{number}] has {len(ids):,} tokens; expected 1 to {limit:,}.", param="input")
    count, used = sum(map(len, prompts)), 0
    account: Account | None = request.scope.get("martlet.account")
    refund = account.take_tokens(count) if account is not None else None
    data = []
    try:
        for number, ids in enumerate(prompts):
            if service.draining:
                raise ApiError(503, "The server shuts down.", code="shutting_down")
            vector = _normalised(await service.bridge.embed(ids))
            used += len(ids)
            data.append({"object": "embedding", "index": number, "embedding": _written(vector, body.encoding_format)})
    finally:
        if refund is not None:
            refund(used)
    reply = {
        "object": "list",
        "data": data,
        "model": service.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    return json_reply(reply | ({"warnings": parsed.warnings} if parsed.ignored else {}))


def _normalised(mean: NDArray[np.float32]) -> NDArray[np.float32]:
    length = float(np.linalg.norm(mean.astype(np.float64)))
    return mean if length == 0.0 else (mean / length).astype(np.float32)


def _written(vector: NDArray[np.float32], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float64).tolist()
