"""Fetch a model: a name of the catalogue, hf:owner/repo[/file], or the path of one that is here."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from martlet.commands.options import heed_offline, show_download

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("name", help="a name from `martlet list`, hf:owner/repo[/file], or a path")
    parser.add_argument("--offline", action="store_true", default=None, help="forbid every network connection")


def execute(args: Namespace) -> int:
    """Run the command."""
    from martlet import hub

    path = hub.pull(
        args.name, offline=heed_offline(args.offline), progress=show_download if sys.stderr.isatty() else None
    )
    for model in hub.list_models():
        if model.path == path and model.licence is not None:
            print(f"{model.name}: licence {model.licence}", file=sys.stderr)
    print(path)
    return 0
