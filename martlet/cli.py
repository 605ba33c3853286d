"""The command line (read `commands/run.py` next, the command that matters).

Start-up is part of the product: `martlet run` shows its first token within a second. So the parser
is argparse, a command's module is imported only when that command is asked for, and rich only where
a table or a bar is drawn.
"""

import os
import shutil
import sys
import traceback
import warnings
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from types import ModuleType
from typing import NamedTuple

from martlet.errors import MartletError, nearest


class Command(NamedTuple):
    """What a command does, and where: a module of `commands/` and its two functions."""

    purpose: str
    module: str
    add_arguments: str = "add_arguments"  # (parser) -> None
    execute: str = "execute"  # (args) -> exit status


COMMANDS = {
    "run": Command("answer a prompt", "run"),
    "chat": Command("talk with a model", "chat"),
    "serve": Command("serve a model over HTTP, as OpenAI's and Anthropic's APIs", "serve"),
    "pull": Command("fetch a model", "models", "add_pull_arguments", "execute_pull"),
    "list": Command("list the models that are here", "models", "add_list_arguments", "execute_list"),
    "schema": Command("say what of a JSON Schema is enforced", "inspect", "add_schema_arguments", "execute_schema"),
    "inspect": Command("show a model file: metadata, tensors, the memory it needs", "inspect"),
    "tokenize": Command("show the tokens of a text", "inspect", "add_tokenize_arguments", "execute_tokenize"),
    "bench": Command("measure prefill and decode, or many requests at a time", "bench"),
    "bench serve": Command("put load on a server and measure its answers", "bench_serve"),
    "replay": Command("run a capsule again, step by step", "replay"),
    "perplexity": Command("measure how well a model predicts a text", "perplexity"),
    "kvcheck": Command("show what a compressed KV cache costs in quality, on your text", "kvcheck"),
    "plan": Command("show memory by context, and the speed to expect on this machine", "plan"),
    "cache": Command("list or remove the KV pages that are kept on disk", "cache"),
    "packed": Command("list or remove packed weights that are kept on disk", "packed"),
    "doctor": Command("show what Martlet sees of this machine, and what it decides from it", "doctor"),
    "warmup": Command("compile the kernels ahead of the first use", "doctor", "add_warmup_arguments", "execute_warmup"),
    "version": Command("show the version", "doctor", "add_version_arguments", "execute_version"),
}
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
    name, rest = split_command([name, *arguments[1:]])
    args = parser_of(name).parse_intermixed_args(rest)  # a prompt may come after the options
    command = COMMANDS[name]
    return int(getattr(_module(command), command.execute)(args) or 0)


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """A command's name, of two words if there is one, and the words after it."""
    n_words = 2 if " ".join(words[:2]) in COMMANDS and len(words) > 1 else 1
    return " ".join(words[:n_words]), list(words[n_words:])


def _module(command: Command) -> ModuleType:
    return import_module(f"martlet.commands.{command.module}")


def parser_of(name: str) -> ArgumentParser:
    """The parser of a command's arguments."""
    command = COMMANDS[name]
    purpose = f"{command.purpose[0].upper()}{command.purpose[1:]}."
    parser = _Parser(prog=f"martlet {name}", description=purpose, allow_abbrev=False, formatter_class=_Formatter)
    getattr(_module(command), command.add_arguments)(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.usage = _short_usage(parser)
    return parser


class _Formatter(HelpFormatter):
    """Lines of at most 100 columns, with the options' names in the first 30."""

    def __init__(self, prog: str) -> None:
        columns = min(100, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=30, width=columns)


class _Parser(ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line without the whole usage; an unknown option names the nearest."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if unknown != message.split()[0] and unknown.startswith("-"):
            name = unknown.partition("=")[0]
            message = f"there is no option {name}.{nearest(name, self._option_string_actions)}".rstrip(".")
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _short_usage(parser: ArgumentParser) -> str:
    """The arguments by name and "[options]": there are dozens, and the help lists them."""
    words = [action for action in parser._actions if not action.option_strings]
    return " ".join(["%(prog)s", *(f"[{a.dest}]" if a.nargs == "?" else a.dest for a in words), "[options]"])


def _prepare_streams() -> None:
    """Make the streams usable if the caller closed them or their encoding lacks our characters."""
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
        message = str(error) or "there is not enough memory for that"
        print(f"martlet: {' '.join(message.split())}", file=sys.stderr)
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
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: martlet COMMAND …", "", *lines, "", "martlet COMMAND --help shows a command's options."])


if __name__ == "__main__":
    sys.exit(main())
