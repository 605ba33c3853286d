"""The engine's settings: resolved once, frozen, each with its origin (read `machine.py` next).

This is the only module that reads the environment. Beside the variables that set an option, there
are

    MARTLET_HOME      folder of models and caches, else $XDG_CACHE_HOME/martlet, ~/.cache/martlet
    MARTLET_ISA       instruction set to compile kernels for, in place of the processor's best
    MARTLET_API_KEY   a key that `martlet serve` requires; several with commas between them

The caller's option wins over the environment, the environment over the model's file, and the file
over the default. What depends on the machine (threads, the context that fits) is decided from
measured limits.
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
from martlet.kv_types import RECENT_TOKENS, parse_kv_types, share_granularity
from martlet.machine import MachineLimits, choose_threads, read_machine
from martlet.options import Option, option, options_of, refuse
from martlet.structured import ITEM_LIMIT, STRING_LIMIT

PAGE_SIZE = 32  # tokens of a KV page: the tile of the attention kernels
BACKENDS = ("cpu", "reference", "null")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest", "prefix", "fair", "deadline")
DRAFTERS = ("auto", "ngram", "mtp", "off")
DRAFTERS_OF_A_FILE = ("model", "eagle", "medusa")  # written METHOD=PATH
ORACLE_STEP_TOKENS = 64


class Origin(StrEnum):
    """Where a setting's value came from."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    MODEL_FILE = "model file"
    MACHINE = "machine"
    DRAWN = "drawn"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """An effective setting: its value, where it came from, and a word on why."""

    name: str
    value: object
    origin: Origin
    note: str = ""


def _model(name: str, value: object) -> str:
    """A path of a model; also as a Path."""
    if not isinstance(value, str | Path) or not str(value):
        raise RequestError("No model: give the path of a GGUF file or of a Hugging Face folder.", param=name)
    return str(value)


def _adapters(name: str, value: object) -> Mapping[str, str]:
    """Adapters by name, with paths that could be."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "{name: path}")
    path_of = Option(help="", name=name, path="an adapter").checked
    for adapter in value:
        if not isinstance(adapter, str) or not adapter:
            raise refuse(name, adapter, "a name for each adapter")
    return {adapter: path_of(path) for adapter, path in value.items()}


def _drafter(name: str, value: object) -> str:
    """A drafter, or one of those with a path."""
    if isinstance(value, str):
        method, _, path = value.partition("=")
        if value in DRAFTERS or (method in DRAFTERS_OF_A_FILE and path and "\0" not in path):
            return value
    files = [f"{method}=PATH" for method in DRAFTERS_OF_A_FILE]
    raise refuse(name, value, f"{', '.join((*DRAFTERS, *files[:-1]))} or {files[-1]}", DRAFTERS)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. `origins` has an entry for each field not at its default."""

    # fmt: off
    model: str = option(help="the path of a GGUF file or of a Hugging Face folder", check=_model)
    threads: int = option(1, "threads of the CPU backend", low=1, high=1024, environment="MARTLET_THREADS",
        group="engine", more_flags=("-t",), default_help="the physical cores that may be used")
    # None until the model is known
    max_context: int | None = option(None, "tokens of the context", low=1, high=1 << 31, group="engine",
        more_flags=("-c", "--context"), default_help="the model's, if it fits")
    kv_dtype: str = option("f16", "type of the KV cache: f16, f32, q8 or q4; by layer, as in q4,q8:3,q8:17",
        check=lambda name, value: str(parse_kv_types(value)), group="engine", metavar="TYPE")
    kv_memory: int | None = option(None, "bytes of KV pages, as in 512M or 2G", low=1, high=1 << 62, unit="bytes",
        group="engine", default_help="a quarter of the free memory, at least one context")
    max_seqs: int = option(16, "sequences that run at a time", low=1, high=1 << 16, group="engine")
    max_step_tokens: int = option(512, "tokens of a step, over all sequences", low=1, high=1 << 20, group="engine")
    kv_disk: str | None = option(None, "keep KV pages in this folder over restarts; they reveal prompts and answers",
        path="a folder", environment="MARTLET_KV_DISK", group="engine", metavar="DIR")
    kv_disk_size: int = option(4 << 30, "most bytes of all files in that folder", low=1, high=1 << 62, unit="bytes",
        group="engine")
    packed: str | None = option(None, "keep weights as packed in this folder: they are mapped at the next start",
        path="a folder", environment="MARTLET_PACKED", group="engine", metavar="DIR")
    backend: str = option("cpu", "what computes: cpu, reference (NumPy, slow), or null (no numbers, for tests)",
        choices=BACKENDS, group="engine")
    page_size: int = option(PAGE_SIZE, "tokens of a KV page", low=1, high=1 << 16)
    tokenizer_pre: str | None = option(None, "use this pre-tokenizer in place of the model file's", group="engine",
        metavar="NAME")
    chat_template: str | None = option(None, "use this chat template (Jinja) in place of the model file's",
        group="engine", metavar="FILE")
    prefix_cache: bool = option(True, "keep the KV pages of prompts for later prompts that begin alike",
        group="engine")
    lora: Mapping[str, str] | None = option(None, "adapters by name: PEFT folders or GGUF files", check=_adapters)
    policy: str = option("fcfs", "which request runs first when there is not room for all",
        choices=SCHEDULING_POLICIES, group="engine")
    stall_ms: float | None = option(None, "longest step while an answer is being written", above=0, high=1e9,
        unit="milliseconds", group="engine", default_help="2.25 times a step without prompts, up to 12 times where many wait")
    string_limit: int = option(STRING_LIMIT,
        "most bytes of a JSON string that its schema does not bound; 0: no limit", low=0, group="engine")
    item_limit: int = option(ITEM_LIMIT,
        "most items of a JSON array or object that its schema does not bound; 0: no limit", low=0, group="engine")
    draft: str = option("auto",
        "draft tokens and verify several in a step: auto (where it pays), ngram (from the text), off, mtp (the model's"
        " own layers), model=NAME (a smaller model of the same vocabulary), eagle=PATH or medusa=PATH (a trained head;"
        " eagle=smollm2-135m comes with Martlet)", check=_drafter, group="engine", metavar="HOW")
    max_waiting: int | None = option(None, "refuse requests while N sequences wait", low=1, high=1 << 31,
        group="engine", default_help="no limit; serve: 256")
    max_waiting_tokens: int | None = option(None, "refuse requests while prompts of N tokens wait", low=1,
        high=1 << 40, group="engine", default_help="no limit; serve: 4,194,304")
    seed: int | None = option(None, "what requests without a seed derive theirs from", low=-(1 << 63),
        high=(1 << 64) - 1, default_help="the operating system")
    exact_turns: bool = option(True,
        "the next prompt of a chat repeats the tokens of its answers, not a new cut of their text", group="chat")
    offline: bool = option(False, "forbid every network connection", environment="MARTLET_OFFLINE", group="engine")
    oracle: bool = option(False, "check every operation against the reference (slow)", group="engine")
    trace: str | None = option(None, "write a timeline of steps and requests, for ui.perfetto.dev",
        path="a file to write", group="seeing it", metavar="FILE")
    capsule: str | None = option(None, "write a file with which `martlet replay` runs all this again",
        path="a file to write", group="seeing it", metavar="FILE")
    # fmt: on
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


def resolve_config(
    options: Mapping[str, Any], environ: Mapping[str, str] | None = None, machine: MachineLimits | None = None
) -> EngineConfig:
    """Decide every setting from the options (None: not given), the environment and the machine.

    Raises RequestError, naming the option, for an unknown key or a wrong value.
    """
    known = options_of(EngineConfig)
    for name in options:
        if name not in known:
            raise RequestError(f"There is no option {name!r}.{nearest(name, known)}", param=name)
    given = {name: value for name, value in options.items() if value is not None}
    given.setdefault("model", None)
    origins = dict.fromkeys(given, (Origin.OPTION, ""))
    for name, value in _from_environment(os.environ if environ is None else environ).items():
        if name not in given:
            given[name] = value
            origins[name] = (Origin.ENVIRONMENT, known[name].environment)
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
    config = EngineConfig(**{name: known[name].checked(value) for name, value in given.items()}, origins=origins)
    _check_together(config)
    return config


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of models and caches: MARTLET_HOME, or `martlet` in XDG_CACHE_HOME or ~/.cache."""
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


def environment_isa(environ: Mapping[str, str] | None = None) -> str | None:
    """The instruction set in MARTLET_ISA (`ops/cpu/simd/isa.py` has the names); None: the best."""
    environ = os.environ if environ is None else environ
    return environ.get("MARTLET_ISA", "").strip().lower() or None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The options that the environment sets, by name."""
    return {
        name: option.from_environment(text)
        for name, option in options_of(EngineConfig).items()
        if option.environment and (text := environ.get(option.environment, "")).strip()
    }


def _check_together(config: EngineConfig) -> None:
    """RequestError for options that contradict each other."""
    if share_granularity(config.kv_dtype) > 1 and RECENT_TOKENS % config.page_size:
        raise RequestError(
            f"page_size is {config.page_size}; with kv_dtype {config.kv_dtype} it must divide {RECENT_TOKENS}.",
            param="page_size",
        )
    if "kv_disk_size" in config.origins and config.kv_disk is None:
        raise RequestError(
            "kv_disk_size is given, but no folder: set kv_disk too, or MARTLET_KV_DISK.", param="kv_disk_size"
        )
    if not config.prefix_cache and config.origins.get("kv_disk", ("",))[0] is Origin.OPTION:
        raise RequestError("kv_disk keeps the pages of the prefix cache, and prefix_cache is off.", param="kv_disk")
    if config.max_step_tokens < config.max_seqs:
        raise RequestError(
            f"max_step_tokens is {config.max_step_tokens}, fewer than max_seqs, {config.max_seqs}: each running"
            " sequence needs a token in every step. Raise max_step_tokens or lower max_seqs.",
            param="max_step_tokens",
        )
