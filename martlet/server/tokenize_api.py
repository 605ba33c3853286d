"""/tokenize, /detokenize and /v1/explain: text to tokens and back; a request without an answer.

Sources: vLLM's /tokenize and /detokenize. Read `martlet/tokenizer/chat_template.py` next.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.prompts import PromptTokens, tokens_of
from martlet.errors import RequestError
from martlet.server.body import Parsed
from martlet.server.conversation import chat_params, chat_prompt
from martlet.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, prompts_of
from martlet.server.replies import json_reply
from martlet.server.service import Service, service_of


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    service = service_of(request)
    parsed = await service.parse(request, TokenizeRequest, sampling=False)
    body = parsed.body
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    ids = await service.text(lambda: _ids(service, body))
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": service.built.plan.context, "tokens": list(ids)}
    if body.return_token_strs:
        reply["token_strs"] = [service.built.tokenizer.decode([i], skip_special=False) for i in ids]
    if parsed.ignored:
        reply["warnings"] = parsed.warnings
    return json_reply(reply)


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        prompt = service.request_maker.chat_tokens(
            body.messages,
            {
                "tools": body.tools or None,
                "add_generation_prompt": body.add_generation_prompt,
                "continue_final_message": body.continue_final_message,
                "chat_template_kwargs": body.chat_template_kwargs,
            },
        )
        return list(prompt.ids)
    assert body.prompt is not None
    return service.built.tokenizer.encode(
        body.prompt, add_special=body.add_special_tokens, parse_special=body.parse_special
    )


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    service = service_of(request)
    parsed = await service.parse(request, DetokenizeRequest, sampling=False)
    service.check_model(parsed.body.model)
    tokenizer, ids = service.built.tokenizer, tokens_of(parsed.body.tokens, service.built.tokenizer).ids
    text = await service.text(lambda: tokenizer.decode(list(ids), skip_special=parsed.body.skip_special_tokens))
    return json_reply({"prompt": text} | ({"warnings": parsed.warnings} if parsed.ignored else {}))


async def explain(request: Request) -> Response:
    """The engine request that a chat or completion body becomes; nothing is generated."""
    service = service_of(request)
    fields = await service.read(request)
    parsed = service.check(request, fields, ChatRequest if "messages" in fields else CompletionRequest)
    body, params = parsed.body, dict(parsed.params)
    service.check_model(body.model)
    scheduling = service.scheduling(request, body)
    if isinstance(body, ChatRequest):
        params = chat_params(Parsed(body, params))
        prompt = await service.text(lambda: chat_prompt(service, body, scheduling.cache_salt))
    else:
        assert isinstance(body, CompletionRequest)
        prompt = await service.text(lambda: _first(service, body))
    prepared = service.prepare("explain", prompt, params, scheduling)
    return json_reply(_explained(service, prepared, prompt, [*parsed.warnings, *prepared.warnings]))


def _first(service: Service, body: CompletionRequest) -> PromptTokens:
    prompts = prompts_of(body.prompt, "prompt")
    if len(prompts) > 1:
        raise RequestError("Give one prompt to explain.", param="prompt")
    return tokens_of(prompts[0], service.built.tokenizer)


def _explained(service: Service, prepared: Any, prompt: PromptTokens, warnings: list[str]) -> dict[str, Any]:
    built, params = service.built, prepared.request.params
    tokenizer = built.tokenizer
    ids = prepared.request.prompt_ids
    return {
        "prompt": prompt.text if prompt.text is not None else tokenizer.decode(list(ids), skip_special=False),
        "prompt_token_ids": list(ids),
        "n_prompt": len(ids),
        "context": built.plan.context,
        "chat_template": built.template.source if prompt.rendered is not None else None,
        "chat_template_note": built.template.note,
        "stop": list(params.stop),
        "stop_token_ids": sorted({*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eog_ids)}),
        "settings": {s.name: {"value": s.value, "origin": str(s.origin)} for s in prepared.settings},
        "scheduling": {"priority": prepared.request.scheduling.priority},
        "warnings": warnings,
    }
