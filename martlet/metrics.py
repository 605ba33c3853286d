"""What is measured of a request, in seconds of a monotonic clock (read `engine/engine.py` next, which fills it in)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestMetrics", "StartPhase"]


@dataclass(frozen=True, slots=True)
class StartPhase:
    """One part of an engine's start and how long it took."""

    name: str  # read, plan, map, compile, warm
    seconds: float


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request; a time is None until it has happened."""

    arrival_s: float
    n_prompt: int
    scheduled_s: float | None = None  # its first span was planned
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_generated: int = 0  # over all n sequences
    n_first: int = 0  # tokens that came with the first one: one a sequence that was ready then

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first span."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens by the time from the first span to the first token."""
        if self.first_token_s is None or self.scheduled_s is None or self.first_token_s <= self.scheduled_s:
            return None
        return self.n_prompt / (self.first_token_s - self.scheduled_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first ones by the time that they took."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (self.n_generated - self.n_first) / (self.last_token_s - self.first_token_s)
