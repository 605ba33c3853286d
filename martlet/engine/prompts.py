"""What counts as a prompt: text, a mapping, or token ids, checked before anything runs (read `llm.py` next)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from martlet.errors import RequestError
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["Prompt", "listed", "tokens_of"]

Prompt = str | Mapping[str, Any] | Sequence[int]  # text, {"prompt": …}, {"prompt_token_ids": …}, or token ids


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of whole numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a string, a mapping, token ids, or a list of them.",
            param="prompts",
        )
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """A prompt's text, if there is one, and its ids; where both are given the ids count."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                f"A prompt given as a mapping has the keys {sorted(map(str, prompt))}; expected prompt,"
                " prompt_token_ids, or both.",
                param="prompt",
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            return tokens_of(_text(text), tokenizer)
        return (None if text is None else _text(text)), _checked_ids(ids, tokenizer.vocab_size)
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    return None, _checked_ids(prompt, tokenizer.vocab_size)


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
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab:
            raise RequestError(
                f"The prompt has the token id {token_id!r}; expected whole numbers from 0 to {vocab - 1:,}.",
                param="prompt_token_ids",
            )
    return list(ids)
