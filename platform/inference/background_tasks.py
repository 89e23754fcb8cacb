"""Tasks that outlive their request: settling usage, cancelling reservations.

Invariant: a task is referenced here until its end, and a gateway closes its stores only after `join`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """The background tasks of one gateway, on its event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` as a task; the caller need not keep a reference to it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which continues when the caller is cancelled."""
        return await asyncio.shield(self.begin(work))

    async def join(self) -> None:
        """Wait for all tasks. Their errors are ignored: they belong to requests that have ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
