"""Prompts: text, token ids or a conversation, checked before anything runs (read `llm.py` next)."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from martlet.errors import RequestError, nearest
from martlet.sampling_params import SamplingParams
from martlet.tokenizer.chat_template import RenderedChat
from martlet.tokenizer.tokenizer import Tokenizer

# Text, token ids, or a mapping with "prompt", "prompt_token_ids" or both, and perhaps "cache_salt".
Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt's ids, its text if known, and its rendering if it is a conversation."""

    ids: Sequence[int]
    text: str | None = None
    rendered: RenderedChat | None = None
    cache_salt: str = ""
    warnings: tuple[str, ...] = ()


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt. None is "not given"."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """A conversation or several, as a list of conversations; RequestError for another type."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages is of type {type(messages).__name__}; expected a list.", param="messages")
    return [messages] if not messages or isinstance(messages[0], Mapping) else messages  # type: ignore[list-item, return-value]


def check_chat_options(options: ChatOptions) -> None:
    """Raise RequestError, naming the option, for one that does not exist or has a wrong value."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise RequestError(f"There is no option {name!r}.{nearest(name, ChatOptions.__annotations__)}", param=name)
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(options.get(name), bool | None):
            raise RequestError(f"{name} is {options.get(name)!r}; expected True or False.", param=name)
    if options.get("cache_salt") is not None:
        _salt(options["cache_salt"])
    template, variables = options.get("chat_template"), options.get("chat_template_kwargs")
    if template is not None and (not isinstance(template, str) or not template):
        raise RequestError(
            f"chat_template is {template!r}; expected the text of a template, or None for the model's own.",
            param="chat_template",
        )
    if variables is None:
        return
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError("chat_template_kwargs is not a mapping of names to values.", param="chat_template_kwargs")
    taken = sorted(variables.keys() & ({"self", "messages"} | ChatOptions.__annotations__.keys()))
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {taken[0]!r}, which has a parameter of its own.", param="chat_template_kwargs"
        )


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A prompt or several, as a list. A list of whole numbers is a single prompt.

    Raises RequestError for another type.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a string, a mapping, token ids, or a list of them.",
            param="prompts",
        )
    if prompts and all(isinstance(entry, int | np.integer) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> PromptTokens:
    """A prompt's ids, and its text if known; where both are given the ids count.

    Raises RequestError for unknown keys, other types, and ids that the vocabulary does not have.
    """
    if isinstance(prompt, str):
        return PromptTokens(tokenizer.encode(prompt), prompt)
    if not isinstance(prompt, Mapping):
        return PromptTokens(_checked_ids(prompt, tokenizer.vocab_size))
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown or (text is None and ids is None):
        raise RequestError(
            f"A prompt given as a mapping has the keys {sorted(map(str, prompt))}; expected prompt, prompt_token_ids,"
            " or both, and cache_salt if wanted.",
            param="prompt",
        )
    salt = "" if prompt.get("cache_salt") is None else _salt(prompt["cache_salt"])
    text = None if text is None else _text(text)
    if ids is None:
        assert text is not None
        return PromptTokens(tokenizer.encode(text), text, cache_salt=salt)
    return PromptTokens(_checked_ids(ids, tokenizer.vocab_size), text, cache_salt=salt)


def one_each(name: str, given: Any, single: type | tuple[type, ...], count: int) -> Sequence[Any]:
    """An option's value for each prompt, from a value for all (None or a `single`) or a list.

    Raises RequestError for another type, and for a list of another length.
    """
    if given is None or isinstance(given, single):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"{name} is of type {type(given).__name__}; expected one for all or a list.", param=name)
    if len(given) != count:
        raise RequestError(f"There are {len(given)} {name} for {count} prompts.", param=name)
    return given


def _salt(salt: object) -> str:
    if not isinstance(salt, str) or not salt:
        raise RequestError(
            f"cache_salt is {salt!r}; expected a text that is not empty. Leave it out to share cached prefixes.",
            param="cache_salt",
        )
    return salt


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"prompt is of type {type(text).__name__}; expected a string.", param="prompt")
    return text


def _checked_ids(ids: object, vocab: int) -> list[int]:
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError(
            f"A prompt is of type {type(ids).__name__}; expected a string or a list of token ids.", param="prompt"
        )
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab:
            raise RequestError(
                f"The prompt has the token id {token_id!r}; expected whole numbers from 0 to {vocab - 1:,}.",
                param="prompt_token_ids",
            )
    return [operator.index(token_id) for token_id in ids]


def truncated(ids: Sequence[int], params: SamplingParams, context: int) -> tuple[int, ...]:
    """The last truncate_prompt_tokens ids; -1: as many as leave room for a token in the context."""
    keep = params.truncate_prompt_tokens
    if keep is not None:
        keep = keep if keep > 0 else context - (params.max_tokens != 0)
        ids = ids[-keep:]
    return tuple(ids)
