"""Options of the KV-quality guard (docs/tuning.md). Read `martlet/engine/kv_guard.py` next."""

from __future__ import annotations

from argparse import ArgumentParser

__all__ = ["add_guard_options"]


def add_guard_options(parser: ArgumentParser) -> None:
    """Settings of the engine, for the commands that answer."""
    group = parser.add_argument_group("quality of compressed KV pages")
    group.add_argument(
        "--kv-guard",
        type=float,
        metavar="KLD",
        help="with --kv-dtype q4 or q8: give layers more bits until the mean divergence from f16 is at most this, such as"
        " 0.01; measured at the first start, and kept",
    )
    group.add_argument(
        "--kv-guard-text",
        metavar="FILE",
        help="the text to measure on, some thousands of tokens (default: one of ours)",
    )
