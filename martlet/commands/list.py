"""List the models that are here, and those that can be fetched by name."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def execute(args: Namespace) -> int:
    """Run the command."""
    from dataclasses import asdict

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
