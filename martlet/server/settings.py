"""What `martlet serve` can be told, checked once (read `app.py` next). docs/server.md explains each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from martlet.errors import RequestError

__all__ = ["ServerSettings"]

_LEAST = {
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

    model_name: str = ""  # what replies call the model; "": the file's name
    model_given: str = ""  # what it was called at the start, such as a name of the catalogue: requests may say that too
    # Where, and for whom.
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    unix_socket: str | None = None  # in place of host and port
    tls_cert: str | None = None
    tls_key: str | None = None
    api_keys: tuple[str, ...] = ()  # none: everybody who reaches the port
    cors_origins: tuple[str, ...] = ()  # web pages that may call; "*": all
    # Limits.
    max_body_bytes: int = 16 << 20
    max_n: int = 128  # answers of one request, over all its prompts
    max_connections: int = 1024
    max_loaded_models: int | None = None  # at a time; None: as many as memory holds
    requests_per_minute: int | None = None  # of one API key, or of one address where there are no keys
    tokens_per_minute: int | None = None  # the same, of prompts and answers together
    # Times, in seconds.
    keep_alive_s: float = 10.0  # of silence on a stream, after which a comment is sent
    send_timeout_s: float = 60.0  # that one piece may take to reach its reader
    request_timeout_s: float | None = None  # that a request may take in all
    shutdown_timeout_s: float = 10.0  # that requests get to end after SIGTERM
    heartbeat_s: float = 30.0  # that one step may take before the server calls itself not ready
    # What is said and heard.
    strict: bool = False  # refuse fields that are not known, in place of listing them in the reply
    allow_lora_updates: bool = False  # a request may load adapters from this machine's files, and unload them
    request_templates: bool = False  # a request may bring its own chat template
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    web: bool = True  # the pages at /, /engine and /mini
    share_model: bool = False  # the page at /mini may read the model's file
    view_text: bool = False  # the page at /engine shows text of prompts
    metrics_prefix: str = "martlet"  # "vllm": dashboards made for vLLM work unchanged
    log_requests: bool = True  # a line a request: never its text
    otlp_endpoint: str | None = None  # of a collector of OpenTelemetry spans
    log_json: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} is {value!r}; expected at least {least:g}.", param=name)
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
        """All settings but the keys."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "api_keys"}
