"""Turns a conversation into an engine request: the code that all chat APIs share.

OpenAI's chat completions arrive here as they are. Its responses and Anthropic's messages are
converted to that format first. Read `tools/reply.py` next, which parses the answer.
"""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from martlet.engine.prompts import ChatOptions, PromptTokens
from martlet.errors import RequestError
from martlet.server.body import Parsed, parse_body
from martlet.server.bridge import Ticket
from martlet.server.protocol import ChatRequest, refuse_unsupported
from martlet.server.response_format import asked_structure, asked_tools, check_tools, joined, reasoned
from martlet.server.service import Service, service_of
from martlet.server.tools.parts import Parser

REASONING_LOST = (
    "The reasoning of an earlier answer is not in this prompt (the template leaves it out, or the client has): {:,} tokens"
    " had to be computed again."
)


@dataclass(frozen=True, slots=True)
class OpenChat:
    """A conversation that the engine answers."""

    ticket: Ticket
    parsers: list[Parser]  # one for each of the n answers
    request_warnings: list[str]

    @property
    def warnings(self) -> list[str]:
        """Warnings for the client; once it ran also of reasoning that left the cached prefix."""
        reports = [output.cache for output in self.ticket.outputs]
        lost = [REASONING_LOST.format(r.n_prompt - r.n_cached) for r in reports if r is not None and r.lacks_reasoning]
        return [*self.request_warnings, *lost]


async def open_chat(request: Request, parsed: Parsed[ChatRequest], reply_id: str, warnings: list[str]) -> OpenChat:
    """Submit a conversation to the engine.

    Raises RequestError or ApiError for a request that is wrong or cannot be accepted now.
    """
    service, body = service_of(request), parsed.body
    service.check_model(body.model)
    params, scheduling = chat_params(parsed), service.scheduling(request, body)
    prompt = await service.text(lambda: chat_prompt(service, body, scheduling.cache_salt))
    with_tools = bool(body.tools) and body.tool_choice != "none"
    if with_tools or service.marks_are_special:
        params.setdefault("skip_special_tokens", False)  # special tokens may mark a call or reasoning
    if body.max_completion_tokens is not None and parsed.params.get("max_tokens") not in (None, params["max_tokens"]):
        warnings = [*warnings, "max_tokens differs from max_completion_tokens and was ignored."]
    warnings = [*warnings, *(await _set_structure(service, body, params, prompt))]
    prepared = service.prepare(reply_id, prompt, params, scheduling)
    n = prepared.request.params.n
    if body.stream and (prepared.request.params.best_of or 1) > n:
        raise RequestError("A stream cannot have best_of > n: the best are known at the end.", param="best_of")
    ticket = await service.submit(request, reply_id, [prepared], streams=body.stream, timeout_s=body.timeout)
    parsers = [service.reply_parser(prompt, body.tools or () if with_tools else ()) for _ in range(n)]
    return OpenChat(ticket, parsers, [*warnings, *prepared.warnings])


def as_chat(given: dict[str, Any]) -> ChatRequest:
    """A chat request made of another API's fields; None means "not given"."""
    return parse_body({k: v for k, v in given.items() if v is not None}, ChatRequest, strict=True).body


def chat_params(parsed: Parsed[ChatRequest]) -> dict[str, Any]:
    """The sampling parameters of a chat request; RequestError for unsupported fields."""
    body, params = parsed.body, dict(parsed.params)
    refuse_unsupported(body)
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    params.pop("logprobs", None)
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    if body.modalities not in (None, [], ["text"]):
        raise RequestError("modalities: this model writes text only.", param="modalities", code="unsupported_parameter")
    return params


async def _set_structure(
    service: Service, body: ChatRequest, params: dict[str, Any], prompt: PromptTokens
) -> list[str]:
    """Compile the answer's response format and tools into `params`; return warnings."""
    warnings: list[str] = []
    structure, field = asked_structure(body, params)
    calls, must = asked_tools(body, service.tools)
    if calls is not None and not must:
        try:
            await service.compile_structure(calls, "tools")
        except RequestError as error:
            warnings.append(f"Calls are not held to the tools' schemas: {error}")
            calls = None
    combined = joined(structure, calls)
    if combined is not None:
        combined = reasoned(combined, service.reasoning, (prompt.text or "")[-100:])
        params["structured"] = await service.compile_structure(combined, field or "tools")
    return warnings


def chat_options(service: Service, body: ChatRequest, salt: str) -> ChatOptions:
    """The chat template's inputs; RequestError for wrong tools or a template not allowed here."""
    check_tools(body.tools or ())
    if body.chat_template is not None and not service.settings.request_templates:
        raise RequestError(
            "chat_template: this server takes no templates from requests; start it with --request-templates.",
            param="chat_template",
            code="unsupported_parameter",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return {
        "tools": None if body.tool_choice == "none" else body.tools or None,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template": body.chat_template,
        "chat_template_kwargs": variables or None,
        "cache_salt": salt or None,
    }


def chat_prompt(service: Service, body: ChatRequest, salt: str) -> PromptTokens:
    """The conversation as a prompt, rendered by the chat template."""
    return service.request_maker.chat_tokens(body.messages, chat_options(service, body, salt))
