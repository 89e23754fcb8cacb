"""Shares one run of some work among all that ask for it meanwhile (single-flight).

Invariant: work that has ended is never joined. Of one key at most one run is in progress, unless one was cancelled.
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
    """Runs of work by key.

    `cancels`: whether work whose callers have all been cancelled is cancelled; otherwise it runs to its end, and new
    callers join it.
    """

    def __init__(self, *, cancels: bool = True) -> None:
        self._cancels = cancels
        self._running: dict[Hashable, _Flight[Result]] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether a run of `key` is in progress."""
        return key in self._running and not self._running[key].task.done()

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of the run of `key` in progress, or of `work`. Raises its error."""
        flight = self._running.get(key)
        if flight is None or flight.task.done():
            flight = self._running[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(partial(self._end, key, flight))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if self._cancels and not flight.waiting:
                self._remove(key, flight)
                flight.task.cancel()

    def _end(self, key: Hashable, flight: _Flight[Result], task: "asyncio.Task[Result]") -> None:
        self._remove(key, flight)
        # All callers may have been cancelled; retrieve the error, so that asyncio does not log it.
        if not task.cancelled():
            task.exception()

    def _remove(self, key: Hashable, flight: _Flight[Result]) -> None:
        if self._running.get(key) is flight:
            del self._running[key]
