"""An `EngineClient` over several engines, which come and go; `ReplicaIndex` chooses the engine of each request. Invariant: an engine
that has its share of the open requests gets no more while another one has not.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from random import Random
from typing import Final, Protocol

import msgspec

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import AdapterQuarantined, EngineDraining, EngineUnavailable
from loraplex.engine.messages import (
    AdapterKey,
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    ProbeReport,
    Started,
)
from loraplex.platform.engines.demand import Demand
from loraplex.platform.engines.placement import replica_state
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.engines.prefix_index import PromptPrefix, prompt_prefixes
from loraplex.platform.engines.replica_index import ReplicaIndex
from loraplex.platform.engines.slow_engines import TRIAL_S, RequestWatch, SlowEngines, trial_request
from loraplex.platform.startup_errors import EngineStartFailed

NO_STATS: Final = EngineStats()
REFUSALS: Final = (EngineDraining.code, EngineUnavailable.code)
"""Of an engine that has not begun a request, so that the next one takes it."""
JOIN_POLL_S: Final = 0.5
"""How often `wait_ready` looks for engines that have joined meanwhile."""


class ObservedEngine(Protocol):
    """The state of an engine, for probes, metrics and people.

    `last_stats` is None while the engine does not respond; `known_stats` are its newest ones all the same, of `known_at`.
    `restarts` and `failure`, why the engine does not run now, are known of an engine that this process supervises. `deaths`
    counts processes that were lost and replaced by another. `device`: what the engine has for itself, if this process knows.
    """

    @property
    def address(self) -> str: ...

    @property
    def device(self) -> str | None: ...

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


class EngineFleet(Protocol):
    """Starts and drains the engines of a pool while it serves."""

    async def add(self, address: str | None, replaces: int | None) -> int:
        """Add an engine and return its number: that at `address`, or a new one, on the device of `replaces` where two fit.

        Raises `EngineNotAdded`.
        """
        ...

    async def drain(self, number: int, grace_s: float | None) -> None:
        """Let an engine take no more requests, and end once its open ones have, or after `grace_s`; None: the setting `drain_s`.

        Returns at once. Raises `EngineUnavailable`.
        """
        ...


class EnginePool:
    """Distributes requests over engines; with a single one it passes every call through.

    Each engine has a number, which no other one gets unless it is added with it. `poison_memory` is the memory to which the
    engines report their deaths. `observed` lists the engines for observers, where one client stands for several. `fleet` starts
    and drains engines; None where others do. `next_number` is that of the next new engine. `slow_engines` get fewer requests.
    """

    def __init__(
        self,
        engines: Sequence[ManagedEngine] = (),
        poison_memory: PoisonMemory | None = None,
        observed: Callable[[], Mapping[int, ObservedEngine]] | None = None,
    ) -> None:
        self.poison_memory = poison_memory or PoisonMemory()
        self.fleet: EngineFleet | None = None
        self._engines = dict(enumerate(engines))
        self.next_number = len(self._engines)
        self._observed = observed
        self._info: EngineInfo | None = None
        self._owners: dict[str, ManagedEngine] = {}
        self._index = ReplicaIndex(Random())
        self._reports: dict[int, EngineStats] = {}
        self.slow_engines = SlowEngines()
        self.demand = Demand()
        self._trials: dict[int, asyncio.Task[None]] = {}

    @property
    def engines(self) -> Mapping[int, ManagedEngine]:
        """The engines by their number."""
        return self._engines

    def add(self, engine: ManagedEngine, number: int | None = None) -> int:
        """Let an engine take requests, as soon as it is connected, and return its number."""
        number = self.next_number if number is None else number
        self.next_number = max(self.next_number, number + 1)
        self._engines[number] = engine
        return number

    def remove(self, number: int) -> None:
        """Send an engine nothing any more. Its open requests go on; whoever owns it closes it."""
        with suppress(EngineUnavailable):
            self._info = self.info()
        self._engines.pop(number, None)
        self._reports.pop(number, None)
        self._index.remove(str(number))

    def observed(self) -> Mapping[int, ObservedEngine]:
        """The engines by their number, which stays with an engine while it is known."""
        return dict(sorted(self._engines.items())) if self._observed is None else self._observed()

    def info(self) -> EngineInfo:
        """The `EngineInfo` of an engine that is ready, or else is described, or of one that has left.

        Raises `EngineUnavailable` before the first.
        """
        for engine in self._engines.values():
            if engine.connected:
                return engine.info()
        for engine in self._engines.values():
            with suppress(EngineUnavailable):
                return engine.info()
        if self._info is None:
            raise EngineUnavailable("no engine is ready")
        return self._info

    def require_one_model(self) -> None:
        """Check that all connected engines serve one model. Raises `EngineStartFailed`."""
        digests = {engine.info().model_digest for engine in self._engines.values() if engine.connected}
        if len(digests) > 1:
            raise EngineStartFailed("the engines serve different models: " + ", ".join(sorted(digests)))

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """See `EngineClient.submit`."""
        if len(self._engines) == 1:
            [(number, engine)] = self._engines.items()
            stream = engine.submit(request)
            return stream if self._observed is not None else self._followed(stream, number, None)
        return self._submit_placed(request)

    async def _submit_placed(self, request: EngineRequest) -> AsyncIterator[Event]:
        """Run a request on the engine that suits it best, or on the next one where that one refuses it."""
        namespace, key = request.namespace, None if request.adapter is None else request.adapter.key
        prefixes = prompt_prefixes(namespace, key, request.cache_salt, request.prompt_token_ids)
        tried, begun = set[int](), False
        refused = Failed(request.request_id, EngineUnavailable.code, "no engine takes requests now")
        while not begun and (number := self._choose(namespace, key, prefixes, tried)) is not None:
            tried.add(number)
            engine = self._engines[number]
            owns = self._owners.setdefault(request.request_id, engine) is engine
            self._index.sent(str(number), namespace, key, prefixes)
            stream = self._followed(engine.submit(request), number, self.slow_engines.watch(number, request))
            try:
                async for event in stream:
                    if not begun and isinstance(event, Failed) and event.code in REFUSALS:
                        refused = event
                        break
                    begun = True
                    yield event
            finally:
                self._index.ended(str(number), namespace, key)
                was_aborted = owns and self._owners.pop(request.request_id, None) is None
                await stream.aclose()  # type: ignore[attr-defined]  # the clients' streams are generators
            if was_aborted:
                break
        if not begun:
            yield refused

    async def _followed(
        self, stream: AsyncIterator[Event], number: int, watch: RequestWatch | None
    ) -> AsyncIterator[Event]:
        """Let `Started` say which engine serves the request, and `watch` see how fast it is."""
        self.demand.change(1)
        try:
            async for event in stream:
                if watch is not None:
                    watch.see(event)
                is_start = isinstance(event, Started)
                yield msgspec.structs.replace(event, engine=str(number)) if is_start else event
        finally:
            self.demand.change(-1)
            await stream.aclose()  # type: ignore[attr-defined]  # the clients' streams are generators

    def _choose(
        self,
        namespace: bytes,
        adapter: AdapterKey | None,
        prefixes: Sequence[PromptPrefix],
        tried: Collection[int] = (),
    ) -> int | None:
        """The best engine for a request, by what each last reported, that is not in `tried`.

        While none takes requests it is the first one, whose client knows why, and waits for one that was lost a moment ago.
        """
        self._read_reports()
        for engine_id in self._index.choose(namespace, adapter, prefixes):
            if int(engine_id) not in tried:
                return int(engine_id)
        return None if tried else next(iter(self._engines), None)

    def _read_reports(self) -> None:
        """Take over the statistics that came since the last request; they name each adapter in memory, so each is read once.

        A slow engine counts as one with fewer rows, or is left out while another one takes requests.
        """
        taking = {number for number, engine in self._engines.items() if takes_requests(engine)}

        def engines_wanted() -> int:
            return self.demand.engines_wanted([self._engines[each].last_stats or NO_STATS for each in taking])

        if self.slow_engines.review(taking, engines_wanted):
            self._reports.clear()
            for number in taking:
                if self.slow_engines.share(number) < 1.0 and number not in self._trials:
                    self._trials[number] = asyncio.create_task(self._try(number, self._engines[number]))
        usable = {number for number in taking if self.slow_engines.share(number)} or taking
        for number in self._engines:
            if number not in usable:
                self._reports.pop(number, None)
                self._index.remove(str(number))
                continue
            stats = self._engines[number].last_stats or NO_STATS
            if self._reports.get(number) is not stats:
                self._reports[number] = stats
                state = replica_state(str(number), stats, stats.running + stats.waiting)
                state.capacity = max(1, round(state.capacity * (self.slow_engines.share(number) or 1.0)))
                self._index.update(state)

    async def _try(self, number: int, engine: ManagedEngine) -> None:
        """Send trials to a slow engine, which may have no requests to be judged by, until it has recovered or left."""
        try:
            while self.slow_engines.share(number) < 1.0 and self._engines.get(number) is engine:
                with suppress(EngineUnavailable):
                    trial = trial_request(engine.info().vocab_size)
                    watch = self.slow_engines.watch(number, trial)
                    async for event in engine.submit(trial):
                        watch.see(event)
                await asyncio.sleep(TRIAL_S)
        finally:
            del self._trials[number]

    def home(self, namespace: bytes, adapter: AdapterRef | None) -> ManagedEngine:
        """The engine that the next request of an adapter, or of a tenant for the base model, goes to.

        Raises `EngineUnavailable` without engines.
        """
        number = self._choose(namespace, None if adapter is None else adapter.key, ())
        if number is None:
            raise EngineUnavailable("there is no engine")
        return self._engines[number]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`; an id that this pool does not know is aborted on every engine."""
        owner = self._owners.pop(request_id, None)
        engines = self._engines.values() if owner is None else (owner,)
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
            *(engine.forget(namespace) for engine in self._engines.values()), return_exceptions=True
        )
        for failure in filter(None, results):
            raise failure

    async def wait_ready(self) -> None:
        """See `EngineClient.wait_ready`; returns with the first engine that is ready, also one that joins meanwhile."""
        while not any(map(takes_requests, self._engines.values())):
            away = [engine for engine in self._engines.values() if not engine.connected]
            waiting = [asyncio.create_task(engine.wait_ready()) for engine in away]
            waiting.append(asyncio.create_task(asyncio.sleep(JOIN_POLL_S)))
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()

    async def stats(self) -> EngineStats:
        """The statistics of the first connected engine; those of each engine are read from `engines`."""
        for engine in self._engines.values():
            if engine.connected:
                return await engine.stats()
        raise EngineUnavailable("no engine is connected")

    async def drain(self) -> None:
        """See `EngineClient.drain`."""
        for trial in list(self._trials.values()):
            trial.cancel()
        await asyncio.gather(*(engine.drain() for engine in self._engines.values()))

    def fail_open(self, reason: str) -> None:
        """End every open request with `Failed(server_shutting_down)`."""
        for engine in self._engines.values():
            engine.fail_open(reason)

    @property
    def open_requests(self) -> int:
        """Requests whose last event has not arrived."""
        return sum(engine.open_requests for engine in self._engines.values())


def takes_requests(engine: ObservedEngine) -> bool:
    """Whether the engine is there and does not drain, as far as this process knows."""
    stats = engine.last_stats
    return engine.connected and not (stats is not None and stats.draining)
