"""The engine's settings: resolved once, frozen, each with the origin of its value (read `machine.py` next).

This is the only module that reads the environment:

    MARTLET_HOME      where models and caches live (default: $XDG_CACHE_HOME/martlet, ~/.cache/martlet)
    MARTLET_THREADS   threads of the CPU backend
    MARTLET_OFFLINE   1: never touch the network
    MARTLET_KV_DISK   a folder that keeps KV pages
    MARTLET_API_KEY   a key that `martlet serve` requires; several with commas between them

An option given by the caller wins over the environment, the environment over the model's file, that over the default.
What depends on the machine (threads, the context that fits) is decided from measured limits and says so.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from martlet.errors import RequestError, nearest
from martlet.kv_types import RECENT_TOKENS, parse_kv_types, share_tokens
from martlet.machine import MachineLimits, choose_threads, read_machine
from martlet.structured import ITEM_LIMIT, STRING_LIMIT

__all__ = [
    "BACKENDS",
    "PAGE_SIZE",
    "EngineConfig",
    "Origin",
    "Setting",
    "cache_dir",
    "environment_api_keys",
    "resolve_config",
]

PAGE_SIZE = 32  # tokens of a KV page: the tile of the attention kernels
BACKENDS = ("cpu", "reference", "null")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest", "prefix", "fair", "deadline")
DRAFTERS = ("auto", "ngram", "mtp", "off")
MAX_THREADS = 1024
ORACLE_STEP_TOKENS = 64


class Origin(StrEnum):
    """Where a setting's value came from."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    MODEL_FILE = "model file"
    MACHINE = "machine"
    DRAWN = "drawn"
    MEASURED = "measured"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """An effective setting: its value, where it came from, and a word on why."""

    name: str
    value: object
    origin: Origin
    note: str = ""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of an engine. `origins` has an entry for each field that is not at its default."""

    model: str
    backend: str = "cpu"
    threads: int = 1
    max_context: int | None = None  # None until the model is known: the smaller of its own and what fits
    kv_dtype: str = "f16"
    kv_memory: int | None = (
        None  # bytes of KV pages; None: a quarter of what is available, from one context to max_seqs
    )
    kv_disk: str | None = None  # a folder that keeps KV pages over restarts; they tell what was asked and answered
    kv_disk_size: int = 4 << 30  # bytes of all files there
    page_size: int = PAGE_SIZE
    max_step_tokens: int = 512
    max_seqs: int = 16
    lora: Mapping[str, str] | None = None  # adapters by name: PEFT's folders or GGUF files
    draft: str = "auto"  # who guesses tokens: auto or ngram (the text itself), model=, eagle= or medusa=PATH, off
    policy: str = "fcfs"  # who runs first, and who gives its pages back
    stall_ms: float | None = None  # longest step while anybody decodes; None: a few times one that only decodes
    max_waiting: int | None = None  # sequences in the queue; None: any number
    max_waiting_tokens: int | None = None  # their prompts' tokens in all
    seed: int | None = None  # what requests without a seed draw theirs from; None: the operating system
    offline: bool = False
    oracle: bool = False
    prefix_cache: bool = True  # what is computed for a prompt is kept for others that begin like it
    string_limit: int = (
        STRING_LIMIT  # bytes of a string in JSON that is held to a form which does not bound it; 0: none
    )
    item_limit: int = ITEM_LIMIT  # items of an array, properties of an object, the same
    exact_turns: bool = True  # a chat's next prompt repeats the tokens of its answers, however the text would be cut
    chat_template: str | None = None
    tokenizer_pre: str | None = None
    trace: str | None = None  # a file for the timeline of steps and requests
    capsule: str | None = None  # a file with which all that runs can be run again
    origins: Mapping[str, tuple[Origin, str]] = field(default_factory=dict)

    def settings(self) -> tuple[Setting, ...]:
        """All settings with their origins, in the order of declaration."""
        names = [f.name for f in fields(self) if f.name != "origins"]
        return tuple(
            Setting(name, getattr(self, name), *self.origins.get(name, (Origin.DEFAULT, ""))) for name in names
        )

    def with_value(self, name: str, value: object, origin: Origin, note: str = "") -> EngineConfig:
        """A copy in which one setting has been decided."""
        changed: dict[str, Any] = {name: value, "origins": {**self.origins, name: (origin, note)}}
        return replace(self, **changed)


_OPTIONS = tuple(f.name for f in fields(EngineConfig) if f.name != "origins")


def resolve_config(
    options: Mapping[str, Any], environ: Mapping[str, str] | None = None, machine: MachineLimits | None = None
) -> EngineConfig:
    """Decide every setting from the caller's options (None: not given), the environment and the machine.

    Raises RequestError, naming the option, for an unknown key or a value that is out of range.
    """
    environ = os.environ if environ is None else environ
    for name in options:
        if name not in _OPTIONS:
            raise RequestError(f"There is no option {name!r}.{nearest(name, _OPTIONS)}", param=name)
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(given.get("model"), str | Path) or not str(given["model"]):
        raise RequestError("No model: give the path of a GGUF file or of a Hugging Face folder.", param="model")
    given["model"] = str(given["model"])
    if isinstance(given.get("kv_disk"), Path):
        given["kv_disk"] = str(given["kv_disk"])
    if isinstance(given.get("lora"), Mapping):
        given["lora"] = {name: str(path) if isinstance(path, Path) else path for name, path in given["lora"].items()}
    if "kv_dtype" in given:
        given["kv_dtype"] = str(parse_kv_types(given["kv_dtype"]))
    origins = dict.fromkeys(given, (Origin.OPTION, ""))
    for name, value in _from_environment(environ).items():
        if name not in given:
            given[name] = value
            origins[name] = (Origin.ENVIRONMENT, f"MARTLET_{name.upper()}")
    if "threads" not in given:
        choice = choose_threads(machine or read_machine())
        given["threads"] = choice.count
        origins["threads"] = (Origin.MACHINE, choice.rule)
    if given.get("oracle") and "max_step_tokens" not in given:
        given["max_step_tokens"] = ORACLE_STEP_TOKENS
        origins["max_step_tokens"] = (Origin.DEFAULT, "the oracle keeps every result of a step")
    if given.get("capsule") and "seed" not in given:
        given["seed"] = secrets.randbits(63)
        origins["seed"] = (Origin.MACHINE, "drawn, so that the capsule can say it")
    config = EngineConfig(**given, origins=origins)
    _validate(config)
    return config


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder for models and caches: MARTLET_HOME, else martlet under XDG_CACHE_HOME, else under ~/.cache."""
    environ = os.environ if environ is None else environ
    if environ.get("MARTLET_HOME"):
        return Path(environ["MARTLET_HOME"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "martlet"
    return Path("~/.cache/martlet").expanduser()


def environment_api_keys(environ: Mapping[str, str] | None = None) -> list[str]:
    """The keys in MARTLET_API_KEY."""
    environ = os.environ if environ is None else environ
    return [key.strip() for key in environ.get("MARTLET_API_KEY", "").split(",") if key.strip()]


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    threads = environ.get("MARTLET_THREADS", "").strip()
    if threads:
        if not (threads.isascii() and threads.isdigit()):
            raise RequestError(f"MARTLET_THREADS is {threads!r}; expected a whole number, 1 or more.", param="threads")
        found["threads"] = int(threads)
    if environ.get("MARTLET_KV_DISK"):
        found["kv_disk"] = environ["MARTLET_KV_DISK"]
    offline = environ.get("MARTLET_OFFLINE", "").strip().lower()
    if offline:
        if offline not in ("0", "1", "true", "false", "yes", "no"):
            raise RequestError(f"MARTLET_OFFLINE is {offline!r}; expected 1 or 0.", param="offline")
        found["offline"] = offline in ("1", "true", "yes")
    return found


def _validate(config: EngineConfig) -> None:
    for name, least, most in (
        ("threads", 1, MAX_THREADS),
        ("max_context", 1, 1 << 31),
        ("kv_memory", 1, 1 << 62),
        ("kv_disk_size", 1, 1 << 62),
        ("page_size", 1, 1 << 16),
        ("max_step_tokens", 1, 1 << 20),
        ("max_seqs", 1, 1 << 16),
        ("max_waiting", 1, 1 << 31),
        ("max_waiting_tokens", 1, 1 << 40),
        ("seed", -(1 << 63), (1 << 64) - 1),
    ):
        _require_whole(name, getattr(config, name), least, most)
    for name, allowed in (("backend", BACKENDS), ("policy", SCHEDULING_POLICIES)):
        value = getattr(config, name)
        if value not in allowed:
            hint = nearest(str(value), allowed)
            raise RequestError(f"{name} is {value!r}; expected one of {', '.join(allowed)}.{hint}", param=name)
    if share_tokens(config.kv_dtype) > 1 and RECENT_TOKENS % config.page_size:
        raise RequestError(
            f"page_size is {config.page_size}, and kv_dtype {config.kv_dtype} takes pages that divide {RECENT_TOKENS}.",
            param="page_size",
        )
    if "kv_disk_size" in config.origins and config.kv_disk is None:
        raise RequestError(
            "kv_disk_size is given, but no folder: set kv_disk too, or MARTLET_KV_DISK.", param="kv_disk_size"
        )
    if not config.prefix_cache and config.origins.get("kv_disk", ("",))[0] is Origin.OPTION:
        raise RequestError("kv_disk keeps what the prefix cache holds, and prefix_cache is off.", param="kv_disk")
    if config.kv_disk is not None and not _is_path(config.kv_disk):
        raise RequestError(f"kv_disk is {config.kv_disk!r}; expected the path of a folder.", param="kv_disk")
    for name in ("trace", "capsule"):
        value = getattr(config, name)
        if value is not None and not _is_path(value):
            raise RequestError(f"{name} is {value!r}; expected the path of a file to write.", param=name)
    _require_drafter(config)
    _require_adapters(config.lora)
    for name in ("chat_template", "tokenizer_pre"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise RequestError(f"{name} is {value!r}; expected a text, or None for the model's own.", param=name)
    for name in ("offline", "oracle", "prefix_cache", "exact_turns"):
        if not isinstance(getattr(config, name), bool):
            raise RequestError(f"{name} is {getattr(config, name)!r}; expected True or False.", param=name)
    _validate_forms(config)
    stall = config.stall_ms
    if stall is not None and (isinstance(stall, bool) or not isinstance(stall, int | float) or not 0 < stall < 1e9):
        raise RequestError(f"stall_ms is {stall!r}; expected milliseconds, above 0 and below 1e9.", param="stall_ms")
    if config.max_step_tokens < config.max_seqs:
        raise RequestError(
            f"max_step_tokens is {config.max_step_tokens}, fewer than max_seqs, {config.max_seqs}: each running"
            " sequence needs a token in every step. Raise max_step_tokens or lower max_seqs.",
            param="max_step_tokens",
        )


def _validate_forms(config: EngineConfig) -> None:
    for name in ("string_limit", "item_limit"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name} is {value!r}; expected a whole number, 0 for no limit.", param=name)


def _require_adapters(lora: object) -> None:
    """Names, and paths that could be."""
    if lora is None:
        return
    if not isinstance(lora, Mapping):
        raise RequestError(f"lora is {lora!r:.80}; expected {{name: path}}.", param="lora")
    for name, path in lora.items():
        if not isinstance(name, str) or not name or not _is_path(path):
            raise RequestError(
                f"lora has {name!r:.80}: {path!r:.80}; expected a name and the path of an adapter.", param="lora"
            )


def _require_drafter(config: EngineConfig) -> None:
    draft: object = config.draft
    if not isinstance(draft, str) or not (draft in DRAFTERS or _names_model(draft)):
        hint = nearest(str(draft), DRAFTERS)
        raise RequestError(
            f"draft is {draft!r}; expected {', '.join(DRAFTERS)}, model=PATH, eagle=PATH or medusa=PATH.{hint}",
            param="draft",
        )


def _names_model(draft: str) -> bool:
    """Whether it is a drafter with a path."""
    kind, _, path = draft.partition("=")
    return kind in ("model", "eagle", "medusa") and _is_path(path)


def _is_path(value: object) -> bool:
    """Whether a system could have a file of this name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _require_whole(name: str, value: object, least: int, most: int) -> None:
    if value is None and name in ("max_context", "kv_memory", "seed", "max_waiting", "max_waiting_tokens"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} is {value!r}; expected a whole number from {least:,} to {most:,}.", param=name)
