"""An `EngineClient` over several engines; `placement.rank` chooses the engine of each request. Invariant: an engine that has its
share of the open requests gets no more while another one has not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

import msgspec

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import AdapterQuarantined, EngineUnavailable
from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    ProbeReport,
    Started,
)
from loraplex.platform.engines.placement import PlacementRequest, ReplicaState, rank, replica_state
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.startup_errors import EngineStartFailed

NO_STATS: Final = EngineStats()


class ObservedEngine(Protocol):
    """The state of an engine, for probes, metrics and people.

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

    def info(self) -> EngineInfo: ...


class ManagedEngine(EngineClient, ObservedEngine, Protocol):
    """An engine client that also reports the engine's state. `RemoteEngine` implements it."""

    def fail_open(self, reason: str) -> None: ...


class EnginePool:
    """Distributes requests over `engines`; with a single engine it passes every call through.

    `poison_memory` is the memory to which the engines report their deaths. `observed` lists the engines for observers, where
    one client stands for several.
    """

    def __init__(
        self,
        engines: Sequence[ManagedEngine],
        poison_memory: PoisonMemory | None = None,
        observed: Callable[[], Mapping[int, ObservedEngine]] | None = None,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self.poison_memory = poison_memory or PoisonMemory()
        self._observed = observed
        self._owners: dict[str, ManagedEngine] = {}
        self._states: dict[str, tuple[EngineStats, ReplicaState]] = {}

    def observed(self) -> Mapping[int, ObservedEngine]:
        """The engines by their number, which stays with an engine while it is known."""
        return dict(enumerate(self.engines)) if self._observed is None else self._observed()

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
            stream = self.engines[0].submit(request)
            return stream if self._observed is not None else _numbered(stream, 0)
        return self._submit_to(self.pick(request), request)

    async def _submit_to(self, engine: ManagedEngine, request: EngineRequest) -> AsyncIterator[Event]:
        stream = _numbered(engine.submit(request), self.engines.index(engine))
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
        """Choose the engine of an adapter, or of a tenant for the base model; see `rank`.

        It takes requests, and has less than its share of them.
        """
        alive = [(str(i), engine) for i, engine in enumerate(self.engines) if _takes_requests(engine)]
        if len(alive) <= 1:
            return alive[0][1] if alive else self.engines[0]
        states = [self._state(replica_id, engine) for replica_id, engine in alive]
        key = None if adapter is None else adapter.key
        return self.engines[int(rank(states, PlacementRequest(namespace=namespace, adapter=key))[0])]

    def _state(self, replica_id: str, engine: ManagedEngine) -> ReplicaState:
        """Its state with its load of now; what its statistics say is read once, since they name each adapter in memory."""
        stats = engine.last_stats or NO_STATS
        known = self._states.get(replica_id)
        if known is None or known[0] is not stats:
            known = self._states[replica_id] = (stats, replica_state(replica_id, stats, 0))
        known[1].open_requests = engine.open_requests
        return known[1]

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
        """End every open request with `Failed(server_shutting_down)`."""
        for engine in self.engines:
            engine.fail_open(reason)

    @property
    def open_requests(self) -> int:
        """Requests whose last event has not arrived."""
        return sum(engine.open_requests for engine in self.engines)


async def _numbered(stream: AsyncIterator[Event], number: int) -> AsyncIterator[Event]:
    """Let `Started` say which engine serves the request."""
    try:
        async for event in stream:
            is_start = isinstance(event, Started)
            yield msgspec.structs.replace(event, engine=str(number)) if is_start else event
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # the clients' streams are generators


def _takes_requests(engine: ManagedEngine) -> bool:
    stats = engine.last_stats
    return engine.connected and not (stats is not None and stats.draining)
