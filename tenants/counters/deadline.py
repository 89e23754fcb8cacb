"""A deadline for replies of another process: it counts that process's silence, and no delay of this process.

Invariant: on an event loop that is not late, a call of a silent server ends at its deadline, and any call ends after
`BUSY_SECONDS`, or at its deadline if that is later.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# A loop that is later than this was blocked by a long callback or by other processes.
LATE_SECONDS = 0.005
GRACE_SECONDS = 0.01
# The longest wait for a server that answers others meanwhile.
BUSY_SECONDS = 1.0


@dataclass(slots=True)
class ReplyClock:
    """When the last reply of a server was read, a time of the running loop. Its replies come in the order of the calls."""

    read_at: float = -math.inf


class SilenceTimer:
    """Calls `end` once a server has been silent for `wait_s`, from now or from its last reply to any call.

    A loop that is late reads for `GRACE_SECONDS` more: the reply may have been in its socket in time.
    """

    def __init__(self, wait_s: float, replies: ReplyClock, end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = wait_s
        self._replies = replies
        self._end = end
        began = self._loop.time()
        self._due = began + wait_s
        self._last = began + max(wait_s, BUSY_SECONDS)
        self._timer = self._loop.call_at(self._due, self._expire, True)

    def cancel(self) -> None:
        """Never call `end`."""
        self._timer.cancel()

    def _expire(self, graceful: bool) -> None:
        now = self._loop.time()
        due = min(self._replies.read_at + self._wait_s, self._last)
        if due > self._due:
            self._due = due
            self._timer = self._loop.call_at(due, self._expire, True)
        elif graceful and now - self._due > LATE_SECONDS:
            self._timer = self._loop.call_later(GRACE_SECONDS, self._expire, False)
        else:
            self._end()


class Deadline:
    """A context that raises `TimeoutError` when its block waits for a server that has been silent for `wait_s`."""

    def __init__(self, wait_s: float, replies: ReplyClock) -> None:
        self._wait_s = wait_s
        self._replies = replies
        self._bound = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._bound.__aenter__()
        self._timer = SilenceTimer(self._wait_s, self._replies, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._bound.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        self._bound.reschedule(asyncio.get_running_loop().time())


def expire_reply(reply: "asyncio.Future[Any]", wait_s: float, replies: ReplyClock) -> SilenceTimer:
    """The same for one future: `TimeoutError` becomes its exception, unless it is done before."""

    def end() -> None:
        if not reply.done():
            reply.set_exception(TimeoutError())

    return SilenceTimer(wait_s, replies, end)
