"""The engines that a gateway starts itself: children, each on a place of its own, supervised and restarted each by itself.

Invariant: the gateway serves as soon as one of them is ready; one that does not start leaves the others alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.process import EngineProcess
from loraplex.platform.processes.engine_places import EnginePlace

LOG = structlog.get_logger("loraplex.engines")

MakeProcess: TypeAlias = Callable[[int, EnginePlace], EngineProcess]
"""Makes the process of the engine with this number, at this place."""


class SupervisedEngines:
    """Starts the engines of `pool`, and stops them."""

    def __init__(self, pool: EnginePool, places: Sequence[EnginePlace], make: MakeProcess) -> None:
        self._pool = pool
        self._places = places
        self._make = make
        self._processes: dict[int, EngineProcess] = {}
        self._starts: dict[int, asyncio.Task[Exception | None]] = {}

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
        for start in self._starts.values():
            start.cancel()
        await asyncio.gather(*self._starts.values(), return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

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
