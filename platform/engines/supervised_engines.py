"""The engines that a gateway starts itself: children, each on a place of its own, supervised and restarted each by itself.

Invariant: the gateway serves as soon as one of them is ready; one that does not start leaves the others alone.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog

from loraplex.engine.errors import EngineUnavailable
from loraplex.platform.engines.engine_places import EnginePlace
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.process import EngineProcess
from loraplex.platform.errors import EngineNotAdded

LOG = structlog.get_logger("loraplex.engines")

MakeProcess: TypeAlias = Callable[[int, EnginePlace], EngineProcess]
"""Makes the process of the engine with this number, at this place."""


class SupervisedEngines:
    """Starts the engines of `pool`, and stops them."""

    def __init__(
        self, pool: EnginePool, places: Sequence[EnginePlace], make: MakeProcess, drain_s: float = 30.0
    ) -> None:
        self._pool = pool
        self._places = places
        self._make = make
        self._drain_s = drain_s
        self._processes: dict[int, EngineProcess] = {}
        self._starts: dict[int, asyncio.Task[Exception | None]] = {}
        self._retiring: dict[int, asyncio.Task[None]] = {}

    async def start(self, engines: int) -> None:
        """Start `engines` at the first places, and wait until one is ready. Raises the error of the last where none will be."""
        pending = {self._starts[self._launch(place)] for place in self._places[:engines]}
        failure = None
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for start in done:
                if (failure := start.result()) is None:
                    return
        if failure is not None:
            raise failure

    async def stop(self) -> None:
        """End all engines, also those that still start."""
        tasks = [*self._starts.values(), *self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    async def add(self, address: str | None, replaces: int | None) -> int:
        """See `EngineFleet.add`; returns while the engine starts."""
        if address is not None:
            raise EngineNotAdded(
                "this server starts its engines itself; a gateway alone takes addresses", "address"
            )
        return self._launch(self._free_place(replaces))

    async def drain(self, number: int, grace_s: float | None) -> None:
        """See `EngineFleet.drain`; one that does not run is ended at once."""
        process = self._processes.get(number)
        if process is None:
            raise EngineUnavailable("the engine has left")
        if process.client.connected:
            process.drain(self._drain_s if grace_s is None else grace_s)
        else:
            self._starts[number].cancel()
            process.drained.set()
        if number not in self._retiring:
            self._retiring[number] = asyncio.create_task(self._retire(number, process))

    async def _retire(self, number: int, process: EngineProcess) -> None:
        await process.drained.wait()
        await asyncio.gather(self._starts.pop(number), return_exceptions=True)
        self._pool.remove(number)
        await process.stop()
        self._processes.pop(number, None)
        del self._retiring[number]

    def _free_place(self, replaces: int | None) -> EnginePlace:
        """A place that no engine has; on a CPU, where there is none, that of the engine that leaves, or a shared one."""
        used = Counter(process.place for process in self._processes.values())
        place = min(self._places, key=used.__getitem__)
        if not used[place]:
            return place
        if place.gpu is not None:
            raise EngineNotAdded(
                "each visible GPU has an engine: drain one first, and add one when it has ended"
            )
        if replaces in self._processes:
            return self._processes[replaces].place
        LOG.warning("engines share cores", place=place.device)
        return place

    def _launch(self, place: EnginePlace) -> int:
        number = self._pool.next_number
        process = self._processes[number] = self._make(number, place)
        self._pool.add(process.client, number)
        self._starts[number] = asyncio.create_task(self._start(number, process))
        return number

    async def _start(self, number: int, process: EngineProcess) -> Exception | None:
        """Start an engine and return why it did not start; then it leaves."""
        try:
            await process.start()
        except Exception as error:  # noqa: BLE001 - raised by `start` where it is the only one, else logged
            del self._processes[number]
            self._pool.remove(number)
            if self._processes or number:
                LOG.error("engine did not start", engine=number, reason=str(error))
            return error
        return None
