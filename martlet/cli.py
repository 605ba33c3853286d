"""The command line (read `commands/run.py` next, the command that matters).

Start-up is part of the product: `martlet run` shows its first token within a second. So the parser is argparse, a
command's module is imported only when that command is asked for, and rich only where a table or a bar is drawn.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module

from martlet.errors import MartletError, nearest

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS = {  # the module commands/<name>.py has add_arguments(parser) and execute(args) -> exit status
    "run": "answer a prompt",
    "chat": "talk with a model",
    "pull": "fetch a model",
    "list": "list the models that are here",
    "inspect": "show a model file: metadata, tensors, the memory it needs",
    "tokenize": "show the tokens of a text",
    "bench": "measure prefill and decode",
    "perplexity": "measure how well a model predicts a text",
    "plan": "show memory by context, and the speed to expect on this machine",
    "doctor": "show what Martlet sees of this machine, and what it decides from it",
    "warmup": "compile the kernels ahead of the first use",
    "version": "show the version",
}
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name = "version" if arguments[0] in ("-V", "--version") else arguments[0]
    if name not in COMMANDS:
        print(f"martlet: there is no command {name!r}.{nearest(name, COMMANDS)} See martlet --help.", file=sys.stderr)
        return 2
    args = parser_of(name).parse_intermixed_args(arguments[1:])  # a prompt may come after the options
    return _guarded(import_module(f"martlet.commands.{name}").execute, args)


def parser_of(name: str) -> ArgumentParser:
    """The parser of a command's arguments."""
    command = import_module(f"martlet.commands.{name}")
    parser = _Parser(prog=f"martlet {name}", description=(command.__doc__ or "").partition("\n")[0], allow_abbrev=False)
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


def _guarded(execute: object, args: Namespace) -> int:
    """Turn what goes wrong into one line on stderr and an exit status."""
    assert callable(execute)
    try:
        status = execute(args)
        sys.stdout.flush()
        return int(status or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MartletError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        print(f"martlet: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if getattr(error, "param", None) else 1


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(["usage: martlet COMMAND …", "", *lines, "", "martlet COMMAND --help shows a command's options."])


if __name__ == "__main__":
    sys.exit(main())
