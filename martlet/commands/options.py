"""Options that commands share: the engine's and the sampler's (read `run.py` next, which uses them all).

The sampling options are made from the fields of `SamplingParams`, so that none can be missing or left behind; their
names are vLLM's, and llama.cpp's are accepted beside them.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.config import BACKENDS, Setting
from martlet.errors import RequestError
from martlet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from martlet.llm import LLM, LLMOptions

__all__ = [
    "add_engine_options",
    "add_sampling_options",
    "engine_options",
    "open_llm",
    "print_settings",
    "read_text",
    "resolve_model",
    "sampling_options",
    "show_download",
]

ALIASES = {  # llama.cpp's names
    "temperature": ("--temp",),
    "dynatemp_exponent": ("--dynatemp-exp",),
    "max_tokens": ("-n", "--n-predict", "--predict"),
    "typical_p": ("--typical",),
    "repetition_penalty": ("--repeat-penalty",),
    "penalty_last_n": ("--repeat-last-n",),
    "mirostat_tau": ("--mirostat-ent",),
    "mirostat_eta": ("--mirostat-lr",),
    "stop": ("-r", "--reverse-prompt"),
}
BAR = 30  # characters
NOT_OPTIONS = {"n", "best_of", "detokenize"}  # a terminal shows one answer, as text


def add_engine_options(parser: ArgumentParser) -> None:
    """The options of `LLM`."""
    group = parser.add_argument_group("engine")
    group.add_argument("-t", "--threads", type=int, help="threads (default: physical cores that may be used)")
    group.add_argument("-c", "--context", type=int, help="context in tokens (default: the model's, if it fits)")
    group.add_argument("--kv-dtype", choices=("f16", "f32"), help="type of the KV cache (default: f16)")
    group.add_argument("--backend", choices=BACKENDS, help="default: cpu")
    group.add_argument("--tokenizer-pre", metavar="NAME", help="override the model file's pre-tokenizer")
    group.add_argument("--chat-template", metavar="FILE", help="override the model file's chat template")
    group.add_argument("--offline", action="store_true", default=None, help="forbid every network connection")
    group.add_argument(
        "--oracle", action="store_true", default=None, help="check every operation against the reference (slow)"
    )


def add_sampling_options(parser: ArgumentParser) -> None:
    """An option for each field of `SamplingParams`."""
    group = parser.add_argument_group("sampling (left open: the model file's suggestion, else the default)")
    for field in fields(SamplingParams):
        if field.name in NOT_OPTIONS:
            continue
        names = [f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, ())]
        kind, default = str(field.type), f"default: {field.default!s}".replace("%", "%%")
        if kind == "bool":
            group.add_argument(names[0], dest=field.name, action=BooleanOptionalAction, default=None, help=default)
        elif kind.startswith("tuple["):
            item = int if "int" in kind else str
            help_text = f"may be given several times; {default}"
            group.add_argument(*names, dest=field.name, type=item, action="append", help=help_text)
        else:
            group.add_argument(*names, dest=field.name, type=_reader(kind), help=default)


def _reader(kind: str) -> Callable[[str], Any]:
    if "Mapping[" in kind or "dict[" in kind:
        return _pairs
    if "float" in kind:
        return float
    return int if "int" in kind else str


def _pairs(text: str) -> dict[int, float]:
    """`5=-100,7=2.5`, or a JSON object with token ids as keys."""
    try:
        found = json.loads(text) if text.startswith("{") else dict(part.split("=") for part in text.split(","))
        return {int(key): float(value) for key, value in found.items()}
    except (ValueError, AttributeError):
        raise ArgumentTypeError(f"{text!r} is not of the form ID=BIAS,ID=BIAS") from None


def sampling_options(args: Namespace) -> dict[str, Any]:
    """What was given, under `SamplingParams`' names."""
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    if given["samplers"]:  # also as llama.cpp takes them: top_k;top_p;temperature
        given["samplers"] = [name for part in given["samplers"] for name in part.replace(",", ";").split(";")]
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
    }


def engine_options(args: Namespace) -> LLMOptions:
    """What was given, under `LLM`'s names."""
    template = args.chat_template
    return {
        "threads": args.threads,
        "max_context": args.context,
        "kv_dtype": args.kv_dtype,
        "backend": args.backend,
        "offline": args.offline,
        "oracle": args.oracle,
        "chat_template": None if template is None else Path(template).read_text(encoding="utf-8"),
        "tokenizer_pre": args.tokenizer_pre,
    }


def resolve_model(name: str, offline: bool | None) -> str:
    """The path of a model given as a path or by its name in the catalogue."""
    if offline:
        from martlet.offline import forbid_network

        forbid_network()
    if Path(name).exists():
        return name
    from martlet.hub import resolve  # only where there is a name to look up

    return str(resolve(name, offline=bool(offline), progress=show_download if sys.stderr.isatty() else None))


def show_download(done: int, total: int) -> None:
    """A bar on stderr for a model that is fetched."""
    filled = BAR * done // max(1, total)
    line = f"\r[{'#' * filled}{' ' * (BAR - filled)}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    print(line, end="\n" if done >= total else "", file=sys.stderr, flush=True)


def open_llm(args: Namespace, **changed: Any) -> LLM:
    """Load the model that the arguments name, with a line on stderr while kernels compile for the first time."""
    from martlet.llm import LLM  # the whole engine: only for commands that run a model

    options = engine_options(args)
    options.update(changed)  # type: ignore[typeddict-item]
    return LLM(resolve_model(args.model, args.offline), progress=_show_progress, **options)


def _show_progress(phase: str, done: int, total: int) -> None:
    if phase != "map" and sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{phase}: {done} of {total}\x1b[K", end=end, file=sys.stderr, flush=True)


def read_text(text: str | None, param: str = "prompt") -> str:
    """A text given as an argument, or from stdin where the argument is "-" or missing; RequestError if not UTF-8."""
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise RequestError(f"There is no {param}: give it as an argument, or through stdin.", param=param)
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}; convert it first, with iconv for"
            " example.",
            param=param,
        ) from None


def print_settings(title: str, settings: tuple[Setting, ...]) -> None:
    """Effective settings with their origins, on stderr."""
    print(f"{title}:", file=sys.stderr)
    for setting in settings:
        note = f": {setting.note}" if setting.note else ""
        print(f"  {setting.name:<24} {setting.value!s:<20} ({setting.origin}{note})", file=sys.stderr)
