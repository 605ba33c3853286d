"""Compile the kernels ahead of the first use."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from martlet.commands.options import add_engine_options, open_llm

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", help="the model whose kernels are compiled")
    add_engine_options(parser)


def execute(args: Namespace) -> int:
    """Run the command."""
    start = time.perf_counter()
    with open_llm(args) as llm:
        for phase in llm.start_timeline:
            print(f"{phase.name:<8} {phase.seconds:8.3f} s")
    print(f"ready: {time.perf_counter() - start:.1f} s")
    return 0
