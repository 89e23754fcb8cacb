"""A deadline for replies of another process: it counts that process's silence, and no delay of this process.

Invariant: on an event loop that is not late, a call of a silent server ends at its deadline, and any call ends after
`BUSY_SECONDS`, or at its deadline if that is later.
"""

import asyncio
import math
from dataclasses import dataclass
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
    """Fails `reply` with `TimeoutError` once a server has been silent for `wait_s`, from now or from its last reply to any call.

    A loop that is late reads for `GRACE_SECONDS` more: the reply may have been in its socket in time.
    """

    def __init__(self, reply: "asyncio.Future[Any]", wait_s: float, replies: ReplyClock) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply = reply
        self._wait_s = wait_s
        self._replies = replies
        began = self._loop.time()
        self._due = began + wait_s
        self._last = began + max(wait_s, BUSY_SECONDS)
        self._timer = self._loop.call_at(self._due, self._expire, True)

    def cancel(self) -> None:
        """Leave the reply alone from now on."""
        self._timer.cancel()

    def _expire(self, graceful: bool) -> None:
        now = self._loop.time()
        due = min(self._replies.read_at + self._wait_s, self._last)
        if due > self._due:
            self._due = due
            self._timer = self._loop.call_at(due, self._expire, True)
        elif graceful and now - self._due > LATE_SECONDS:
            self._timer = self._loop.call_later(GRACE_SECONDS, self._expire, False)
        elif not self._reply.done():
            self._reply.set_exception(TimeoutError())
