"""Tasks that outlive their request: settling usage, cancelling reservations.

Invariant: a task is referenced here until its end, and a gateway closes its stores only after `join`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

from loraplex.tenants.errors import TenantsError

T = TypeVar("T")
LOG: Final = structlog.get_logger("loraplex.background")


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
        """Return the result of `work`, which continues when the caller is cancelled; then its error is logged."""
        task = self.begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise

    async def join(self) -> None:
        """Wait for all tasks. Their errors are ignored: they belong to requests that have ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _log_error(ended: "asyncio.Task[Any]") -> None:
    """Log the error of work whose caller is gone: `asyncio.shield` counts it as retrieved."""
    error = None if ended.cancelled() else ended.exception()
    if isinstance(error, TenantsError):
        LOG.warning("work of a request that has ended failed", reason=str(error))
    elif error is not None:
        LOG.error("work of a request that has ended failed", exc_info=error)
