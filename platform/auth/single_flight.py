"""Shares one run of some work among all that ask for it meanwhile (single-flight).

Invariant: work whose callers have all been cancelled is cancelled; work that has ended is never joined.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Flight(Generic[Result]):
    task: "asyncio.Task[Result]"
    waiting: int = 0


class SingleFlight(Generic[Result]):
    """Runs of work by key, at most one of each key at a time."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _Flight[Result]] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of the run of `key` in progress, or of `work`. Raises its error."""
        flight = self._running.get(key)
        if flight is None:
            flight = self._running[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(partial(self._remove, key, flight))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                self._remove(key, flight)
                flight.task.cancel()

    def _remove(self, key: Hashable, flight: _Flight[Result], _: object = None) -> None:
        if self._running.get(key) is flight:
            del self._running[key]
