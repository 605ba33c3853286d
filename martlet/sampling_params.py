"""Sampling parameters: vLLM's names, llama.cpp's extra samplers, checked once (read `sample/sampler.py` next).

A `SamplingParams` is frozen and valid: whatever is out of range, unknown or contradictory is refused here, by name, and
nothing is accepted that is not acted on. docs/sampling.md explains every step; `engine/params.py` says where a setting
came from.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from martlet.errors import RequestError, nearest, shown
from martlet.structured import Structured

__all__ = ["DEFAULT_ORDER", "STEP_SETTINGS", "SamplingParams", "validate_for_vocab"]

# Which settings switch a step on: it is active when one of them differs from its default.
STEP_SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "dry": ("dry_multiplier",),
        "top_n_sigma": ("top_n_sigma",),
        "top_k": ("top_k",),
        "typical_p": ("typical_p",),
        "top_p": ("top_p",),
        "min_p": ("min_p",),
        "xtc": ("xtc_probability",),
        "temperature": ("temperature", "dynatemp_range"),
    }
)
DEFAULT_ORDER = tuple(STEP_SETTINGS)  # llama.cpp's default order
# The other steps truncate: mirostat does that itself, and a greedy request takes the best token anyway.
_NOT_TRUNCATING = ("penalties", "dry", "temperature")

_ANY = math.inf
_MAX_N = 1024
_MAX_STRINGS = 1024  # of one field: each costs work before the request runs,
_MAX_BREAKERS = 64  # a breaker a pass over the vocabulary's texts
_MAX_CHARACTERS = 1 << 16  # of one field's strings together
# None has a meaning of its own here; elsewhere it means the default.
_OPTIONAL = frozenset(
    {
        "best_of",
        "max_tokens",
        "seed",
        "logit_bias",
        "allowed_token_ids",
        "structured",
        "logprobs",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "draft_tokens",
    }
)
# name: (lowest, highest)
_INT_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "n": (1, _MAX_N),
        "best_of": (1, _MAX_N),
        "top_k": (-1, _ANY),
        "seed": (-(2**63), 2**64 - 1),
        "max_tokens": (0, _ANY),
        "min_tokens": (0, _ANY),
        "logprobs": (-1, _ANY),
        "prompt_logprobs": (-1, _ANY),
        "truncate_prompt_tokens": (-1, _ANY),
        "dry_allowed_length": (1, _ANY),
        "dry_penalty_last_n": (-1, _ANY),
        "mirostat": (0, 2),
        "penalty_last_n": (-1, _ANY),
        "no_repeat_ngram_size": (0, _ANY),
        "draft_tokens": (0, 64),
    }
)
_FLOAT_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (1e-3, 1e3),
        "temperature": (0, _ANY),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "typical_p": (0, 1),
        "top_n_sigma": (0, _ANY),
        "xtc_probability": (0, 1),
        "xtc_threshold": (0, 1),
        "dry_multiplier": (0, 1e6),
        "dry_base": (1, 1e6),
        "mirostat_tau": (0, _ANY),
        "mirostat_eta": (0, _ANY),
        "dynatemp_range": (0, _ANY),
        "dynatemp_exponent": (0, _ANY),
    }
)
_BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
)
_BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. `None` means the default, but for `max_tokens`, where it means no limit.

    Raises RequestError (param names the field) for a value out of range, of the wrong type, or that contradicts another.
    """

    # How many completions, and how long.
    n: int = 1
    best_of: int | None = None  # generate so many and return the n of the highest mean log-probability; None: n
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0  # until then neither end-of-generation nor stop_token_ids can be sampled
    seed: int | None = None  # None: drawn once from the system when the request starts
    # When to stop.
    stop: tuple[str, ...] = ()  # a string or a list of strings is accepted
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # end-of-generation tokens are never sampled
    # Which tokens may be sampled at all.
    logit_bias: Mapping[int, float] | None = None  # added to logits; -100 bans; str keys are accepted
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: int = 0  # 0: off
    structured: Structured | None = None  # what the answer is held to; a mapping of its fields is taken too
    # The steps, in `samplers` order.
    samplers: tuple[str, ...] = DEFAULT_ORDER
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1  # tokens that the three penalties look back on; -1: all
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    top_n_sigma: float = 0.0  # 0: off
    top_k: int = 0  # 0 and -1: off
    typical_p: float = 1.0
    top_p: float = 1.0  # 0 keeps the best token only
    min_p: float = 0.0
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    temperature: float = 1.0  # 0: greedy
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 0 or 2; replaces the truncating steps
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    # What to return.
    logprobs: int | None = None  # how many of the best beside the sampled token; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "allowed", "processed"] = "raw"
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last so many prompt tokens; -1: as many as the context holds
    draft_tokens: int | None = None  # guessed at a time, if there is a drafter; 0: none; None: as many as pay

    def __post_init__(self) -> None:
        for spec in fields(self):
            if getattr(self, spec.name) is None and spec.name not in _OPTIONAL:
                self._set(spec.name, spec.default)
        for name, (low, high) in _INT_RANGES.items():
            self._set(name, _integer(name, getattr(self, name), low, high))
        for name, (low, high) in _FLOAT_RANGES.items():
            self._set(name, _real(name, getattr(self, name), low, high))
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        for name in ("stop", "bad_words", "dry_sequence_breakers", "samplers"):
            self._set(name, _strings(name, getattr(self, name)))
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._set(name, _token_ids(name, getattr(self, name)))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("structured", Structured.from_value(self.structured))
        self._set("top_k", max(self.top_k, 0))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise _refuse("best_of", self.best_of, f"at least n ({self.n}): the best n of them are returned")
        if self.mirostat == 1:
            raise _refuse("mirostat", 1, "0 (off) or 2 (mirostat v2)")
        if self.logprobs_mode not in ("raw", "allowed", "processed"):
            raise _refuse("logprobs_mode", self.logprobs_mode, "'raw', 'allowed' or 'processed'")
        if self.truncate_prompt_tokens == 0:
            raise _refuse("truncate_prompt_tokens", 0, "at least 1, or -1 for as many as the context holds")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize to true, or use stop_token_ids.", param="stop")
        if self.allowed_token_ids == ():
            raise _refuse("allowed_token_ids", [], "at least one id, or null for no restriction")
        if self.structured is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos and structured contradict each other: where the text is complete only its end can follow.",
                param="ignore_eos",
            )
        self._check_order()

    def _check_order(self) -> None:
        for name in self.samplers:
            if name not in STEP_SETTINGS:
                hint = nearest(name, STEP_SETTINGS)
                raise RequestError(
                    f"samplers: no step {name!r}.{hint} Known: {', '.join(DEFAULT_ORDER)}.", param="samplers"
                )
        if len(set(self.samplers)) != len(self.samplers):
            raise RequestError("samplers: a step is named twice; name each at most once.", param="samplers")
        for step in DEFAULT_ORDER:
            if step not in self.samplers and self._is_on(step):
                setting = next(name for name in STEP_SETTINGS[step] if getattr(self, name) != _default(name))
                raise RequestError(
                    f"{setting} is set, but samplers leaves out its step {step!r}: add the step or unset {setting}.",
                    param=setting,
                )

    def _is_on(self, step: str) -> bool:
        return any(getattr(self, name) != _default(name) for name in STEP_SETTINGS[step])

    @property
    def greedy(self) -> bool:
        """Whether the best token (after masks, bias, penalties and DRY) is taken, with no random number used."""
        xtc = self._is_on("xtc") and self.xtc_threshold <= 0.5 and not self.mirostat
        return self.temperature == 0 and self.dynatemp_range == 0 and not xtc

    @property
    def active_steps(self) -> tuple[str, ...]:
        """The steps that do something under these settings, in order; the work of a sample is theirs only."""
        off = {step for step in self.samplers if not self._is_on(step)}
        if self.penalty_last_n == 0:
            off.add("penalties")
        if self.dry_penalty_last_n == 0:
            off.add("dry")
        if self.xtc_threshold > 0.5:
            off.add("xtc")
        if self.mirostat or self.greedy:
            off.update(set(self.samplers) - set(_NOT_TRUNCATING))
        return tuple(step for step in self.samplers if step not in off)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> SamplingParams:
        """Build from untrusted names and values; RequestError for an unknown name, with the nearest known one."""
        known = [spec.name for spec in fields(cls)]
        for name in settings:
            if name not in known:
                raise RequestError(
                    f"There is no sampling parameter {name!r}.{nearest(name, known)}",
                    param=name,
                    code="unknown_parameter",
                )
        return cls(**settings)  # type: ignore[arg-type]  # every value is checked by __post_init__


def validate_for_vocab(params: SamplingParams, vocab: int) -> None:
    """Refuse token ids that the model does not have; call it at admission, when the vocabulary's size is known."""
    named = (
        ("logit_bias", tuple(params.logit_bias or ())),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    )
    for name, ids in named:
        for token_id in ids:
            if not 0 <= token_id < vocab:
                raise _refuse(name, token_id, f"token ids from 0 to {vocab - 1}, the model's vocabulary")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab:
            raise _refuse(name, wanted, f"at most {vocab}, the size of the vocabulary")


def _default(name: str) -> object:
    return SamplingParams.__dataclass_fields__[name].default


def _refuse(name: str, found: object, expected: str) -> RequestError:
    return RequestError(f"{name}: found {shown(found, 1000)}, expected {expected}.", param=name)


def _limits(low: float, high: float) -> str:
    return f"at least {low:g}" if high == _ANY else f"from {low:g} to {high:g}"


def _integer(name: str, value: object, low: float, high: float) -> int | None:
    if value is None and name in _OPTIONAL:
        return None
    expected = f"an integer {_limits(low, high)}"
    if value is None or isinstance(value, bool):
        raise _refuse(name, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # takes NumPy's integers, refuses 1.5
    except TypeError:
        raise _refuse(name, value, expected) from None
    if not low <= number <= high:
        raise _refuse(name, value, expected)
    return number


def _real(name: str, value: object, low: float, high: float) -> float:
    expected = f"a finite number {_limits(low, high)}"
    if isinstance(value, (bool, str)):
        raise _refuse(name, value, expected)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _refuse(name, value, expected) from None
    if not math.isfinite(number) or not low <= number <= high:
        raise _refuse(name, value, expected)
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise _refuse(name, value, "a list of strings")
    strings = tuple(items)
    if not all(isinstance(item, str) and item for item in strings):
        raise _refuse(name, value, "a list of non-empty strings")
    most = _MAX_BREAKERS if name == "dry_sequence_breakers" else _MAX_STRINGS
    if len(strings) > most:
        raise RequestError(f"{name}: found {len(strings):,} strings, expected at most {most:,}.", param=name)
    if (length := sum(map(len, strings))) > _MAX_CHARACTERS:
        raise RequestError(
            f"{name}: found {length:,} characters in all, expected at most {_MAX_CHARACTERS:,}.", param=name
        )
    for item in strings:
        if not _is_unicode(item):
            raise _refuse(name, item, "Unicode text: half a surrogate pair is none")
    return strings


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _refuse(name, value, "a list of token ids")
    return tuple(_token_id(name, item) for item in value)


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 0:
        raise _refuse(name, value, "token ids of 0 or more")
    return operator.index(value)


def _bias(value: object) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a mapping of token id to bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            key = int(key[:20])  # enough for every id; far longer numbers are slow to read
        elif isinstance(key, str):
            raise _refuse("logit_bias", key, "token ids as keys")
        bias[_token_id("logit_bias", key)] = _real("logit_bias", amount, -_BIAS_LIMIT, _BIAS_LIMIT)
    return bias
