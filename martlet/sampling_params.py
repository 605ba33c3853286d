"""Placeholder for the sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters under vLLM's names."""

    max_tokens: int | None = 16
    temperature: float = 1.0
