"""An `EngineClient` over several engines. Rendezvous hashing gives each adapter a home engine; its requests go to the next one
when the home has more than its share of requests (bounded loads, Mirrokni et al., SODA 2018).
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import AdapterQuarantined, EngineUnavailable
from loraplex.engine.messages import AdapterRef, EngineInfo, EngineRequest, EngineStats, Event, ProbeReport
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.startup_errors import EngineStartFailed

SPILL_FACTOR = 1.25


class ManagedEngine(EngineClient, Protocol):
    """An engine client that also reports the engine's state. `RemoteEngine` implements it.

    `last_stats` is None while the engine does not respond; `known_stats` are its newest ones all the same, of `known_at`.
    `restarts` and `failure`, why the engine does not run now, are known of an engine that this process supervises. `deaths`
    counts processes that were lost and replaced by another.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def open_requests(self) -> int: ...

    @property
    def last_stats(self) -> EngineStats | None: ...

    @property
    def known_stats(self) -> EngineStats | None: ...

    @property
    def known_at(self) -> datetime | None: ...

    @property
    def restarts(self) -> int: ...

    @property
    def deaths(self) -> int: ...

    @property
    def failure(self) -> str | None: ...

    def silent_for(self) -> float: ...

    def fail_open(self, reason: str) -> None: ...


class EnginePool:
    """Distributes requests over `engines`; with a single engine it passes every call through.

    `poison_memory` is the memory to which the engines report their deaths.
    """

    def __init__(self, engines: Sequence[ManagedEngine], poison_memory: PoisonMemory | None = None) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self.poison_memory = poison_memory or PoisonMemory()
        self._owners: dict[str, ManagedEngine] = {}

    def info(self) -> EngineInfo:
        """The `EngineInfo` of the first engine that is ready. Raises `EngineUnavailable` while none is."""
        for engine in self.engines:
            if engine.connected:
                return engine.info()
        return self.engines[0].info()

    def require_one_model(self) -> None:
        """Check that all connected engines serve one model. Raises `EngineStartFailed`."""
        digests = {engine.info().model_digest for engine in self.engines if engine.connected}
        if len(digests) > 1:
            raise EngineStartFailed("the engines serve different models: " + ", ".join(sorted(digests)))

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """See `EngineClient.submit`."""
        if len(self.engines) == 1:
            return self.engines[0].submit(request)
        return self._submit_to(self.pick(request), request)

    async def _submit_to(self, engine: ManagedEngine, request: EngineRequest) -> AsyncIterator[Event]:
        stream = engine.submit(request)
        owns = self._owners.setdefault(request.request_id, engine) is engine
        try:
            async for event in stream:
                yield event
        finally:
            if owns:
                self._owners.pop(request.request_id, None)
            await stream.aclose()  # type: ignore[attr-defined]  # the clients' streams are generators

    def pick(self, request: EngineRequest) -> ManagedEngine:
        """See `home`."""
        return self.home(request.namespace, request.adapter)

    def home(self, namespace: bytes, adapter: AdapterRef | None) -> ManagedEngine:
        """Choose the engine of an adapter, or of a tenant for the base model.

        It is the first engine of the ranking that takes requests and has no more than its share of them.
        """
        alive = [engine for engine in self.engines if _takes_requests(engine)]
        if len(alive) <= 1:
            return alive[0] if alive else self.engines[0]
        ranked = sorted(alive, key=lambda engine: _rank(namespace, adapter, self.engines.index(engine)))
        total = sum(engine.open_requests for engine in alive)
        share = math.ceil(SPILL_FACTOR * (total + 1) / len(alive))
        return next((engine for engine in ranked if engine.open_requests < share), ranked[0])

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`; an id that this pool does not know is aborted on every engine."""
        owner = self._owners.get(request_id)
        engines = self.engines if owner is None else (owner,)
        await asyncio.gather(*(engine.abort(request_id) for engine in engines))

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """See `EngineClient.probe`; runs on the engine that will most likely serve the adapter.

        An adapter that was in use at two deaths of engines fails the probe without an engine.
        """
        refused = self.poison_memory.refusal(adapter)
        if refused is not None:
            return ProbeReport(digest=adapter.digest, code=AdapterQuarantined.code, message=refused[1])
        report = await self.home(adapter.namespace, adapter).probe(adapter)
        if report.code is None:
            self.poison_memory.record_finished([adapter])
        return report

    async def forget(self, namespace: bytes) -> None:
        """See `EngineClient.forget`. Sends it to every engine, and raises afterwards if one of them failed."""
        results = await asyncio.gather(
            *(engine.forget(namespace) for engine in self.engines), return_exceptions=True
        )
        for failure in filter(None, results):
            raise failure

    async def wait_ready(self) -> None:
        """See `EngineClient.wait_ready`; returns with the first engine that is ready."""
        waiting = [asyncio.create_task(engine.wait_ready()) for engine in self.engines]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def stats(self) -> EngineStats:
        """The statistics of the first connected engine; those of each engine are read from `engines`."""
        for engine in self.engines:
            if engine.connected:
                return await engine.stats()
        raise EngineUnavailable("no engine is connected")

    async def drain(self) -> None:
        """See `EngineClient.drain`."""
        await asyncio.gather(*(engine.drain() for engine in self.engines))

    def fail_open(self, reason: str) -> None:
        """End every open request with `Failed(engine_unavailable)`."""
        for engine in self.engines:
            engine.fail_open(reason)

    @property
    def open_requests(self) -> int:
        """Requests whose last event has not arrived."""
        return sum(engine.open_requests for engine in self.engines)


def _takes_requests(engine: ManagedEngine) -> bool:
    stats = engine.last_stats
    return engine.connected and not (stats is not None and stats.draining)


def _rank(namespace: bytes, adapter: AdapterRef | None, index: int) -> bytes:
    """Rendezvous weight. Requests of one adapter (of one tenant, for the base model) rank the engines in the same order."""
    digest = b"" if adapter is None else adapter.digest.encode()
    key = b"%d|%d|" % (index, len(namespace)) + namespace + digest
    return hashlib.blake2b(key, digest_size=8).digest()
