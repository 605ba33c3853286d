"""Fetch a model: a name of the catalogue, hf:owner/repo[/file], or the path of one that is here."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "execute"]

BAR = 30


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("name", help="a name from `martlet list`, hf:owner/repo[/file], or a path")
    parser.add_argument("--offline", action="store_true", help="forbid every network connection")


def execute(args: Namespace) -> int:
    """Run the command."""
    from martlet import hub

    if args.offline:
        from martlet.offline import forbid_network

        forbid_network()
    path = hub.pull(args.name, progress=_show if sys.stderr.isatty() else None)
    print(path)
    return 0


def _show(done: int, total: int) -> None:
    """A bar on stderr."""
    filled = BAR * done // max(1, total)
    line = f"\r[{'#' * filled}{' ' * (BAR - filled)}] {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    print(line, end="\n" if done >= total else "", file=sys.stderr, flush=True)
