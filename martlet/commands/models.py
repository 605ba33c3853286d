"""`martlet list` and `martlet pull`: the models here and in the catalogue (read `hub.py` next)."""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from martlet.commands.arguments import add_offline_option
from martlet.commands.common import heed_offline, show_download


def add_list_arguments(parser: ArgumentParser) -> None:
    """The options of `martlet list`."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def execute_list(args: Namespace) -> int:
    """Print every model with its size and its path, or how to fetch it."""
    from martlet import hub

    models = hub.list_models()
    if args.json:
        print(json.dumps([asdict(model) for model in models], default=str))
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        where = model.path if model.path is not None else f"not here: martlet pull {model.name}"
        print(f"{model.name:<{width}} {model.size_bytes / 1e6:>9,.0f} MB  {where}")
    return 0


def add_pull_arguments(parser: ArgumentParser) -> None:
    """The options of `martlet pull`."""
    parser.add_argument("name", help="a name from `martlet list`, hf:owner/repo[/file], or a path")
    add_offline_option(parser)


def execute_pull(args: Namespace) -> int:
    """Fetch a model and print its path; its licence goes to stderr."""
    from martlet import hub

    progress = show_download if sys.stderr.isatty() else None
    path = hub.pull(args.name, offline=heed_offline(args.offline), progress=progress)
    for model in hub.list_models():
        if model.path == path and model.licence is not None:
            print(f"{model.name}: licence {model.licence}", file=sys.stderr)
    print(path)
    return 0
