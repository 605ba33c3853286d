"""Martlet: a complete LLM inference engine in Python. Read `types.py` first, then `engine/engine.py`.

from martlet import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from martlet.llm import LLM
    from martlet.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: `import martlet` alone costs nothing."""
    if name == "LLM":
        from martlet.llm import LLM

        return LLM
    if name == "SamplingParams":
        from martlet.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'martlet' has no attribute {name!r}")
