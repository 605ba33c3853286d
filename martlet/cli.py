"""The command line (read `commands/run.py` next, the command that matters).

Start-up is part of the product: `martlet run` shows its first token within a second. So the parser is argparse, a
command's module is imported only when that command is asked for, and rich only where a table or a bar is drawn.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper

from martlet.errors import MartletError, nearest

__all__ = ["COMMANDS", "TWO_WORDS", "command_of", "main", "parser_of"]

COMMANDS = {  # the module commands/<name>.py has add_arguments(parser) and execute(args) -> exit status
    "run": "answer a prompt",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP, as OpenAI's API",
    "pull": "fetch a model",
    "list": "list the models that are here",
    "schema": "say what of a JSON Schema is enforced",
    "inspect": "show a model file: metadata, tensors, the memory it needs",
    "tokenize": "show the tokens of a text",
    "bench": "measure prefill and decode, many requests, or a server",
    "replay": "run a capsule again, step by step",
    "perplexity": "measure how well a model predicts a text",
    "kvcheck": "show what a compressed KV cache costs in quality, on your text",
    "plan": "show memory by context, and the speed to expect on this machine",
    "cache": "list or remove the KV pages that are kept on disk",
    "doctor": "show what Martlet sees of this machine, and what it decides from it",
    "warmup": "compile the kernels ahead of the first use",
    "version": "show the version",
}
TWO_WORDS = {("bench", "serve"): "bench_serve"}  # commands with arguments of their own under another's name
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage."""
    _prepare_streams()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"martlet: {message}", file=sys.stderr)
        return _guarded(_run, list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name = "version" if arguments[0] in ("-V", "--version") else arguments[0]
    if name not in COMMANDS:
        print(f"martlet: there is no command {name!r}.{nearest(name, COMMANDS)} See martlet --help.", file=sys.stderr)
        return 2
    name, rest = command_of([name, *arguments[1:]])
    args = parser_of(name).parse_intermixed_args(rest)  # a prompt may come after the options
    return int(import_module(f"martlet.commands.{name}").execute(args) or 0)


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The module of a command, and the words after the command's."""
    if tuple(words[:2]) in TWO_WORDS:
        return TWO_WORDS[words[0], words[1]], list(words[2:])
    return words[0], list(words[1:])


def parser_of(name: str) -> ArgumentParser:
    """The parser of a command's arguments."""
    command = import_module(f"martlet.commands.{name}")
    parser = _Parser(
        prog=f"martlet {name.replace('_', ' ')}",
        description=(command.__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.usage = _short_usage(parser)
    return parser


class _Parser(ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line that says what is wrong, without the whole usage."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _short_usage(parser: ArgumentParser) -> str:
    """The arguments by name and "[options]": there are dozens, and the help lists them."""
    words = [action for action in parser._actions if not action.option_strings]
    return " ".join(["%(prog)s", *(f"[{a.dest}]" if a.nargs == "?" else a.dest for a in words), "[options]"])


def _prepare_streams() -> None:
    """Make streams that can be used whatever the caller's are: closed, or of an encoding that lacks our characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open as long as we run
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _guarded(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Turn what goes wrong into one line on stderr and an exit status."""
    try:
        status = run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        _discard_stdout()
        return 0
    except (MartletError, OSError, MemoryError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        found = str(error) or "there is not enough memory for that"
        print(f"martlet: {' '.join(found.split())}", file=sys.stderr)
        if isinstance(error, OSError):  # it may be stdout that has failed
            _discard_stdout()
        return 2 if getattr(error, "param", None) else 1


def _discard_stdout() -> None:
    """Let what is still buffered go nowhere, so that the end of the process does not fail on it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(["usage: martlet COMMAND …", "", *lines, "", "martlet COMMAND --help shows a command's options."])


if __name__ == "__main__":
    sys.exit(main())
