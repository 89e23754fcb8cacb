"""Work that goes on when those who wait for it leave: settling what was used, giving back what was reserved.

Invariant: it is held here until its end, and a gateway closes its stores only after `join`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """The detached work of one gateway, on its event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """`work` as a task that nobody has to hold."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on when the waiting is cancelled."""
        return await asyncio.shield(self.begin(work))

    async def join(self) -> None:
        """Wait until nothing is left; what it raised was for those who left."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
