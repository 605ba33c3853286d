"""Show the version."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command has no options."""


def execute(args: Namespace) -> int:
    """Run the command."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"martlet {version('martlet')}")
    except PackageNotFoundError:
        print("martlet (not installed: run from its source)")
    return 0
