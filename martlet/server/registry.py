"""The models and adapters of a server by name, one engine per model (read `service.py` next).

    body → its "model" → lend: loaded? else load; if memory is short, close the least recently used
    → Service

The first model is loaded from the start. The first request for another model loads it in a thread
of its own, while loaded models continue; further requests for it wait for the same load. A model
that answers a request is never closed. The two routes that load and unload adapters have vLLM's
paths and fields; `models/lora.py` says what an adapter is.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.build import Built
from martlet.engine.engine import Engine
from martlet.engine.lora import open_adapter
from martlet.errors import CapacityError, FormatError, MartletError, RequestError
from martlet.server.body import parse_json, read_body
from martlet.server.error_replies import ApiError
from martlet.server.prometheus import ServerMetrics
from martlet.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from martlet.server.replies import json_reply
from martlet.server.service import Service, service_of
from martlet.server.tracing import PARENT

MAX_NAME = 200
RETRY_S = 5.0  # Retry-After of a model that found no room
Load = Callable[..., Built]  # takes `lora`, the adapters' paths by name
Endpoint = Callable[[Request], Awaitable[Response]]
logger = logging.getLogger("martlet.server")


@dataclass(slots=True, eq=False)
class Entry:
    """A model: how to load it, and its service while it is loaded."""

    name: str
    load: Load | None  # None: it cannot be loaded again, so it is never closed
    service: Service | None = None
    adapters: dict[str, str] = field(default_factory=dict)  # paths by name; loaded with the model
    n_lent: int = 0  # requests that use it
    used_s: float = 0.0
    metrics: ServerMetrics | None = None  # since its first load


class Lease:
    """A model lent to a request; a lent model is not closed."""

    def __init__(self, entry: Entry) -> None:
        self._entry: Entry | None = entry
        entry.n_lent += 1

    def release(self) -> None:
        if self._entry is not None:
            self._entry.n_lent -= 1
            self._entry.used_s = time.monotonic()
            self._entry = None


class Registry:
    """All models; everything here is called from the event loop."""

    def __init__(
        self,
        first: Service,
        more: Mapping[str, Load] | None = None,
        loras: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`more` loads further models by name, and may include the first.

        `loras` are the paths of the further models' adapters, by model and adapter name.
        """
        more = dict(more or {})
        self.settings = first.settings
        self.entries = {first.model: Entry(first.model, more.pop(first.model, None), first, metrics=first.metrics)}
        self.entries.update((name, Entry(name, load)) for name, load in more.items())
        for name, paths in (loras or {}).items():
            self.entries[name].adapters = dict(paths)
        adapters = first.built.adapters
        self.entries[first.model].adapters = {name: adapter.path for name, adapter in adapters.items()}
        self.default = self.entries[first.model]
        self.draining = False
        self.started = int(time.time())
        self._loading = asyncio.Lock()  # one load at a time: each plans with the free memory

    @property
    def services(self) -> list[Service]:
        """The services of the loaded models, in the order of the entries."""
        return [entry.service for entry in self.entries.values() if entry.service is not None]

    @property
    def default_service(self) -> Service:
        """The first model's service, or another loaded model's; ApiError 503 if none is loaded."""
        services = self.services
        if not services:
            raise ApiError(503, "No model is loaded; ask for one by its name.", code="overloaded")
        return self.default.service or services[0]

    @property
    def model_metrics(self) -> list[tuple[ServerMetrics, Engine | None]]:
        """The metrics of every model that was ever loaded, with its engine while it is."""
        return [
            (entry.metrics, None if entry.service is None else entry.service.built.engine)
            for entry in self.entries.values()
            if entry.metrics is not None
        ]

    def start(self) -> None:
        """Start the loaded engines; call it from the event loop that serves."""
        for service in self.services:
            service.bridge.start()
        gc.freeze()  # a collection that walks a model's objects would delay a step by 20 ms

    def find(self, name: str | None) -> tuple[Entry, str]:
        """The model of a name, and the adapter's name if it is an adapter; else ApiError 404."""
        if not name or name in self.entries:
            return self.entries[name] if name else self.default, ""
        for entry in self.entries.values():
            if name in entry.adapters:
                return entry, name
        for entry in self.entries.values():
            service = entry.service
            if service is not None and name == service.built.config.model:
                return entry, ""
        if name == self.settings.model_given:
            return self.default, ""
        names = [*self.entries, *(name for entry in self.entries.values() for name in entry.adapters)]
        known = ", ".join(map(repr, names[:20]))
        raise ApiError(
            404, f"There is no model {name!r:.200}; this server has {known}.", param="model", code="model_not_found"
        )

    async def lend(self, request: Request, name: str | None) -> Service:
        """Lend a request the service of a model, and load the model if necessary.

        Raises ApiError 404 for an unknown name, 503 if there is no room or the server shuts down.
        """
        entry, adapter = self.find(name)
        request.scope["martlet.lease"] = Lease(entry)
        service = await self._loaded(entry) if entry.service is None else entry.service
        if adapter:
            loaded = service.built.adapters.get(adapter)
            if loaded is None:
                raise ApiError(
                    404, f"The adapter {adapter!r} has just been unloaded.", param="model", code="model_not_found"
                )
            service = service.named(adapter, loaded.digest)
        request.scope["martlet.service"] = service
        return service

    async def _loaded(self, entry: Entry) -> Service:
        async with self._loading:
            while entry.service is None:
                if self.draining:
                    raise ApiError(503, "The server shuts down.", code="shutting_down", headers={"Retry-After": "5"})
                if self._is_full() and not await self._close_one():
                    raise self._no_room(entry, "all models that may be loaded at a time answer requests")
                try:
                    await self._load(entry)
                except CapacityError as error:
                    if not await self._close_one():
                        raise self._no_room(entry, str(error)) from None
            return entry.service

    async def _load(self, entry: Entry) -> None:
        assert entry.load is not None
        start = time.perf_counter()
        try:
            built = await asyncio.to_thread(entry.load, lora=dict(entry.adapters))
        except RequestError as error:  # such as a missing adapter file: not the client's fault
            raise MartletError(f"The model {entry.name!r} cannot be loaded: {error}") from None
        service = Service(built, replace(self.settings, model_name=entry.name), entry.metrics)
        entry.metrics = service.metrics
        service.bridge.start()
        entry.service, entry.used_s = service, time.monotonic()
        gc.freeze()
        logger.info("model %s loaded in %.1f s", entry.name, time.perf_counter() - start)

    def _is_full(self) -> bool:
        most = self.settings.max_loaded_models
        return most is not None and len(self.services) >= most

    async def _close_one(self) -> bool:
        """Close the model that was idle longest; False if none is idle."""
        idle = [e for e in self.entries.values() if e.service is not None and e.load is not None and not e.n_lent]
        if not idle:
            return False
        entry = min(idle, key=lambda e: e.used_s)
        service, entry.service = entry.service, None
        assert service is not None
        service.metrics.retire(service.built.engine)  # an idle model counts nothing more
        logger.info("model %s is closed to make room", entry.name)
        await asyncio.to_thread(service.close)
        del service
        gc.unfreeze()
        gc.collect()  # reference cycles hold the weights
        gc.freeze()
        return True

    async def add_adapter(self, request: Request, name: str, path: str, model: str | None, replaces: bool) -> None:
        """Load an adapter of a model, between two steps of its engine.

        Raises RequestError for a bad file or name, and for a name in use unless `replaces`.
        """
        entry, adapter_name = self.find(model)
        if adapter_name:
            raise RequestError(f"{adapter_name!r:.200} is an adapter; expected a base model.", param="base_model_name")
        self._check_name(entry, name, replaces)
        service = await self.lend(request, entry.name)
        try:
            adapter = await asyncio.to_thread(open_adapter, path, service.built.spec, "lora_path")
        except FormatError as error:
            raise RequestError(str(error), param="lora_path") from None
        self._check_name(entry, name, replaces)  # another request may have taken it meanwhile
        entry.adapters[name] = path
        try:
            await service.bridge.call(lambda: service.built.take_adapter(name, adapter))
        except BaseException:
            if name not in service.built.adapters:
                del entry.adapters[name]
            raise
        logger.info("adapter %s loaded, rank %d, %d bytes", name, adapter.rank, adapter.nbytes)

    def _check_name(self, entry: Entry, name: str, replaces: bool) -> None:
        """RequestError for a name that an adapter of this model cannot have."""
        if not name or not name.isprintable() or len(name) > MAX_NAME:
            raise RequestError(
                f"{name!r:.200} is no name; expected 1 to {MAX_NAME} printable characters.", param="lora_name"
            )
        if name in self.entries or any(name in e.adapters for e in self.entries.values() if e is not entry):
            raise RequestError(
                f"{name!r:.200} cannot name an adapter of {entry.name!r}: a model has this name.", param="lora_name"
            )
        if name in entry.adapters and not replaces:
            raise RequestError(
                f"There is an adapter {name!r:.200}; unload it, or give load_inplace.", param="lora_name", code="exists"
            )

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter; ApiError 404 if there is none of this name."""
        entry = next((entry for entry in self.entries.values() if name in entry.adapters), None)
        if entry is None:
            raise ApiError(404, f"There is no adapter {name!r:.200}.", param="lora_name", code="model_not_found")
        del entry.adapters[name]
        if entry.service is not None:
            built = entry.service.built
            await entry.service.bridge.call(lambda: built.drop_adapter(name))

    def _no_room(self, entry: Entry, why: str) -> ApiError:
        after = {"Retry-After": str(round(RETRY_S))}
        return ApiError(503, f"There is no room for {entry.name!r} now: {why}", code="overloaded", headers=after)

    def drain(self) -> None:
        self.draining = True
        for service in self.services:
            service.drain()

    def cancel_all(self) -> None:
        """Cancel every open request: the server shuts down."""
        for service in self.services:
            service.cancel_all()

    def close(self) -> None:
        for service in self.services:
            service.close()


def registry_of(request: Request) -> Registry:
    """The models of the server that received a request."""
    registry: Registry = request.app.state.registry
    return registry


def for_model(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint: read the body first and lend the request the model that it names."""

    @wraps(endpoint)
    async def chosen(request: Request) -> Response:
        registry = registry_of(request)
        settings = registry.settings
        PARENT.set(request.headers.get("traceparent", ""))
        body = parse_json(await read_body(request, settings.max_body_bytes, settings.send_timeout_s))
        request.scope["martlet.body"] = body
        name: Any = body.get("model")
        await registry.lend(request, name if isinstance(name, str) else None)
        return await endpoint(request)

    return chosen


async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter for the first model, or for `base_model_name`."""
    _check_lora_updates(request)
    body = (await service_of(request).parse(request, LoadAdapterRequest, sampling=False)).body
    registry = registry_of(request)
    await registry.add_adapter(request, body.lora_name, body.lora_path, body.base_model_name, body.load_inplace)
    return json_reply({"status": "loaded", "lora_name": body.lora_name})


async def unload_lora_adapter(request: Request) -> Response:
    """Refuse new requests with an adapter; running requests keep it to their end."""
    _check_lora_updates(request)
    body = (await service_of(request).parse(request, UnloadAdapterRequest, sampling=False)).body
    await registry_of(request).remove_adapter(body.lora_name)
    return json_reply({"status": "unloaded", "lora_name": body.lora_name})


def _check_lora_updates(request: Request) -> None:
    """ApiError 403 unless the operator allows them: they name files of the server's machine."""
    if not registry_of(request).settings.allow_lora_updates:
        raise ApiError(
            403, "Adapters may not be changed here; start the server with --allow-lora-updates.", code="not_allowed"
        )
