"""Explains why a prompt was not cached further: the first token that left the cached prefix.

The prefix tree (`cache/radix.py`, read it next) reports the position and both tokens; this module
turns them into text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from martlet.metrics import RequestMetrics
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import MissReason

_REASONING = ("<think>", "[THINK]")  # marks that begin reasoning
_BEFORE_TOKENS = 8  # shown of the common prefix
_REASONS = {
    MissReason.END: "the whole prompt was cached; its last token is always computed",
    MissReason.EMPTY: "no earlier prompt continues like this",
    MissReason.EVICTED: "the rest was cached and evicted: more kv_memory keeps it",
    MissReason.SALT: "the rest is cached only under another cache_salt",
    MissReason.SCORED: "prompt_logprobs need these tokens to be computed",
    MissReason.OFF: "the prefix cache is off",
}


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix cache's use for one prompt, and why it ended at `position`."""

    n_prompt: int
    n_cached: int
    n_loaded: int  # of the cached tokens, loaded from disk
    reason: MissReason
    saved_s: float | None  # time to compute the cached tokens; None before a speed was measured
    before: str = ""  # the end of the text before `position`
    prompt_id: int | None = None  # the prompt's token at `position`
    prompt_text: str = ""
    cached_id: int | None = None  # the cached token at `position`, if the tokens differ
    cached_text: str = ""
    differs_at: int | None = None  # position of the two tokens

    @property
    def position(self) -> int:
        """The first position that is not cached: `n_cached`, or a later one within a page."""
        return self.n_cached if self.differs_at is None else self.differs_at

    @property
    def cut_differently(self) -> bool:
        """Whether both may be the same text in other tokens: one text begins with the other."""
        prompt, cached = self.prompt_text, self.cached_text
        return bool(prompt and cached) and (prompt.startswith(cached) or cached.startswith(prompt))

    @property
    def lacks_reasoning(self) -> bool:
        """Whether the cache has an earlier answer's reasoning that the prompt leaves out."""
        return self.cached_text.strip() in _REASONING

    def explain(self) -> str:
        """The report as a line of text."""
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
    """The report of a request; None if it never ran."""
    use = metrics.cache
    if use is None:
        return None
    position = use.n_tokens if use.differs_at is None else use.differs_at
    cached = None if use.cached_id is None else tokenizer.decode([use.cached_id], skip_special=False)
    prompt_id = prompt_ids[position] if position < len(prompt_ids) and cached is not None else None
    return CacheReport(
        n_prompt=metrics.n_prompt,
        n_cached=use.n_tokens,
        n_loaded=use.n_loaded,
        reason=use.reason,
        saved_s=metrics.saved_s,
        before=""
        if prompt_id is None
        else tokenizer.decode(list(prompt_ids[max(0, position - _BEFORE_TOKENS) : position]), skip_special=False),
        prompt_id=prompt_id,
        prompt_text="" if prompt_id is None else tokenizer.decode([prompt_id], skip_special=False),
        cached_id=use.cached_id,
        cached_text=cached or "",
        differs_at=use.differs_at,
    )
