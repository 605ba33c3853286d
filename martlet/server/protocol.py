"""The request bodies of OpenAI's and vLLM's endpoints (read `conversation.py` next).

Sampling parameters are not listed here: a body takes every field of `SamplingParams`, which checks
them. `REFUSED` lists fields of OpenAI's and vLLM's schemas that Martlet cannot support, with the
reason; they are never ignored. The reply lists other unknown fields; `--strict` refuses them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from martlet.errors import RequestError
from martlet.server.body import Body

Prompts = Any  # text, token ids, or a list of them; `prompts_of` checks it with better messages

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
    """What a stream sends beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """The fields that all generating endpoints share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # only requests of the same user share cached prefixes
    cache_salt: str | None = None  # the same; overrides `user`
    # Scheduling; times in seconds.
    priority: int | None = None
    ttft_target: float | None = None
    itl_target: float | None = None
    queue_timeout: float | None = None  # fail if it has not started by then
    timeout: float | None = None  # for the whole request
    return_timings: bool = True
    return_progress: bool = False  # a stream reports the prompt's progress until the first token
    # The answer's format; see `response_format.py`.
    structured_outputs: dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    grammar: str | None = None
    # Accepted without effect or warning: they concern a hosted service's storage and billing.
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
    base_model_name: str | None = None  # None: the first model
    load_inplace: bool = False  # replace an adapter of the same name


class UnloadAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; without effect


def prompts_of(given: object, param: str) -> list[str | list[int]]:
    """One prompt or several, as a list; RequestError for an empty prompt or a wrong type."""
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
    """RequestError for a known field that is not supported, unless its value asks for nothing."""
    if body.return_progress and not body.stream:
        raise RequestError("return_progress works only in a stream; set stream too.", param="return_progress")
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value not in _HARMLESS:
            raise RequestError(f"{name} is not supported: {REFUSED[name]}.", param=name, code="unsupported_parameter")
