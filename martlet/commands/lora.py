"""Adapters on the command line: one for a command that answers, named ones for a server (read `engine/lora.py` next)."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Sequence

from martlet.errors import RequestError, nearest

__all__ = ["add_lora_option", "by_model", "named", "only_lora"]


def add_lora_option(parser: ArgumentParser) -> None:
    """An adapter for all that the command answers."""
    parser.add_argument("--lora", dest="loras", action="append", metavar="PATH", help="answer with this adapter of the"
                        " model: PEFT's folder or a GGUF file")  # fmt: skip


def only_lora(args: Namespace) -> str | None:
    """The adapter that was given, under which all is answered; RequestError for two."""
    paths: list[str] = getattr(args, "loras", None) or []
    if len(paths) > 1:
        raise RequestError(f"--lora is given {len(paths)} times; answers have one adapter.", param="lora")
    return paths[0] if paths else None


def named(text: str) -> tuple[str, str]:
    """NAME=PATH, of an adapter or a model."""
    name, found, path = text.partition("=")
    if not (name and found and path) or not all(c.isprintable() and c != "," for c in name):
        raise ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, path


def by_model(given: Sequence[tuple[str, str]], models: Collection[str]) -> dict[str, dict[str, str]]:
    """The adapters of each model, from NAME=PATH, which is enough where there is one model, and NAME@MODEL=PATH.

    RequestError for one of no model, or of a name that something else has.
    """
    found: dict[str, dict[str, str]] = {model: {} for model in models}
    for whole, path in given:
        name, at, model = whole.rpartition("@")
        if not at and len(found) > 1:
            raise RequestError(
                f"--lora {whole}={path} does not say for which model: write {whole}@MODEL={path}, with one of"
                f" {', '.join(found)}.",
                param="lora",
            )
        if not at:
            name, model = whole, next(iter(found))
        if model not in found or not name:
            raise RequestError(
                f"--lora {whole}={path} is for a model {model!r}, and there is {', '.join(found)}."
                f"{nearest(model, found)}",
                param="lora",
            )
        if name in found or any(name in adapters for adapters in found.values()):
            raise RequestError(
                f"Two models or adapters have the name {name!r}; give them different ones.", param="lora"
            )
        found[model][name] = path
    return found
