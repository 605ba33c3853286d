"""Adapters of an engine by name: read before memory is planned, loaded between two steps (read `models/lora.py` first)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from martlet.errors import CapacityError, RequestError
from martlet.machine import read_machine
from martlet.models.lora import Adapter, read_adapter
from martlet.spec import ModelSpec

__all__ = ["LoRARequest", "chosen_adapter", "open_adapter", "open_adapters"]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that a request runs with, as vLLM's users write it; with a path it is loaded when it is first asked for.

    `lora_int_id` is vLLM's number of it, which nothing here needs.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def open_adapters(lora: Mapping[str, str] | None, spec: ModelSpec) -> dict[str, Adapter]:
    """Read the adapters that the settings name, all before any is loaded."""
    return {name: open_adapter(path, spec) for name, path in (lora or {}).items()}


def open_adapter(path: str, spec: ModelSpec, param: str = "lora") -> Adapter:
    """Read an adapter for this model.

    Raises RequestError where there is nothing, FormatError and UnsupportedError for one that does not fit the model, and
    CapacityError for one that does not fit the memory which is free now.
    """
    try:
        found = Path(path).exists()
    except (OSError, ValueError):
        found = False
    if not found:
        raise RequestError(
            f"There is no file or folder {path!r:.500}: give the path of an adapter, PEFT's folder or a GGUF file.",
            param=param,
        )
    adapter = read_adapter(path, spec)
    free = read_machine().memory_available
    if free is not None and adapter.nbytes > free:
        raise CapacityError(
            f"The adapter {path!r:.500} takes {adapter.nbytes:,} bytes, and {free:,} are free: unload others."
        )
    return adapter


def chosen_adapter(
    asked: LoRARequest | str | None, adapters: Mapping[str, Adapter], load: Callable[[str, str], None]
) -> str:
    """The digest of the adapter that a request asks for, "" for none; `load` is called with the name and path of a new one.

    Raises RequestError for one that is not there, or that stands for other numbers than the request says.
    """
    if asked is None:
        return ""
    if not isinstance(asked, LoRARequest | str):
        raise RequestError(
            f"lora_request is of type {type(asked).__name__}; expected the name of an adapter, or LoRARequest(…).",
            param="lora_request",
        )
    name, path = (asked, "") if isinstance(asked, str) else (asked.lora_name, str(asked.lora_path))
    if name not in adapters:
        if not path:
            there = ", ".join(map(repr, adapters)) or "none"
            raise RequestError(f"There is no adapter {name!r}; there is {there}.", param="lora_request")
        load(name, path)
    elif path and Path(path) != Path(adapters[name].path):
        raise RequestError(
            f"The adapter {name!r} is that of {adapters[name].path!r}, not of {path!r}: give it another name, or remove"
            " it first.",
            param="lora_request",
        )
    return adapters[name].digest
