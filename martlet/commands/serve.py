"""Serve a model over HTTP, as OpenAI's and Anthropic's APIs (read `martlet/server/app.py` next)."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.commands.arguments import (
    MODEL_HELP,
    add_engine_options,
    add_options,
    add_watch_options,
    engine_options,
    given_options,
    named,
)
from martlet.commands.common import print_settings, resolve_model, show_progress
from martlet.commands.speed import process_age_s
from martlet.config import environment_api_keys
from martlet.errors import RequestError, nearest
from martlet.options import options_of

if TYPE_CHECKING:
    from martlet.server.settings import ServerSettings

MAX_KEY_FILE = 1 << 20  # bytes
MAX_WAITING = {"max_waiting": 256, "max_waiting_tokens": 4 << 20}  # a server's queue has an end


def add_arguments(parser: ArgumentParser) -> None:
    from martlet.server.settings import ServerSettings

    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    parser.add_argument("-v", "--verbose", action="store_true", help="show start-up times, settings and memory")
    group = parser.add_argument_group("models")
    group.add_argument("--model", dest="models", action="append", type=named, metavar="NAME=MODEL", help="a model under a"
                       " name of its own; may be given several times: models after the first are loaded at their first"
                       " request")  # fmt: skip
    group.add_argument("--lora", dest="loras", action="append", type=named, metavar="NAME[@MODEL]=PATH", help="an adapter"
                       " of the model (of several: of MODEL), under the name that requests give as their model: a PEFT"
                       " folder or a GGUF file; may be given several times")  # fmt: skip
    group.add_argument("--self-test", action=BooleanOptionalAction, default=True, help="before the port opens, let a known"
                       " model count, and refuse one that cannot (default: yes)")  # fmt: skip
    titles = dict.fromkeys(option.group for option in options_of(ServerSettings).values() if option.group)
    access, *_ = [add_options(parser, ServerSettings, title) for title in titles]
    access.add_argument("--api-key-file", metavar="FILE", help="require one of the keys in a file, one a line")
    add_engine_options(parser)
    add_watch_options(parser)


class _Stopped(BaseException):
    """A signal came before there was a server that it could end."""


@contextmanager
def _signals() -> Iterator[None]:
    """Until the server takes over: SIGTERM and SIGINT end the start in order, again: at once."""

    def stop(number: int, frame: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        raise _Stopped

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute(args: Namespace) -> int:
    try:
        with _signals():
            return _serve(args)
    except _Stopped:
        print("martlet: stopped by a signal before the server was ready", file=sys.stderr)
        return 0


def _serve(args: Namespace) -> int:
    settings, models = _models(args, _settings(args))
    from martlet.config import resolve_config
    from martlet.engine.build import Built, Progress, build
    from martlet.server.lifecycle import serve
    from martlet.server.startup_checks import check_listening, check_model

    check_listening(settings)
    options: dict[str, Any] = {**MAX_WAITING, **engine_options(args)}
    loras = _by_model(args.loras or (), models)

    def load(path: str, progress: Progress | None = None, lora: Mapping[str, str] | None = None) -> Built:
        built = build(resolve_config({"model": path, "lora": lora, **options}), progress)
        if args.self_test:
            check_model(built)
        return built

    built = load(models[settings.model_name], show_progress, loras[settings.model_name])
    for warning in built.warnings:
        print(f"martlet: {warning}", file=sys.stderr)
    if args.verbose:
        phases = ", ".join(f"{phase.name} {phase.seconds:.3f} s" for phase in built.start)
        print(f"start: {phases}", file=sys.stderr)
        print_settings("settings", built.config.settings())
        print(f"memory: {built.plan.explain()}", file=sys.stderr)

    def ready(address: str) -> None:
        print(f"martlet: ready at {address} after {process_age_s():.2f} s", file=sys.stderr, flush=True)

    more = {name: partial(load, path) for name, path in models.items()} if len(models) > 1 else None
    serve(built, settings, ready, more, loras)
    return 0


def _models(args: Namespace, settings: ServerSettings) -> tuple[ServerSettings, dict[str, str]]:
    """The settings with the first model's name, and every model's path by name."""
    given: list[tuple[str, str]] = list(args.models or ())
    if args.model is None and not given:
        raise RequestError("serve needs a model: a file, a folder, a name, or --model NAME=MODEL.", param="model")
    if args.model is not None:
        path = resolve_model(args.model, args.offline)
        given.insert(0, (settings.model_name or Path(path).name.removesuffix(".gguf"), path))
    elif settings.model_name:
        raise RequestError("--model-name names the model that is given without --model.", param="model_name")
    models: dict[str, str] = {}
    for name, model in given:
        if name in models:
            raise RequestError(f"Two models have the name {name!r}; give them different ones.", param="model")
        models[name] = resolve_model(model, args.offline)
    return replace(settings, model_name=next(iter(models)), model_given=args.model or ""), models


def _settings(args: Namespace) -> ServerSettings:
    """The server's settings that were given, with the keys of all three sources."""
    from martlet.server.settings import ServerSettings

    keys = [*(args.api_keys or ()), *_keys_in(args.api_key_file), *environment_api_keys()]
    args.api_keys = list(dict.fromkeys(keys)) or None
    return ServerSettings(**given_options(args, ServerSettings))


def _keys_in(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_KEY_FILE + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.", param="api_key_file") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is no text; expected API keys, one a line.", param="api_key_file") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or len(data) > MAX_KEY_FILE:
        raise RequestError(f"{path} holds no API keys; expected one a line.", param="api_key_file")
    return keys


def _by_model(given: Sequence[tuple[str, str]], models: Collection[str]) -> dict[str, dict[str, str]]:
    """The adapters of each model, from NAME=PATH (for a single model) and NAME@MODEL=PATH.

    RequestError for one of no model, or of a name that something else has.
    """
    adapters_of: dict[str, dict[str, str]] = {model: {} for model in models}
    for whole, path in given:
        name, at, model = whole.rpartition("@")
        if not at and len(adapters_of) > 1:
            raise RequestError(
                f"--lora {whole}={path} does not say for which model: write {whole}@MODEL={path}, with one of"
                f" {', '.join(adapters_of)}.",
                param="lora",
            )
        if not at:
            name, model = whole, next(iter(adapters_of))
        if model not in adapters_of or not name:
            raise RequestError(
                f"--lora {whole}={path} is for a model {model!r}, and there is {', '.join(adapters_of)}."
                f"{nearest(model, adapters_of)}",
                param="lora",
            )
        if name in adapters_of or any(name in adapters for adapters in adapters_of.values()):
            raise RequestError(
                f"Two models or adapters have the name {name!r}; give them different ones.", param="lora"
            )
        adapters_of[model][name] = path
    return adapters_of
