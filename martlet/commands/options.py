"""Options that commands share: the engine's and the sampler's (read `run.py` next, which uses them all).

The sampling options are made from the fields of `SamplingParams`, so that none can be missing or left behind; their
names are vLLM's, and llama.cpp's are accepted beside them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.commands.drafting import add_draft_options
from martlet.commands.forms import add_limit_options, add_structured_options, structured_options
from martlet.commands.lora import only_lora
from martlet.config import BACKENDS, SCHEDULING_POLICIES, Setting, resolve_config
from martlet.errors import RequestError
from martlet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

    from martlet.llm import LLM, LLMOptions

__all__ = [
    "add_engine_options",
    "add_sampling_options",
    "add_watch_options",
    "engine_options",
    "heed_offline",
    "open_llm",
    "print_settings",
    "read_file",
    "read_size",
    "read_text",
    "resolve_draft",
    "resolve_model",
    "sampling_options",
    "show_download",
    "show_progress",
    "show_warnings",
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
    "draft_tokens": ("--draft-max", "--draft-n"),
}
MEANINGS = {
    "max_tokens": "generate at most N tokens",
    "min_tokens": "generate at least N tokens before the answer may end",
    "seed": "the same choices again with the same N (default: another at each run)",
    "stop": "end the answer before this text",
    "stop_token_ids": "end the answer at this token",
    "include_stop_str_in_output": "keep the text of --stop in the answer",
    "ignore_eos": "never sample a token that ends an answer",
    "logit_bias": "added to the logits of tokens; -100 bans",
    "allowed_token_ids": "sample no other token than these",
    "bad_words": "never generate this text",
    "no_repeat_ngram_size": "never repeat a sequence of N tokens; 0: off",
    "samplers": "the steps in order, with ; or , between them",
    "repetition_penalty": "divides the logits of tokens seen; 1: off",
    "presence_penalty": "subtracted from the logits of generated tokens; 0: off",
    "frequency_penalty": "the same, times how often; 0: off",
    "penalty_last_n": "tokens that the penalties look back on; -1: all",
    "dry_multiplier": "strength of DRY, against repeated sequences; 0: off",
    "dry_base": "how fast DRY grows with the length of the repetition",
    "dry_allowed_length": "repetitions up to this length are free",
    "dry_penalty_last_n": "tokens that DRY looks back on; -1: all",
    "dry_sequence_breakers": "a sequence ends at this text",
    "top_n_sigma": "keep logits within X standard deviations of the best; 0: off",
    "top_k": "keep the N best tokens; 0: all",
    "typical_p": "keep the most typical tokens of this probability in all; 1: off",
    "top_p": "keep the best tokens of this probability in all; 1: off",
    "min_p": "keep tokens of X times the best one's probability; 0: off",
    "xtc_probability": "how often XTC removes the likeliest tokens; 0: off",
    "xtc_threshold": "probability from which XTC removes them",
    "temperature": "below 1 sharper, above 1 flatter; 0: always the best token",
    "dynatemp_range": "the temperature moves by up to X with the entropy; 0: off",
    "dynatemp_exponent": "how the entropy moves it",
    "mirostat": "2: mirostat v2 in place of the steps that truncate; 0: off",
    "mirostat_tau": "the surprise, in bits, that mirostat aims at",
    "mirostat_eta": "how fast mirostat adapts",
    "logprobs": "log-probabilities of the N best tokens, with --json; -1: of all",
    "prompt_logprobs": "the same for the prompt's tokens",
    "logprobs_mode": "before (raw; allowed: of tokens that may be sampled) or after (processed) the sampling steps",
    "skip_special_tokens": "leave the text of control tokens out",
    "draft_tokens": "guess N tokens at a time, whether it pays or not; 0: none (default: as many as pay)",
    "truncate_prompt_tokens": "keep the last N tokens of the prompt; -1: what fits",
}
BAR = 30  # characters
MAX_TEMPLATE = 4 << 20  # bytes
NOT_OPTIONS = {"n", "best_of", "detokenize", "structured"}  # a terminal shows one answer, as text


def add_engine_options(parser: ArgumentParser, context: str = "the model's, if it fits") -> None:
    """The options of `LLM`; `context` says what is taken where that one is not given."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "-t", "--threads", type=int, metavar="N", help="threads (default: physical cores that may be used)"
    )
    group.add_argument(
        "-c",
        "--context",
        "--max-context",
        dest="context",
        type=int,
        metavar="N",
        help=f"context in tokens (default: {context})",
    )
    group.add_argument(
        "--kv-dtype",
        metavar="TYPE",
        help="type of the KV cache: f16 (the default), f32, q8 or q4; by layer, as q4,q8:3,q8:17",
    )
    group.add_argument(
        "--kv-memory",
        type=read_size,
        metavar="SIZE",
        help="bytes of KV pages, as 512M or 2G (default: a quarter of what is free, at least one context)",
    )
    group.add_argument("--max-seqs", type=int, metavar="N", help="sequences that run at a time (default: 16)")
    group.add_argument(
        "--max-step-tokens", type=int, metavar="N", help="tokens of a step, over all sequences (default: 512)"
    )
    group.add_argument(
        "--kv-disk",
        metavar="DIR",
        help="keep KV pages in this folder, over restarts (they tell what was asked and answered)",
    )
    group.add_argument(
        "--kv-disk-size", type=read_size, metavar="SIZE", help="bytes of all files there, as 512M or 2G (default: 4G)"
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="cpu (the default), reference (NumPy, slow), or null (no numbers: for tests of all the rest)",
    )
    group.add_argument("--tokenizer-pre", metavar="NAME", help="override the model file's pre-tokenizer")
    group.add_argument("--chat-template", metavar="FILE", help="override the model file's chat template")
    group.add_argument(
        "--prefix-cache",
        action=BooleanOptionalAction,
        default=None,
        help="keep what was computed for prompts that begin alike (default: yes)",
    )
    add_scheduling_options(group)
    group.add_argument("--offline", action="store_true", default=None, help="forbid every network connection")
    group.add_argument(
        "--oracle", action="store_true", default=None, help="check every operation against the reference (slow)"
    )


def add_scheduling_options(group: _ArgumentGroup) -> None:
    """Who runs when several requests want to, and whose next tokens are guessed."""
    group.add_argument(
        "--policy", choices=SCHEDULING_POLICIES, help="who runs first when there is not room for all (default: fcfs)"
    )
    group.add_argument(
        "--stall-ms",
        type=float,
        metavar="X",
        help="longest step in milliseconds while an answer runs (default: three times one without prompts)",
    )
    add_limit_options(group)
    add_draft_options(group)
    group.add_argument("--max-waiting", type=int, metavar="N", help="refuse requests when N sequences wait")
    group.add_argument(
        "--max-waiting-tokens", type=int, metavar="N", help="refuse requests when prompts of N tokens wait"
    )


def read_size(text: str) -> int:
    """A number of bytes, with K, M, G or T for powers of 1,024: 512M, 2G, 1.5GiB."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size; expected bytes, as 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))


def add_watch_options(parser: ArgumentParser) -> None:
    """Options that show what the engine did."""
    group = parser.add_argument_group("seeing it")
    group.add_argument("--trace", metavar="FILE", help="write a timeline of steps and requests, for ui.perfetto.dev")
    group.add_argument("--capsule", metavar="FILE", help="write a file with which `martlet replay` runs all this again")


def add_sampling_options(parser: ArgumentParser, max_tokens: str, without: Collection[str] = ()) -> None:
    """An option for each field of `SamplingParams`; `max_tokens` says what is done where that one is not given."""
    group = parser.add_argument_group("sampling (left open: the model file's suggestion, else the default)")
    for field in fields(SamplingParams):
        if field.name in NOT_OPTIONS or field.name in without:
            continue
        names = [f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, ())]
        default = max_tokens if field.name == "max_tokens" else field.default
        text = MEANINGS[field.name] + (
            "" if default is None or default is False or default == () else f" (default: {_said(default)})"
        )
        text, kind = text.replace("%", "%%"), str(field.type)
        if kind == "bool":
            group.add_argument(names[0], dest=field.name, action=BooleanOptionalAction, default=None, help=text)
        elif kind.startswith("tuple["):
            item, metavar = (int, "ID") if "int" in kind else (str, "TEXT")
            text += "; may be given several times"
            group.add_argument(*names, dest=field.name, type=item, action="append", metavar=metavar, help=text)
        else:
            reader, metavar = _reader(kind)
            group.add_argument(*names, dest=field.name, type=reader, metavar=metavar, help=text)
    if "structured" not in without:
        add_structured_options(parser)


def _said(default: object) -> str:
    if isinstance(default, tuple):
        return ";".join(default) if default == SamplingParams().samplers else " ".join(map(repr, default))
    return "yes" if default is True else str(default)


def _reader(kind: str) -> tuple[Callable[[str], Any], str]:
    if "Mapping[" in kind or "dict[" in kind:
        return _pairs, "ID=BIAS,…"
    if "float" in kind:
        return float, "X"
    if "int" in kind:
        return int, "N"
    return str, "raw|processed"


def _pairs(text: str) -> dict[int, float]:
    """`5=-100,7=2.5`, or a JSON object with token ids as keys."""
    try:
        found = json.loads(text) if text.startswith("{") else dict(part.split("=") for part in text.split(","))
        return {int(key): float(value) for key, value in found.items()}
    except (ValueError, AttributeError, TypeError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is not of the form ID=BIAS,ID=BIAS") from None


def sampling_options(args: Namespace) -> dict[str, Any]:
    """What was given, under `SamplingParams`' names."""
    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    given["structured"] = structured_options(args)
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
        "kv_memory": args.kv_memory,
        "max_seqs": args.max_seqs,
        "max_step_tokens": args.max_step_tokens,
        "kv_disk": args.kv_disk,
        "kv_disk_size": args.kv_disk_size,
        "backend": args.backend,
        "offline": args.offline,
        "oracle": args.oracle,
        "prefix_cache": args.prefix_cache,
        "draft": resolve_draft(args.draft, args.offline),
        "policy": args.policy,
        "stall_ms": args.stall_ms,
        "max_waiting": args.max_waiting,
        "max_waiting_tokens": args.max_waiting_tokens,
        "string_limit": args.string_limit,
        "item_limit": args.item_limit,
        "exact_turns": getattr(args, "exact_turns", None),
        "chat_template": None if template is None else _read_template(Path(template)),
        "tokenizer_pre": args.tokenizer_pre,
        "trace": getattr(args, "trace", None),
        "capsule": getattr(args, "capsule", None),
    }


def _read_template(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_TEMPLATE + 1)  # not more: it may be a device, or the wrong file
    if not data or len(data) > MAX_TEMPLATE:
        found = f"more than {MAX_TEMPLATE:,} bytes" if data else "nothing"
        raise RequestError(f"{path} holds {found}; expected a chat template.", param="chat_template")
    return _utf8(data, str(path), "chat_template")


def _utf8(data: bytes, source: str, param: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}; convert it first, with iconv for"
            " example.",
            param=param,
        ) from None


def heed_offline(offline: bool | None) -> bool:
    """Whether the network is forbidden, by the option or the environment; if so, it is from here on."""
    forbidden = resolve_config({"model": "none", "offline": offline}).offline
    if forbidden:
        from martlet.offline import forbid_network

        forbid_network()
    return forbidden


def resolve_model(name: str, offline: bool | None) -> str:
    """The path of a model given as a path or by its name in the catalogue."""
    offline = heed_offline(offline)
    if Path(name).exists():
        return name
    from martlet.hub import resolve  # only where there is a name to look up

    return str(resolve(name, offline=offline, progress=show_download if sys.stderr.isatty() else None))


def resolve_draft(draft: str | None, offline: bool | None) -> str | None:
    """The option with the path of a model that it names."""
    how, is_named, name = (draft or "").partition("=")
    return f"model={resolve_model(name, offline)}" if how == "model" and is_named and name else draft


def show_download(done: int, total: int) -> None:
    """A bar on stderr for a model that is fetched."""
    filled = BAR * done // max(1, total)
    line = f"\r[{'#' * filled}{' ' * (BAR - filled)}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    print(line, end="\n" if done >= total else "", file=sys.stderr, flush=True)


def open_llm(args: Namespace, **changed: Any) -> LLM:
    """Load the model that the arguments name, with a line on stderr while kernels compile for the first time."""
    from martlet.llm import LLM  # the whole engine: only for commands that run a model

    options = engine_options(args)
    path = only_lora(args)
    options["lora"] = None if path is None else {path: path}
    options.update(changed)  # type: ignore[typeddict-item]
    return LLM(resolve_model(args.model, args.offline), progress=show_progress, **options)


def show_progress(phase: str, done: int, total: int) -> None:
    """A line on stderr while kernels compile for the first time."""
    if phase != "map" and sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{phase}: {done} of {total}\x1b[K", end=end, file=sys.stderr, flush=True)


def show_warnings(llm: LLM, *, chat: bool = True, notes: bool = False) -> None:
    """The model's warnings on stderr: without `chat` not those of the chat template, without `notes` not the small ones."""
    hidden = set() if notes else set(llm.get_tokenizer().notes)
    if not chat and llm.chat_template_note is not None:
        hidden.add(llm.chat_template_note)
    for warning in llm.warnings:
        if warning not in hidden:
            print(f"martlet: {warning}", file=sys.stderr)


def read_text(text: str | None, param: str = "prompt") -> str:
    """A text given as an argument, or from stdin where the argument is "-" or missing; RequestError if not UTF-8."""
    if text is not None and text != "-":
        try:
            return _utf8(os.fsencode(text), f"The {param}", param)  # whatever the locale has made of its bytes
        except UnicodeEncodeError:  # it has never been bytes
            return text
    if text is None and sys.stdin.isatty():
        raise RequestError(f"There is no {param}: give it as an argument, or through stdin.", param=param)
    return _utf8(sys.stdin.buffer.read(), "stdin", param)


def read_file(name: str) -> str:
    """The text of a file, or of stdin where the name is "-"; RequestError if it is not UTF-8."""
    return read_text("-", "file") if name == "-" else _utf8(Path(name).read_bytes(), name, "file")


def print_settings(title: str, settings: tuple[Setting, ...]) -> None:
    """Effective settings with their origins, on stderr."""
    print(f"{title}:", file=sys.stderr)
    for setting in settings:
        why = f"{setting.origin}: {setting.note}" if setting.note else str(setting.origin)
        print(f"  {setting.name:<26} {setting.value!s:<20} ({why})", file=sys.stderr)
