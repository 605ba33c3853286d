"""Sampling parameters: vLLM's, and llama.cpp's further steps (read `sample/sampler.py` next).

A `SamplingParams` is frozen and valid: whatever is out of range, unknown or contradictory is
refused here, by name, and nothing is accepted that is not acted on. docs/sampling.md explains every
step; `engine/params.py` says where a setting came from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from martlet.errors import RequestError, nearest
from martlet.options import Option, option, options_of, refuse
from martlet.structured import Structured

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
# The other steps truncate: mirostat does that itself, and a greedy request takes the best token
# anyway.
_NOT_TRUNCATING = ("penalties", "dry", "temperature")

_GROUP = "sampling (default: what the model file suggests, else as shown)"
_MAX_N = 1024
_MAX_STRINGS = 1024  # of one field: each costs work before the request runs,
_MAX_BREAKERS = 64  # a breaker a pass over the vocabulary's texts
_MAX_CHARACTERS = 1 << 16  # of one field's strings together
_BIAS_LIMIT = 100.0


def _strings(name: str, value: object) -> tuple[str, ...]:
    """Non-empty Unicode strings from a list of them, or from one."""
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise refuse(name, value, "a list of strings")
    strings = tuple(items)
    if not all(isinstance(item, str) and item for item in strings):
        raise refuse(name, value, "a list of strings, none empty")
    most = _MAX_BREAKERS if name == "dry_sequence_breakers" else _MAX_STRINGS
    if len(strings) > most:
        raise RequestError(f"{name} has {len(strings):,} strings; expected at most {most:,}.", param=name)
    if (length := sum(map(len, strings))) > _MAX_CHARACTERS:
        raise RequestError(
            f"{name} has {length:,} characters in all; expected at most {_MAX_CHARACTERS:,}.", param=name
        )
    for item in strings:
        try:
            item.encode()
        except UnicodeEncodeError:
            raise refuse(name, item, "Unicode text, without half a surrogate pair") from None
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise refuse(name, value, "a list of token ids")
    return tuple(_token_id(name, item) for item in value)


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 0:
        raise refuse(name, value, "token ids of 0 or more")
    return operator.index(value)


def _bias(name: str, value: object) -> Mapping[int, float]:
    """A mapping of token id to bias; ids may be decimal strings, as JSON has them."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "a mapping of token id to bias")
    amount = Option(help="", name=name, type=float, low=-_BIAS_LIMIT, high=_BIAS_LIMIT)
    bias: dict[int, float] = {}
    for key, added in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit():
            key = int(key[:20])  # enough for every id; far longer numbers are slow to read
        elif isinstance(key, str):
            raise refuse(name, key, "token ids as keys")
        bias[_token_id(name, key)] = amount.checked(added)
    return bias


def _steps(name: str, value: object) -> tuple[str, ...]:
    """Steps of the sampler, each at most once."""
    steps = _strings(name, value)
    for step in steps:
        if step not in STEP_SETTINGS:
            raise refuse(name, step, f"steps of {', '.join(DEFAULT_ORDER)}", DEFAULT_ORDER)
    if len(set(steps)) != len(steps):
        raise refuse(name, list(steps), "each step at most once")
    return steps


def _mirostat(name: str, value: object) -> int:
    if value not in (0, 2) or isinstance(value, bool | float):
        raise refuse(name, value, "0 (off) or 2 (mirostat v2)")
    return operator.index(value)


def _truncation(name: str, value: object) -> int:
    if value == 0 and not isinstance(value, bool):
        raise refuse(name, value, "1 or more, or -1 for as many as the context holds")
    number: int = Option(help="", name=name, type=int, low=-1).checked(value)
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. None: the default, but for `max_tokens` no limit.

    Raises RequestError (param names the field) for a value out of range, of the wrong type, or that
    contradicts another.
    """

    # fmt: off
    n: int = option(1, "answers to one prompt", low=1, high=_MAX_N)
    best_of: int | None = option(None, "generate N answers and return the n of the highest mean log-probability",
        low=1, high=_MAX_N, default_help="n")
    # None: to the end of the context
    max_tokens: int | None = option(16, "generate at most N tokens", low=0, group=_GROUP,
        more_flags=("-n", "--n-predict", "--predict"))
    min_tokens: int = option(0, "generate at least N tokens before the answer may end", low=0, group=_GROUP)
    # None: drawn from the system when the request starts
    seed: int | None = option(None, "repeat the same choices with the same N", low=-(2**63), high=2**64 - 1,
        group=_GROUP, default_help="another in each run")
    stop: tuple[str, ...] = option((), "end the answer before this text", check=_strings, group=_GROUP,
        more_flags=("-r", "--reverse-prompt"))
    stop_token_ids: tuple[int, ...] = option((), "end the answer at this token", check=_token_ids, group=_GROUP)
    include_stop_str_in_output: bool = option(False, "keep the text of stop in the answer", group=_GROUP)
    ignore_eos: bool = option(False, "never sample a token that ends an answer", group=_GROUP)
    # Which tokens may be sampled at all.
    logit_bias: Mapping[int, float] | None = option(None, "add to the logits of tokens; -100 bans a token",
        check=_bias, group=_GROUP, metavar="ID=BIAS,…")
    allowed_token_ids: tuple[int, ...] | None = option(None, "sample no other tokens than these", check=_token_ids,
        group=_GROUP)
    bad_words: tuple[str, ...] = option((), "never generate this text", check=_strings, group=_GROUP)
    no_repeat_ngram_size: int = option(0, "never repeat a sequence of N tokens; 0: off", low=0, group=_GROUP)
    # a mapping of its fields is taken too
    structured: Structured | None = option(None, "a schema, pattern or grammar that the answer follows",
        check=lambda _, value: Structured.from_value(value))
    # The steps, in `samplers` order.
    samplers: tuple[str, ...] = option(DEFAULT_ORDER, "the steps in order, with ; or , between them", check=_steps,
        group=_GROUP)
    repetition_penalty: float = option(1.0, "divide the logits of tokens seen by this; 1: off", low=1e-3, high=1e3,
        group=_GROUP, more_flags=("--repeat-penalty",))
    presence_penalty: float = option(0.0, "subtract this from the logits of generated tokens; 0: off", low=-2, high=2,
        group=_GROUP)
    frequency_penalty: float = option(0.0, "subtract this once for each time that a token was generated; 0: off",
        low=-2, high=2, group=_GROUP)
    penalty_last_n: int = option(-1, "tokens that the penalties look back on; -1: all", low=-1, group=_GROUP,
        more_flags=("--repeat-last-n",))
    dry_multiplier: float = option(0.0, "strength of DRY, against repeated sequences; 0: off", low=0, high=1e6,
        group=_GROUP)
    dry_base: float = option(1.75, "how fast DRY grows with the length of the repetition", low=1, high=1e6,
        group=_GROUP)
    dry_allowed_length: int = option(2, "repetitions up to this length are free", low=1, group=_GROUP)
    dry_penalty_last_n: int = option(-1, "tokens that DRY looks back on; -1: all", low=-1, group=_GROUP)
    dry_sequence_breakers: tuple[str, ...] = option(("\n", ":", '"', "*"), "a repeated sequence ends at this text",
        check=_strings, group=_GROUP)
    top_n_sigma: float = option(0.0, "keep logits within X standard deviations of the best; 0: off", low=0,
        group=_GROUP)
    top_k: int = option(0, "keep the N best tokens; 0: all", low=-1, group=_GROUP)
    typical_p: float = option(1.0, "keep the most typical tokens whose probabilities sum to X; 1: off", low=0, high=1,
        group=_GROUP, more_flags=("--typical",))
    top_p: float = option(1.0, "keep the best tokens whose probabilities sum to X; 1: off", low=0, high=1,
        group=_GROUP)
    min_p: float = option(0.0, "keep tokens of X times the best token's probability; 0: off", low=0, high=1,
        group=_GROUP)
    xtc_probability: float = option(0.0, "how often XTC removes the likeliest tokens; 0: off", low=0, high=1,
        group=_GROUP)
    xtc_threshold: float = option(0.1, "probability from which XTC removes tokens; above 0.5: off", low=0, high=1,
        group=_GROUP)
    temperature: float = option(1.0, "below 1 sharper, above 1 flatter; 0: always the best token", low=0,
        group=_GROUP, more_flags=("--temp",))
    dynatemp_range: float = option(0.0, "move the temperature by up to X with the entropy; 0: off", low=0,
        group=_GROUP)
    dynatemp_exponent: float = option(1.0, "how the temperature moves with the entropy", low=0, group=_GROUP,
        more_flags=("--dynatemp-exp",))
    mirostat: int = option(0, "2: mirostat v2 in place of the truncating steps; 0: off", check=_mirostat,
        group=_GROUP)
    mirostat_tau: float = option(5.0, "the surprise, in bits, that mirostat aims at", low=0, group=_GROUP,
        more_flags=("--mirostat-ent",))
    mirostat_eta: float = option(0.1, "how fast mirostat adapts", low=0, group=_GROUP, more_flags=("--mirostat-lr",))
    # What to return.
    logprobs: int | None = option(None, "log-probabilities of the N best tokens; -1: of the whole vocabulary", low=-1,
        group=_GROUP)
    prompt_logprobs: int | None = option(None,
        "log-probabilities of the prompt's tokens, and of the N best beside each", low=-1, group=_GROUP)
    logprobs_mode: Literal["raw", "allowed", "processed"] = option("raw",
        "raw: before all steps; allowed: those of tokens that may be sampled; processed: after all", group=_GROUP)
    detokenize: bool = option(True, "make the text of the answer")
    skip_special_tokens: bool = option(True, "leave the text of control tokens out", group=_GROUP)
    truncate_prompt_tokens: int | None = option(None, "keep the last N tokens of the prompt; -1: what fits",
        check=_truncation, group=_GROUP)
    draft_tokens: int | None = option(None, "draft N tokens at a time, whether it pays or not; 0: none", low=0,
        high=64, group=_GROUP, more_flags=("--draft-max", "--draft-n"), default_help="as many as pay")
    # fmt: on

    def __post_init__(self) -> None:
        for name, declared in options_of(SamplingParams).items():
            value = getattr(self, name)
            if value is not declared.default:
                none = value is None and not declared.is_optional
                self._set(name, declared.default if none else declared.checked(value))
        self._set("top_k", max(self.top_k, 0))
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise refuse("best_of", self.best_of, f"at least n ({self.n}): the best n of them are returned")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize to true, or use stop_token_ids.", param="stop")
        if self.allowed_token_ids == ():
            raise refuse("allowed_token_ids", [], "at least one id, or null for no restriction")
        if self.structured is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos and structured contradict each other: where the text is complete only its end can follow.",
                param="ignore_eos",
            )
        self._check_order()

    def _check_order(self) -> None:
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
        """Whether the best token after masks, bias, penalties and DRY is taken, without chance."""
        xtc = self._is_on("xtc") and self.xtc_threshold <= 0.5 and not self.mirostat
        return self.temperature == 0 and self.dynatemp_range == 0 and not xtc

    @property
    def active_steps(self) -> tuple[str, ...]:
        """The steps that have an effect under these settings, in order; only they cost time."""
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
        """Build from untrusted names and values; an unknown name is a RequestError."""
        known = options_of(SamplingParams)
        for name in settings:
            if name not in known:
                raise RequestError(
                    f"There is no sampling parameter {name!r}.{nearest(name, known)}",
                    param=name,
                    code="unknown_parameter",
                )
        return cls(**settings)  # type: ignore[arg-type]  # every value is checked by __post_init__


def validate_for_vocab(params: SamplingParams, vocab: int) -> None:
    """RequestError for token ids that the model does not have; for admission of a request."""
    named = (
        ("logit_bias", tuple(params.logit_bias or ())),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    )
    for name, ids in named:
        for token_id in ids:
            if not 0 <= token_id < vocab:
                raise refuse(name, token_id, f"token ids from 0 to {vocab - 1}, the model's vocabulary")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab:
            raise refuse(name, wanted, f"at most {vocab}, the size of the vocabulary")


def _default(name: str) -> object:
    return options_of(SamplingParams)[name].default
