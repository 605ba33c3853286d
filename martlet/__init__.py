"""Martlet: a complete LLM inference engine in Python.

Read `types.py` first, then `engine/engine.py`.

from martlet import LLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from martlet.errors import MartletError, RequestError
    from martlet.llm import LLM, BeamSearchParams, LoRARequest, Scheduling
    from martlet.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "MartletError", "RequestError", "SamplingParams", "Scheduling"]
_HOMES = {
    "LLM": "martlet.llm",
    "BeamSearchParams": "martlet.engine.beams",
    "LoRARequest": "martlet.engine.lora",
    "MartletError": "martlet.errors",
    "RequestError": "martlet.errors",
    "SamplingParams": "martlet.sampling_params",
    "Scheduling": "martlet.types",
}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: `import martlet` alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'martlet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
