"""The command line's options, made from `martlet/options.py` (read `common.py` next).

`add_options` gives a parser every option of a group; sampling options also have llama.cpp's names.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from martlet.commands.common import read_file, read_template, resolve_draft, resolve_model, show_progress
from martlet.config import EngineConfig
from martlet.errors import RequestError
from martlet.options import Option, options_of
from martlet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

    from martlet.llm import LLM, LLMOptions

MODEL_HELP = "a GGUF file, a Hugging Face folder, or a name from `martlet list`"


def add_options(
    parser: ArgumentParser,
    settings: type,
    group: str,
    defaults: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> _ArgumentGroup:
    """Add the options of a group; `defaults` replaces the defaults in the help, by name."""
    added = parser.add_argument_group(group)
    for name, option in options_of(settings).items():
        if option.group == group and name not in without:
            default = (defaults or {}).get(name, option.shown_default)
            again = "; may be given several times" if option.type is tuple else ""
            text = f"{option.help}{again}{f' (default: {default})' if default else ''}".replace("%", "%%")
            arguments: dict[str, Any] = {"dest": name, "default": None, "help": text}
            if option.type is bool:
                added.add_argument(*option.flags, action=BooleanOptionalAction, **arguments)
                continue
            read, metavar = _reader(option)
            if option.type is tuple:
                arguments["action"] = "append"
            added.add_argument(*option.flags, type=read, metavar=option.metavar or metavar, **arguments)
    return added


def _reader(option: Option) -> tuple[Callable[[str], Any], str]:
    """What turns an option's text into its value, and the name of that value in the help."""
    if option.type is Mapping:
        return _pairs, "ID=BIAS,…"
    if option.type is tuple:
        return (_number(int, "token id"), "ID") if "token_ids" in option.name else (str, "TEXT")
    if option.unit == "bytes":
        return read_size, "SIZE"
    if option.type is int:
        return _number(int, option.wanted), "N"
    if option.type is float:
        return _number(float, option.wanted), "S" if option.unit == "seconds" else "X"
    return str, "|".join(option.choices) or "TEXT"


def _number(type_: type, wanted: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return type_(text)
        except ValueError:
            raise ArgumentTypeError(f"found {text!r}, expected {wanted}") from None

    return read


def read_size(text: str) -> int:
    """A number of bytes, with K, M, G or T for powers of 1,024: 512M, 2G, 1.5GiB.

    Raises ArgumentTypeError.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size; expected bytes, as 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))


def _pairs(text: str) -> dict[int, float]:
    """`5=-100,7=2.5`, or a JSON object with token ids as keys."""
    try:
        pairs = json.loads(text) if text.startswith("{") else dict(pair.split("=") for pair in text.split(","))
        return {int(key): float(value) for key, value in pairs.items()}
    except (ValueError, AttributeError, TypeError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is not of the form ID=BIAS,ID=BIAS") from None


def given_options(args: Namespace, settings: type) -> dict[str, Any]:
    """The given options of a dataclass by name, checked. RequestError for a wrong value."""
    given = {}
    for name, option in options_of(settings).items():
        value = getattr(args, name, None)
        if value is not None:
            given[name] = option.checked(tuple(value) if isinstance(value, list) else value)
    return given


# -- the engine ------------------------------------------------------------------------------------
def add_engine_options(parser: ArgumentParser, context: str = "") -> None:
    """The options of `LLM`; `context` says how many tokens are taken if none are given."""
    add_options(parser, EngineConfig, "engine", {"max_context": context} if context else None)


def add_watch_options(parser: ArgumentParser) -> None:
    """Options that show what the engine did."""
    add_options(parser, EngineConfig, "seeing it")


def add_offline_option(parser: ArgumentParser) -> None:
    """--offline alone, for commands without an engine."""
    offline = options_of(EngineConfig)["offline"]
    parser.add_argument(*offline.flags, action=BooleanOptionalAction, default=None, help=offline.help)


def engine_options(args: Namespace) -> LLMOptions:
    """The engine's options that were given, under `LLM`'s names; those of a file are read.

    Raises RequestError for a wrong value.
    """
    template, draft = args.chat_template, args.draft
    args = Namespace(**{name: value for name, value in vars(args).items() if name not in ("model", "seed")})
    args.chat_template = None if template is None else read_template(Path(template))
    given = given_options(args, EngineConfig)
    if draft is not None:
        given["draft"] = resolve_draft(draft, args.offline)
    return cast("LLMOptions", given)


def open_llm(args: Namespace, **changed: Any) -> LLM:
    """Load the model that the arguments name; `changed` options replace theirs."""
    from martlet.llm import LLM  # the whole engine: only for commands that run a model

    options = engine_options(args)
    if (path := only_lora(args)) is not None:
        options["lora"] = {path: path}
    options.update(changed)  # type: ignore[typeddict-item]
    return LLM(resolve_model(args.model, args.offline), progress=show_progress, **options)


def add_answer_options(parser: ArgumentParser) -> None:
    """Options of an engine that answers, with one adapter or none (see `only_lora`)."""
    add_engine_options(parser)
    text = "answer with this adapter of the model: a PEFT folder or a GGUF file"
    parser.add_argument("--lora", dest="loras", action="append", metavar="PATH", help=text)
    add_watch_options(parser)
    explain = "say after an answer how much of the prompt was cached, and why not more"
    parser.add_argument("--explain-cache", action="store_true", help=explain)


def only_lora(args: Namespace) -> str | None:
    """The adapter that was given; RequestError for two."""
    paths: list[str] = getattr(args, "loras", None) or []
    if len(paths) > 1:
        raise RequestError(f"--lora is given {len(paths)} times; answers have one adapter.", param="lora")
    return paths[0] if paths else None


def named(text: str) -> tuple[str, str]:
    """NAME=PATH, of an adapter or a model; raises ArgumentTypeError."""
    name, equals, path = text.partition("=")
    if not (name and equals and path) or not all(c.isprintable() and c != "," for c in name):
        raise ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, path


# -- sampling --------------------------------------------------------------------------------------
def add_sampling_options(parser: ArgumentParser, max_tokens: str, without: Collection[str] = ()) -> None:
    """The options of `SamplingParams`; `max_tokens` is the help's text for its default."""
    group = options_of(SamplingParams)["max_tokens"].group
    add_options(parser, SamplingParams, group, {"max_tokens": max_tokens}, without)
    if "structured" in without:
        return
    form = parser.add_argument_group("structured output (docs/structured.md)").add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that meets this schema")
    form.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    form.add_argument("--regex", metavar="PATTERN", help="the whole answer matches this regular expression")
    form.add_argument("--grammar", metavar="FILE", help="the answer is a text of this grammar: GBNF, or Lark's EBNF")
    choice = "the answer is one of these; give it several times"
    form.add_argument("--choice", metavar="TEXT", action="append", help=choice)


def sampling_options(args: Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by name. RequestError for a wrong value."""
    args = Namespace(**vars(args))
    if getattr(args, "samplers", None):  # also as llama.cpp takes them: top_k;top_p;temperature
        args.samplers = [step for text in args.samplers for step in text.replace(",", ";").split(";")]
    args.structured = _structured(args)
    return given_options(args, SamplingParams)


def _structured(args: Namespace) -> dict[str, Any] | None:
    """The form that was given, as `Structured` takes it."""
    for name, field in (("json_schema", "json"), ("grammar", "grammar")):
        if getattr(args, name, None) is not None:
            return {field: read_file(getattr(args, name), "structured")}
    if getattr(args, "json_object", False):
        return {"json_object": True}
    return next(
        ({name: getattr(args, name)} for name in ("regex", "choice") if getattr(args, name, None) is not None), None
    )
