"""Answer a prompt, streaming it to stdout.

Read `speed.py` next: the line about speed at the end.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from martlet.commands.arguments import (
    MODEL_HELP,
    add_answer_options,
    add_sampling_options,
    only_lora,
    open_llm,
    sampling_options,
)
from martlet.commands.common import print_settings, read_text, show_warnings
from martlet.commands.speed import process_age_s, speed_lines
from martlet.config import Origin, Setting
from martlet.errors import RequestError

if TYPE_CHECKING:
    from martlet.engine.outputs import Logprob, RequestOutput
    from martlet.llm import LLM, Stream

DEFAULT_MAX_TOKENS = 512


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("prompt", nargs="?", help='the prompt; "-" or none reads stdin')
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--chat", action="store_true", help="write the prompt with the chat template (default if the"
                      " model has one)")  # fmt: skip
    mode.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")
    parser.add_argument("--system", metavar="TEXT", help="a system message (with the chat template)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    parser.add_argument("-v", "--verbose", action="store_true", help="show start-up times, settings and memory")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the answer only")
    add_answer_options(parser)
    add_sampling_options(parser, max_tokens=f"{DEFAULT_MAX_TOKENS}, or what the context holds")


def execute(args: Namespace) -> int:
    if args.raw and args.system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out.", param="system")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not args.json:
            raise RequestError(f"--{name.replace('_', '-')} is shown in the JSON object only: add --json.", param=name)
    params, prompt = sampling_options(args), read_text(args.prompt)
    with open_llm(args) as llm:
        chat = not args.raw and (args.chat or args.system is not None or llm.chat_template_note is None)
        if not args.quiet:
            show_warnings(llm, chat=chat, notes=args.verbose)
        with _start(llm, args, prompt, params, chat) as stream:
            if args.verbose:
                _print_start(llm, _settings(stream.output, args))
            first_s = _write(stream, quiet=args.json)
            output = stream.output
        if args.json:
            print(json.dumps(_as_json(output, _settings(output, args)), ensure_ascii=False))
        if args.verbose and first_s is not None:
            print(f"first token {first_s:.2f} s after the process started", file=sys.stderr)
        if not args.quiet:
            for line in speed_lines(llm, output):
                print(line, file=sys.stderr)
        if args.explain_cache and output.cache is not None:
            print(output.cache.explain(), file=sys.stderr)
    return 0


def _start(llm: LLM, args: Namespace, prompt: str, params: dict[str, Any], chat: bool) -> Stream:
    if chat:
        messages = [{"role": "system", "content": args.system}] if args.system is not None else []
        messages.append({"role": "user", "content": prompt})
        text, ids = llm.chat_prompt(messages)
    else:
        text, ids = prompt, llm.get_tokenizer().encode(prompt)
    params.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, llm.plan.context - len(ids))))
    return llm.stream({"prompt": text, "prompt_token_ids": ids}, params, lora_request=only_lora(args))


def _write(stream: Stream, quiet: bool) -> float | None:
    """Write the pieces as they come; return when the first came, in s since the process began."""
    first_s, last = None, "\n"
    for piece in stream:
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
        last = piece
        if first_s is None:
            first_s = process_age_s()
    if not quiet and not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()  # before what comes on stderr
    return first_s


def _settings(output: RequestOutput, args: Namespace) -> tuple[Setting, ...]:
    """The sampling settings with their origins; this command's own limit is not the user's."""
    if args.max_tokens is not None:
        return output.settings
    note = "the command's, within the context"
    return tuple(
        Setting(s.name, s.value, Origin.DEFAULT, note) if s.name == "max_tokens" else s for s in output.settings
    )


def _print_start(llm: LLM, sampling: tuple[Setting, ...]) -> None:
    phases = ", ".join(f"{phase.name} {phase.seconds:.3f} s" for phase in llm.start_timeline)
    print(f"start: {phases}; {process_age_s():.2f} s since the process started", file=sys.stderr)
    print_settings("settings", llm.config.settings())
    print_settings("sampling", sampling)
    print(f"memory: {llm.plan.explain()}", file=sys.stderr)


def _as_json(output: RequestOutput, settings: tuple[Setting, ...]) -> dict[str, object]:
    [answer] = output.outputs
    metrics = output.metrics
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "logprobs": _logprobs(answer.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "settings": {s.name: {"value": s.value, "origin": str(s.origin)} for s in settings},
        "metrics": metrics and metrics.as_dict(),
        "cache": output.cache and output.cache.explain(),
        "prefill_tokens_per_s": metrics and metrics.prefill_tokens_per_s,
        "decode_tokens_per_s": metrics and metrics.decode_tokens_per_s,
        "created": time.time(),
    }


def _logprobs(entries: Sequence[Mapping[int, Logprob] | None] | None) -> list[object] | None:
    if entries is None:
        return None
    return [
        entry and {str(i): {"logprob": p.logprob, "rank": p.rank, "token": p.decoded_token} for i, p in entry.items()}
        for entry in entries
    ]
