"""Options for what an answer is held to (docs/structured.md).

Read `options.py` next, which adds them to the commands that generate.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from martlet.errors import RequestError

__all__ = ["add_limit_options", "add_structured_options", "structured_options"]


def add_limit_options(group: Any) -> None:
    """How long what a form does not bound may be; settings of the engine."""
    for name, what in (("string", "bytes of a string"), ("item", "items of an array or object")):
        help_ = f"most {what} where JSON is held to a form that does not bound it (0: no limit)"
        group.add_argument(f"--{name}-limit", type=int, metavar="N", help=help_)


def add_structured_options(parser: ArgumentParser) -> None:
    """What the answer is held to; at most one."""
    group = parser.add_argument_group("structured output (docs/structured.md)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that meets this schema")
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument("--regex", metavar="PATTERN", help="the whole answer matches this regular expression")
    group.add_argument("--grammar", metavar="FILE", help="the answer is a text of this grammar: GBNF, or Lark's EBNF")
    group.add_argument(
        "--choice", metavar="TEXT", action="append", help="the answer is one of these; give it several times"
    )


def structured_options(args: Namespace) -> dict[str, Any] | None:
    """What was given of them, as `Structured` takes it."""
    found: dict[str, Any] = {}
    if getattr(args, "json_schema", None) is not None:
        found["json"] = _text(args.json_schema)
    if getattr(args, "json_object", False):
        found["json_object"] = True
    if getattr(args, "grammar", None) is not None:
        found["grammar"] = _text(args.grammar)
    for name in ("regex", "choice"):
        if getattr(args, name, None) is not None:
            found[name] = getattr(args, name)
    return found or None


def _text(name: str) -> str:
    """The text of a file, or of stdin where the name is "-"."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8: {error}.", param="structured") from None
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}.", param="structured") from None
