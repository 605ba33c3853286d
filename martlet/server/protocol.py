"""What the bodies of OpenAI's endpoints may hold (read `asking.py` next, which turns them into requests).

Sampling parameters are not listed here: every field of `SamplingParams` is one, under its own name, and is checked there.
Fields that OpenAI's or vLLM's schema has and that cannot be honoured are in `REFUSED`, with the reason: they are never
ignored. All others that are not known are listed in the reply, or refused with `--strict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from martlet.errors import RequestError
from martlet.server.body import Body

__all__ = [
    "AbortRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "GenerationRequest",
    "LoadAdapterRequest",
    "Prompts",
    "StreamOptions",
    "TokenizeRequest",
    "UnloadAdapterRequest",
    "prompts_of",
    "refuse_unsupported",
]

Prompts = Any  # text, token ids, or a list of them; `prompts_of` checks them, for it can name what is wrong

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "audio": "this model writes text only",
        "function_call": "it is deprecated: give tool_choice",
        "functions": "it is deprecated: give tools",
        "prediction": "predicted outputs are not supported",
        "prompt_embeds": "prompts are text or token ids",
        "suffix": "this server does not fill in the middle: write the model's own fill-in tokens into the prompt",
        "use_beam_search": "beam search is in the offline API only",
        "web_search_options": "this server does not search the web",
    }
)
_HARMLESS: tuple[object, ...] = (None, False, [], {}, "")


class StreamOptions(Body):
    """What a stream sends besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """What all endpoints that generate share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # prefixes are shared between requests of the same user only
    cache_salt: str | None = None  # the same, in place of `user`
    # When it wants to run; times in seconds.
    priority: int | None = None
    ttft_target: float | None = None
    itl_target: float | None = None
    queue_timeout: float | None = None  # it fails if it has not started by then
    timeout: float | None = None  # that it may take in all
    return_timings: bool = True
    return_progress: bool = False  # a stream tells how much of the prompt has been read, while nothing comes yet
    # What the answer is held to; `response_format.py` has the others.
    structured_outputs: dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    grammar: str | None = None
    # Of no effect here, and not worth a warning: they describe what a hosted service keeps and bills.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool = True


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool = False
    response_format: dict[str, Any] | None = None


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class AbortRequest(Body):
    """The body of /abort."""

    request_id: str


class LoadAdapterRequest(Body):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # none: the first model
    load_inplace: bool = False  # a name that is taken gets this adapter


class UnloadAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's, of no use here


def prompts_of(given: object, param: str) -> list[str | list[int]]:
    """One prompt or several, as a list; RequestError if there is none, or one that is empty or of a wrong type."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    prompts: list[Any] = given if several and isinstance(given, list) else [given]
    for number, prompt in enumerate(prompts):
        name = f"{param}[{number}]" if several else param
        ids = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
        if not isinstance(prompt, str) and not ids:
            raise RequestError(f"{name} is neither text nor a list of token ids.", param=name, code="invalid_type")
        if not prompt:
            raise RequestError(f"{name} is empty; give at least one token.", param=name)
    return prompts


def refuse_unsupported(body: GenerationRequest) -> None:
    """RequestError for a field that is known and cannot be honoured, where it asks for anything."""
    if body.return_progress and not body.stream:
        raise RequestError("return_progress is for streams; give stream too.", param="return_progress")
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value not in _HARMLESS:
            raise RequestError(f"{name} is not supported: {REFUSED[name]}.", param=name, code="unsupported_parameter")
