"""A deadline for replies of another process that excludes delays of this process.

Invariant: on an event loop that is not late, a block ends at its deadline.
"""

import asyncio
from types import TracebackType
from typing import Any

# A loop that is later than this was blocked by a long callback or by other processes.
LATE_SECONDS = 0.005
GRACE_SECONDS = 0.01


class Deadline:
    """A context that raises `TimeoutError` when its block runs until `at`, a time of the running loop.

    A loop that is late reads for `GRACE_SECONDS` more: the reply may have been in its socket in time.
    """

    def __init__(self, at: float) -> None:
        self._at = at
        self._bound = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._bound.__aenter__()
        self._timer = self._loop.call_at(self._at, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._bound.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        now = self._loop.time()
        self._bound.reschedule(now + GRACE_SECONDS if now - self._at > LATE_SECONDS else now)


class ReplyExpiry:
    """The same for one future: `TimeoutError` becomes its exception at `at`, unless it is done before."""

    def __init__(self, reply: "asyncio.Future[Any]", at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply = reply
        self._at = at
        self._timer = self._loop.call_at(at, self._expire)

    def cancel(self) -> None:
        """Let the future be."""
        self._timer.cancel()

    def _expire(self) -> None:
        if self._loop.time() - self._at > LATE_SECONDS:
            self._timer = self._loop.call_later(GRACE_SECONDS, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self._reply.done():
            self._reply.set_exception(TimeoutError())
