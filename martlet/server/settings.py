"""The settings of `martlet serve`, checked once (read `app.py` next). See docs/options.md."""

from dataclasses import dataclass
from pathlib import Path

from martlet.errors import RequestError
from martlet.options import option, options_of, refuse

_WHERE = "address and access"
_LIMITS = "limits"
_BEHAVIOUR = "requests, replies and pages"
_SECONDS = "seconds"


def _file(name: str, value: object) -> str:
    """The path of a file that is there."""
    if not isinstance(value, str | Path) or not Path(value).is_file():
        raise RequestError(f"{name}: there is no file {value!r}.", param=name)
    return str(value)


def _keys(name: str, value: object) -> tuple[str, ...]:
    """API keys; an error does not show them."""
    keys = value if isinstance(value, tuple) else ()
    if not keys or not all(
        isinstance(key, str) and key and key.isascii() and key.isprintable() and " " not in key for key in keys
    ):
        raise RequestError("An API key must be ASCII text without spaces, not empty.", param=name)
    return keys


def _prefix(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise refuse(name, value, "letters, digits and underscores")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a model is served. Raises RequestError, naming the setting, for a wrong value."""

    # fmt: off
    host: str = option("127.0.0.1", "address to listen on", group=_WHERE, metavar="ADDRESS",
        default_help="127.0.0.1, this machine only")
    port: int = option(8000, "port; 0: any free port", low=0, high=65535, group=_WHERE, more_flags=("-p",))
    unix_socket: str | None = option(None, "listen on a socket file in place of a port", path="a socket",
        group=_WHERE, metavar="PATH")
    model_name: str = option("", "the model's name in replies", group=_WHERE, metavar="NAME",
        default_help="its file's name")
    model_given: str = option("", "the name that the model was started with; requests may say that too")
    allow_lora_updates: bool = option(False, "let requests load and unload adapters from files of this machine",
        group=_WHERE)
    api_keys: tuple[str, ...] = option((), "require this key; --api-key-file and MARTLET_API_KEY hide it better",
        check=_keys, group=_WHERE, flag="--api-key", metavar="KEY", default_help="no key")
    cors_origins: tuple[str, ...] = option((), "let web pages of this origin call; *: of all", group=_WHERE,
        flag="--cors-origin", metavar="URL")
    tls_cert: str | None = option(None, "serve HTTPS with this certificate (PEM)", check=_file, group=_WHERE,
        metavar="FILE")
    tls_key: str | None = option(None, "the certificate's key (PEM)", check=_file, group=_WHERE, metavar="FILE")
    max_body_bytes: int = option(16 << 20, "size of a request's body", low=1, unit="bytes", group=_LIMITS)
    max_n: int = option(128, "answers to one request, over all its prompts", low=1, group=_LIMITS)
    max_connections: int = option(1024, "open connections", low=1, group=_LIMITS)
    max_loaded_models: int | None = option(None, "models that are loaded at a time", low=1, group=_LIMITS,
        default_help="as many as memory holds")
    requests_per_minute: int | None = option(None,
        "requests of one API key, or of one address; more are answered 429", low=1, group=_LIMITS,
        default_help="no limit")
    tokens_per_minute: int | None = option(None, "prompt and answer tokens of one API key, or of one address", low=1,
        group=_LIMITS, default_help="no limit")
    request_timeout_s: float | None = option(None, "time for a whole request", low=0.01, unit=_SECONDS, group=_LIMITS,
        flag="--request-timeout", default_help="no limit")
    send_timeout_s: float = option(60.0, "time that a reader may take for a piece of a stream before it is dropped",
        low=0.01, unit=_SECONDS, group=_LIMITS, flag="--send-timeout")
    keep_alive_s: float = option(10.0, "silence on a stream before a comment is sent", low=0.01, unit=_SECONDS,
        group=_LIMITS, flag="--keep-alive")
    shutdown_timeout_s: float = option(10.0, "time for running requests after SIGTERM", low=0, unit=_SECONDS,
        group=_LIMITS, flag="--shutdown-timeout")
    heartbeat_s: float = option(30.0, "time for one step before /ready says no", low=0.01, unit=_SECONDS,
        group=_LIMITS, flag="--heartbeat")
    strict: bool = option(False, "refuse unknown fields instead of listing them in the reply", group=_BEHAVIOUR)
    request_templates: bool = option(False, "a request may bring its own chat template", group=_BEHAVIOUR)
    tool_parser: str = option("auto", "format of tool calls", group=_BEHAVIOUR, metavar="NAME",
        default_help="the chat template's")
    reasoning_parser: str = option("auto", "format of reasoning", group=_BEHAVIOUR, metavar="NAME",
        default_help="the chat template's")
    web: bool = option(True, "the chat page at /, the view of the engine at /engine, mini-picoLM at /mini",
        group=_BEHAVIOUR)
    share_model: bool = option(False, "let the page at /mini load the model's file into the browser",
        group=_BEHAVIOUR)
    view_text: bool = option(False, "show the text of prompts at /engine", group=_BEHAVIOUR)
    metrics_prefix: str = option("martlet", "prefix of the names in /metrics; vllm: dashboards for vLLM work",
        check=_prefix, group=_BEHAVIOUR, metavar="NAME")
    log_requests: bool = option(True, "a line for each request, never its text", group=_BEHAVIOUR)
    log_json: bool = option(False, "write these lines as JSON", group=_BEHAVIOUR)
    otlp_endpoint: str | None = option(None, "send a span of each request to this OpenTelemetry collector, as in"
        " http://127.0.0.1:4318/v1/traces (needs the otel extra)", group=_BEHAVIOUR, metavar="URL")
    # fmt: on

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise RequestError("TLS needs both files: the certificate and its key.", param="tls_key")
        for name, declared in options_of(ServerSettings).items():
            object.__setattr__(self, name, declared.checked(getattr(self, name)))
