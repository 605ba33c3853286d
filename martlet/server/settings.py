"""The settings of `martlet serve`, checked once (docs/server.md; read `app.py` next)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from martlet.errors import RequestError

__all__ = ["ServerSettings"]

_MINIMUMS = {
    "port": 0,
    "max_body_bytes": 1,
    "max_n": 1,
    "max_connections": 1,
    "max_loaded_models": 1,
    "requests_per_minute": 1,
    "tokens_per_minute": 1,
    "keep_alive_s": 0.01,
    "send_timeout_s": 0.01,
    "request_timeout_s": 0.01,
    "shutdown_timeout_s": 0,
    "heartbeat_s": 0.01,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a model is served. Raises RequestError, naming the setting, for a wrong value."""

    model_name: str = ""  # the model's name in replies; "": the file's name
    model_given: str = ""  # the command line's name of the model, which requests may use too
    # Address and callers.
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    unix_socket: str | None = None  # in place of host and port
    tls_cert: str | None = None
    tls_key: str | None = None
    api_keys: tuple[str, ...] = ()  # empty: every client that reaches the port
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call; "*": all
    # Limits.
    max_body_bytes: int = 16 << 20
    max_n: int = 128  # answers per request, over all its prompts
    max_connections: int = 1024
    max_loaded_models: int | None = None  # None: as many as memory holds
    requests_per_minute: int | None = None  # per API key, or per address if there are no keys
    tokens_per_minute: int | None = None  # the same, for prompts and answers together
    # Times, in seconds.
    keep_alive_s: float = 10.0  # silence on a stream before a comment is sent
    send_timeout_s: float = 60.0  # for one piece to reach its client
    request_timeout_s: float | None = None  # for a whole request
    shutdown_timeout_s: float = 10.0  # for running requests after SIGTERM
    heartbeat_s: float = 30.0  # longest step before /ready says no
    # Content and logs.
    strict: bool = False  # refuse unknown fields instead of listing them in the reply
    allow_lora_updates: bool = False  # requests may load adapters from this machine's files
    request_templates: bool = False  # requests may bring a chat template
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    web: bool = True  # the pages at /, /engine and /mini
    share_model: bool = False  # the page at /mini may read the model's file
    view_text: bool = False  # the page at /engine shows text of prompts
    metrics_prefix: str = "martlet"  # "vllm": vLLM's dashboards work unchanged
    log_requests: bool = True  # one line per request, never its text
    otlp_endpoint: str | None = None  # URL of a collector of OpenTelemetry spans
    log_json: bool = False

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise RequestError(f"{name} is {value!r}; expected at least {minimum:g}.", param=name)
        if self.port > 65535:
            raise RequestError(f"port is {self.port}; expected at most 65535.", param="port")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise RequestError("TLS needs both files: the certificate and its key.", param="tls_key")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise RequestError(f"{name}: there is no file {path!r}.", param=name)
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise RequestError("An API key must be ASCII text without spaces, not empty.", param="api_keys")
        if not self.metrics_prefix.isidentifier():
            raise RequestError(
                f"metrics_prefix is {self.metrics_prefix!r}; expected letters and digits.", param="metrics_prefix"
            )

    def public(self) -> dict[str, object]:
        """All settings but the API keys."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "api_keys"}
