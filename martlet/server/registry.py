"""The models of a server by name, an engine each (read `service.py` next, which is one of them).

    body → its "model" → lend: there? else load, and where memory is short close the one that was used longest ago → Service

The first model is there from the start. Others are loaded by the first request that asks for them, in a thread of their own,
while those that are there go on; who asks meanwhile waits for the same load. A model that answers somebody is never closed.
"""

from __future__ import annotations

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
from martlet.server.service import Service
from martlet.server.tracing import PARENT

__all__ = ["Entry", "Load", "Registry", "for_model", "registry_of"]

MOST_NAME = 200
RETRY_S = 5.0  # after which a model that found no room may be asked for again
Load = Callable[..., Built]  # takes `lora`, the paths of adapters by name
Endpoint = Callable[[Request], Awaitable[Response]]
logger = logging.getLogger("martlet.server")


@dataclass(slots=True, eq=False)
class Entry:
    """A model: how it is loaded, and its service while it is."""

    name: str
    load: Load | None  # None: it cannot be loaded again, so it stays
    service: Service | None = None
    adapters: dict[str, str] = field(default_factory=dict)  # paths by name; loaded with it
    n_lent: int = 0  # requests that use it
    used_s: float = 0.0
    metrics: ServerMetrics | None = None  # since it was loaded for the first time


class Lease:
    """A model lent to a request, which keeps it from being closed."""

    def __init__(self, entry: Entry) -> None:
        self._entry: Entry | None = entry
        entry.n_lent += 1

    def release(self) -> None:
        """The request is over. Idempotent."""
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
        """`more` says how the others are loaded, and may say so of the first; `loras` are the others' adapters' paths."""
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
        self._loading = asyncio.Lock()  # one at a time: each plans with the memory that is free

    @property
    def services(self) -> list[Service]:
        """The models that are loaded, the first of them first."""
        return [entry.service for entry in self.entries.values() if entry.service is not None]

    @property
    def default_service(self) -> Service:
        """The first model's, or that of any which is loaded where it is not."""
        services = self.services
        if not services:
            raise ApiError(503, "No model is loaded; ask for one by its name.", code="overloaded")
        return self.default.service or services[0]

    @property
    def model_metrics(self) -> list[tuple[ServerMetrics, Engine | None]]:
        """What is counted of every model that has ever been here, with its engine while it is."""
        return [
            (entry.metrics, None if entry.service is None else entry.service.built.engine)
            for entry in self.entries.values()
            if entry.metrics is not None
        ]

    def start(self) -> None:
        """Start the engines that are here; call it from the event loop that will be served."""
        for service in self.services:
            service.bridge.start()
        gc.freeze()  # going through all that a model is made of would hold up a step for 20 ms, now and then

    def find(self, name: str | None) -> tuple[Entry, str]:
        """The model of a name, and the adapter's name if it is one's; ApiError 404 if there is none."""
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
            404, f"There is no model {name!r:.200} here; there is {known}.", param="model", code="model_not_found"
        )

    async def lend(self, request: Request, name: str | None) -> Service:
        """The service of a model for the time of a request, loaded if need be."""
        entry, adapter = self.find(name)
        request.scope["martlet.lease"] = Lease(entry)
        service = await self._loaded(entry) if entry.service is None else entry.service
        if adapter:
            found = service.built.adapters.get(adapter)
            if found is None:
                raise ApiError(
                    404, f"The adapter {adapter!r} has just been unloaded.", param="model", code="model_not_found"
                )
            service = service.named(adapter, found.digest)
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
        except RequestError as error:  # an adapter's file that is gone: not the fault of who asks
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
        """Close the model that has been idle for the longest time; False if none is idle."""
        idle = [e for e in self.entries.values() if e.service is not None and e.load is not None and not e.n_lent]
        if not idle:
            return False
        entry = min(idle, key=lambda e: e.used_s)
        service, entry.service = entry.service, None
        assert service is not None
        service.metrics.retire(service.built.engine)  # it is idle: nothing is counted any more
        logger.info("model %s is closed to make room", entry.name)
        await asyncio.to_thread(service.close)
        del service
        gc.unfreeze()
        gc.collect()  # its weights lie in cycles
        gc.freeze()
        return True

    async def add_adapter(self, request: Request, name: str, path: str, model: str | None, replaces: bool) -> None:
        """Load an adapter of a model, between two steps of its engine; a name that is taken only with `replaces`."""
        entry, own = self.find(model)
        if own:
            raise RequestError(f"{own!r:.200} is an adapter, and no model that has any.", param="base_model_name")
        self._check_name(entry, name, replaces)
        service = await self.lend(request, entry.name)
        try:
            adapter = await asyncio.to_thread(open_adapter, path, service.built.spec, "lora_path")
        except FormatError as error:
            raise RequestError(str(error), param="lora_path") from None
        self._check_name(entry, name, replaces)  # somebody else may have taken it meanwhile
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
        if not name or not name.isprintable() or len(name) > MOST_NAME:
            raise RequestError(
                f"{name!r:.200} is no name; expected 1 to {MOST_NAME} characters that can be printed.",
                param="lora_name",
            )
        if name in self.entries or any(name in e.adapters for e in self.entries.values() if e is not entry):
            raise RequestError(
                f"{name!r:.200} cannot be an adapter of {entry.name!r}: a model has the name.", param="lora_name"
            )
        if name in entry.adapters and not replaces:
            raise RequestError(
                f"There is an adapter {name!r:.200}; unload it, or give load_inplace.", param="lora_name", code="exists"
            )

    async def remove_adapter(self, name: str) -> None:
        """Take no more requests with an adapter."""
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
        """Take no more requests."""
        self.draining = True
        for service in self.services:
            service.drain()

    def cancel_all(self) -> None:
        """End whatever is open: the server shuts down."""
        for service in self.services:
            service.cancel_all()

    def close(self) -> None:
        """Close every model. Idempotent."""
        for service in self.services:
            service.close()


def registry_of(request: Request) -> Registry:
    """The models of the server that a request is for."""
    found: Registry = request.app.state.registry
    return found


def for_model(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose body is read first, for the model that it names."""

    @wraps(endpoint)
    async def chosen(request: Request) -> Response:
        registry = registry_of(request)
        settings = registry.settings
        PARENT.set(request.headers.get("traceparent", ""))
        found = parse_json(await read_body(request, settings.max_body_bytes, settings.send_timeout_s))
        request.scope["martlet.body"] = found
        name: Any = found.get("model")
        await registry.lend(request, name if isinstance(name, str) else None)
        return await endpoint(request)

    return chosen
