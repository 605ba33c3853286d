"""Say what of a JSON Schema is enforced (read `martlet/grammar/json_schema.py` next).

`martlet schema check FILE`: every keyword that can't be enforced with its JSON pointer, unknown keywords and formats, which
say nothing, and how often each other keyword occurs. The exit status is 1 if the schema would be refused.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from martlet.errors import FormatError

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("check",), help="what to do")
    parser.add_argument("file", help="a JSON Schema; - reads standard input")


def execute(args: Namespace) -> int:
    """Run the command."""
    from martlet.grammar.json_schema import coverage

    try:
        text = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as error:
        raise FormatError(args.file, f"can't be read: {error.strerror}.") from None
    found = coverage(text)
    for problem in found.problems:
        print(f"refused   {problem}")
    for problem in found.ignored:
        print(f"ignored   {problem}")
    for keyword, count in found.enforced.items():
        print(f"{'read' if found.problems else 'enforced':9} {keyword}: {count:,}")
    print("The schema is refused." if found.problems else "All of it is enforced.")
    return 1 if found.problems else 0
