"""Why a prompt was not cached further than it was: the first token that left the cached path, both sides as text.

The tree of cached prefixes says where it ends and what stands there instead (`cache/radix.py`); here that becomes words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from martlet.metrics import RequestMetrics
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import MissReason

__all__ = ["CacheReport", "explain_cache"]

_REASONING = ("<think>", "[THINK]")  # what begins it
_BEFORE_TOKENS = 8  # shown of what both have in common
_REASONS = {
    MissReason.END: "the whole prompt was there; its last token is always computed",
    MissReason.EMPTY: "nothing that goes on like this was computed before",
    MissReason.EVICTED: "what follows was cached, and had to make room: more kv_memory keeps it",
    MissReason.SALT: "what follows is cached under another cache_salt only",
    MissReason.SCORED: "prompt_logprobs were asked for, so those tokens are computed",
    MissReason.OFF: "the prefix cache is off",
}


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the prefix cache did for one prompt. `position` is where it left what is cached."""

    n_prompt: int
    n_cached: int
    n_loaded: int  # of them, from the second tier
    reason: MissReason
    saved_s: float | None  # time that computing the cached tokens would have taken; None before any speed was measured
    before: str = ""  # the text before `position`, its end
    prompt_id: int | None = None  # the prompt's token at `position`, and its text
    prompt_text: str = ""
    cached_id: int | None = None  # the token that the cache has there, where that is the reason
    cached_text: str = ""
    differs_at: int | None = None  # where the two tokens stand

    @property
    def position(self) -> int:
        """The first position that is not in the cache: n_cached, or after it where not all that is there can be used."""
        return self.n_cached if self.differs_at is None else self.differs_at

    @property
    def cut_differently(self) -> bool:
        """Whether both sides may be the same text in other tokens: one of the two begins with the other."""
        one, other = self.prompt_text, self.cached_text
        return bool(one and other) and (one.startswith(other) or other.startswith(one))

    @property
    def lacks_reasoning(self) -> bool:
        """Whether an earlier answer's reasoning is in the cache and not in the prompt: templates and clients leave it out."""
        return self.cached_text.strip() in _REASONING

    def explain(self) -> str:
        """One line for a person."""
        line = f"cache: {self.n_cached:,} of {self.n_prompt:,} prompt tokens"
        if self.n_loaded:
            line += f" ({self.n_loaded:,} from disk)"
        if self.saved_s:
            line += f", {1000 * self.saved_s:,.0f} ms saved"
        return f"{line}; {self._why()}"

    def _why(self) -> str:
        if self.reason is not MissReason.DIFFERS:
            return _REASONS[self.reason]
        after = f" after {self.before!r}" if self.before else ""
        why = (
            f"token {self.position:,}{after} is {self.prompt_text!r} ({self.prompt_id}),"
            f" and {self.cached_text!r} ({self.cached_id}) in the cache"
        )
        if self.lacks_reasoning:
            return f"{why}; the reasoning of an earlier answer is not in the prompt"
        return why + ("; the same text may be cut into other tokens" if self.cut_differently else "")


def explain_cache(prompt_ids: Sequence[int], metrics: RequestMetrics, tokenizer: Tokenizer) -> CacheReport | None:
    """The report of a request; None if it has never run."""
    use = metrics.cache
    if use is None:
        return None
    position = use.n_tokens if use.differs_at is None else use.differs_at
    cached = None if use.cached_id is None else tokenizer.decode([use.cached_id], skip_special=False)
    here = prompt_ids[position] if position < len(prompt_ids) and cached is not None else None
    return CacheReport(
        n_prompt=metrics.n_prompt,
        n_cached=use.n_tokens,
        n_loaded=use.n_loaded,
        reason=use.reason,
        saved_s=metrics.saved_s,
        before=""
        if here is None
        else tokenizer.decode(list(prompt_ids[max(0, position - _BEFORE_TOKENS) : position]), skip_special=False),
        prompt_id=here,
        prompt_text="" if here is None else tokenizer.decode([here], skip_special=False),
        cached_id=use.cached_id,
        cached_text=cached or "",
        differs_at=use.differs_at,
    )
