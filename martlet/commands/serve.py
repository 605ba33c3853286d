"""Serve a model over HTTP, as OpenAI's and Anthropic's APIs (read `martlet/server/app.py` next)."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.commands.lora import by_model, named
from martlet.commands.options import (
    add_engine_options,
    add_watch_options,
    engine_options,
    print_settings,
    read_size,
    resolve_model,
    show_progress,
)
from martlet.commands.speed import process_age_s
from martlet.config import environment_api_keys
from martlet.errors import RequestError

if TYPE_CHECKING:
    from martlet.server.settings import ServerSettings

__all__ = ["add_arguments", "execute"]

MAX_KEY_FILE = 1 << 20  # bytes
MAX_WAITING = {"max_waiting": 256, "max_waiting_tokens": 4 << 20}  # a server's queue has an end


def add_arguments(parser: ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", nargs="?", help="a GGUF file, a Hugging Face folder, or a name from `martlet list`")
    group = parser.add_argument_group("where, and for whom")
    group.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)")
    group.add_argument("-p", "--port", type=int, metavar="N", help="port (default: 8000; 0: any that is free)")
    group.add_argument("--unix-socket", metavar="PATH", help="listen on a socket file in place of a port")
    group.add_argument("--model-name", metavar="NAME", help="what replies call the model (default: its file's name)")
    group.add_argument("--model", dest="models", action="append", type=named, metavar="NAME=MODEL", help="a model under a"
                       " name of its own; may be given several times: all but the first are loaded when they are asked for")  # fmt: skip
    group.add_argument("--lora", dest="loras", action="append", type=named, metavar="NAME[@MODEL]=PATH", help="an adapter"
                       " of the model (of several: of MODEL), under a name that requests give as their model: PEFT's folder"
                       " or a GGUF file; may be given several times")  # fmt: skip
    group.add_argument("--allow-lora-updates", action="store_true", default=None, help="let requests load and unload"
                       " adapters from files of this machine")  # fmt: skip
    group.add_argument("--api-key", action="append", metavar="KEY", help="require this key (better: the next option,"
                       " or MARTLET_API_KEY); may be given several times")  # fmt: skip
    group.add_argument("--api-key-file", metavar="FILE", help="require one of the keys in a file, one a line")
    group.add_argument("--cors-origin", action="append", metavar="URL", help="let pages of this origin call; *: all")
    group.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")
    _add_limits(parser)
    group = parser.add_argument_group("what is said and heard")
    group.add_argument("--self-test", action=BooleanOptionalAction, default=True, help="let a known model count before the"
                       " port opens, and refuse one that cannot (default: yes)")  # fmt: skip
    group.add_argument("--strict", action="store_true", default=None, help="refuse fields that are not known")
    group.add_argument("--request-templates", action="store_true", default=None, help="a request may bring a template")
    group.add_argument("--tool-parser", metavar="NAME", help="format of tool calls (default: by the chat template)")
    group.add_argument("--reasoning-parser", metavar="NAME", help="format of reasoning (default: by the template)")
    group.add_argument("--web", action=BooleanOptionalAction, default=None, help="the chat page at /, the view of the"
                       " engine at /engine, mini-picoLM at /mini (default: yes)")  # fmt: skip
    group.add_argument("--share-model", action="store_true", default=None, help="let the page at /mini load the model's"
                       " file into the browser")  # fmt: skip
    group.add_argument(
        "--view-text", action="store_true", default=None, help="the view of the engine shows prompts' text"
    )
    group.add_argument("--metrics-prefix", metavar="NAME", help="of the names in /metrics (default: martlet); vllm makes"
                       " dashboards for vLLM work")  # fmt: skip
    group.add_argument("--log-requests", action=BooleanOptionalAction, default=None, help="a line a request, never its"
                       " text (default: yes)")  # fmt: skip
    group.add_argument("--log-json", action="store_true", default=None, help="those lines as JSON")
    group.add_argument("--otlp-endpoint", metavar="URL", help="send a span of each request to this collector, such as"
                       " http://127.0.0.1:4318/v1/traces (needs the otel extra)")  # fmt: skip
    group.add_argument("-v", "--verbose", action="store_true", help="show start-up times, settings and memory")
    add_engine_options(parser)
    add_watch_options(parser)


def _add_limits(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for option, kind, metavar, text in (
        ("--max-body-bytes", read_size, "SIZE", "a request's body (default: 16M)"),
        ("--max-n", int, "N", "answers of one request (default: 128)"),
        ("--max-connections", int, "N", "open connections (default: 1024)"),
        ("--max-loaded-models", int, "N", "models that are loaded at a time (default: as many as memory holds)"),
        ("--requests-per-minute", int, "N", "of one API key, or address; more are answered 429 (default: no limit)"),
        ("--tokens-per-minute", int, "N", "of one API key, or address: prompts, and what their answers may take"),
        ("--request-timeout", float, "S", "seconds that a request may take (default: no limit)"),
        ("--send-timeout", float, "S", "seconds until a reader that takes nothing is given up (default: 60)"),
        ("--keep-alive", float, "S", "seconds of silence on a stream until a comment is sent (default: 10)"),
        ("--shutdown-timeout", float, "S", "seconds that requests get to end after SIGTERM (default: 10)"),
        ("--heartbeat", float, "S", "seconds that one step may take until /ready says no (default: 30)"),
    ):
        group.add_argument(option, type=kind, metavar=metavar, help=text)


class _Stopped(BaseException):
    """A signal came before there was a server that it could end."""


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT end what runs here in order, until the server takes them over; a second one ends it at once."""

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
    """Run the command."""
    try:
        with _signals():
            return _serve(args)
    except _Stopped:
        print("martlet: stopped by a signal before the server was ready", file=sys.stderr)
        return 0


def _serve(args: Namespace) -> int:
    from martlet.server.settings import ServerSettings

    settings, models = _models(args, ServerSettings(**_given(args)))
    from martlet.config import resolve_config
    from martlet.engine.build import Built, Progress, build
    from martlet.server.lifecycle import serve
    from martlet.server.startup_checks import check_listening, check_model

    check_listening(settings)
    options: dict[str, Any] = dict(engine_options(args))
    for name, bound in MAX_WAITING.items():
        if options[name] is None:
            options[name] = bound

    loras = by_model(args.loras or (), models)

    def load(path: str, progress: Progress | None = None, lora: Mapping[str, str] | None = None) -> Built:
        built = build(resolve_config({"model": path, "lora": lora, **options}), progress)
        if args.self_test:
            check_model(built)
        return built

    built = load(models[settings.model_name], show_progress, loras[settings.model_name])
    for warning in built.warnings:
        print(f"martlet: {warning}", file=sys.stderr)
    if args.verbose:
        parts = ", ".join(f"{phase.name} {phase.seconds:.3f} s" for phase in built.start)
        print(f"start: {parts}", file=sys.stderr)
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


def _given(args: Namespace) -> dict[str, Any]:
    """What was given, under the settings' names."""
    from martlet.server.settings import ServerSettings

    found: dict[str, Any] = {}
    for field in fields(ServerSettings):
        value = getattr(args, field.name, None)
        if value is None:
            value = getattr(args, field.name.removesuffix("_s"), None)
        if value is not None:
            found[field.name] = value
    keys = [*(args.api_key or ()), *_keys_in(args.api_key_file), *environment_api_keys()]
    return found | {"api_keys": tuple(dict.fromkeys(keys)), "cors_origins": tuple(args.cors_origin or ())}


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
    found = [line for line in lines if line and not line.startswith("#")]
    if not found or len(data) > MAX_KEY_FILE:
        raise RequestError(f"{path} holds no API keys; expected one a line.", param="api_key_file")
    return found
