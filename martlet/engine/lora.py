"""Adapters of an engine by name (read `models/lora.py` first).

They are read before memory is planned, and loaded between two steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from martlet.errors import CapacityError, RequestError
from martlet.machine import read_machine
from martlet.models.lora import Adapter, read_adapter
from martlet.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request, in vLLM's form; with a path it is loaded at its first use.

    `lora_int_id`, vLLM's number of the adapter, has no effect.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def open_adapters(lora: Mapping[str, str] | None, spec: ModelSpec) -> dict[str, Adapter]:
    """Read the adapters that the settings name; errors as in `open_adapter`."""
    return {name: open_adapter(path, spec) for name, path in (lora or {}).items()}


def open_adapter(path: str, spec: ModelSpec, param: str = "lora") -> Adapter:
    """Read an adapter for this model.

    Raises RequestError if there is no such file, FormatError and UnsupportedError if it does not
    fit the model, and CapacityError if it does not fit the free memory.
    """
    try:
        exists = Path(path).exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
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
    request: LoRARequest | str | None, adapters: Mapping[str, Adapter], load: Callable[[str, str], None]
) -> str:
    """The digest of a request's adapter, "" for none; `load(name, path)` loads a new one.

    Raises RequestError for an unknown name without a path, and for a name that has another path.
    """
    if request is None:
        return ""
    if not isinstance(request, LoRARequest | str):
        raise RequestError(
            f"lora_request is of type {type(request).__name__}; expected the name of an adapter, or LoRARequest(…).",
            param="lora_request",
        )
    name, path = (request, "") if isinstance(request, str) else (request.lora_name, str(request.lora_path))
    if name not in adapters:
        if not path:
            loaded = ", ".join(map(repr, adapters)) or "none"
            raise RequestError(f"There is no adapter {name!r}; loaded: {loaded}.", param="lora_request")
        load(name, path)
    elif path and Path(path) != Path(adapters[name].path):
        raise RequestError(
            f"The adapter {name!r} is that of {adapters[name].path!r}, not of {path!r}: give it another name, or remove"
            " it first.",
            param="lora_request",
        )
    return adapters[name].digest
