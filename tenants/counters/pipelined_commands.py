"""Sends commands of concurrent callers on one connection, without waiting for each other's replies (pipelining).

Invariant: a connection's replies come in the order of its commands. A connection that was silent for one caller gets no further
command, so that each caller's deadline concerns the server, and not an earlier caller's connection. Replies on one connection
are no sign of life of another. On an event loop that is not late, a call of a silent server ends at its deadline, and any call
ends after `BUSY_SECONDS`, or at its deadline if that is later.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

CLOSE_SECONDS: Final = 1.0
"""How long a connection that was late may still take for the replies of others."""
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


class PipelinedCommands:
    """The commands of one client. Its connection is the client's: closing the client ends it."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._pipe: _Pipe | None = None
        self._opening: asyncio.Task[_Pipe] | None = None

    async def run(self, wait_s: float, arguments: Sequence[str | int]) -> Any:
        """Send a command and return its reply. Raises `TimeoutError` when the server was silent for `wait_s`, and errors of
        the client.

        The silence includes the opening of a connection. See `SilenceTimer` for a loop that is late.
        """
        pipe, loop = self._pipe, asyncio.get_running_loop()
        due = loop.time() + wait_s
        while pipe is None or not pipe.takes_commands:
            async with asyncio.timeout_at(due):
                pipe = await self._opened()
            wait_s = due - loop.time()
        reply = pipe.send(hiredis.pack_command(tuple(arguments)))  # type: ignore[arg-type]  # of any length
        expiry = SilenceTimer(reply, wait_s, pipe.replied)
        try:
            return await reply
        except BaseException as error:
            if not isinstance(error, RedisError):
                pipe.retire()
            raise
        finally:
            expiry.cancel()

    async def _opened(self) -> "_Pipe":
        """Open a connection, once for all callers that need it now."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._note_opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> "_Pipe":
        connection = await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        self._pipe = _Pipe(self._client, connection)
        return self._pipe

    def _note_opened(self, opening: "asyncio.Task[_Pipe]") -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # Raised by those who wait; all of them may have gone.


class _Pipe:
    """One connection, with a task that sends and one that reads."""

    def __init__(self, client: Redis, connection: AbstractConnection) -> None:
        self._client = client
        self.replied = ReplyClock()
        self._connection = connection
        # Each caller has a deadline of its own.
        connection.socket_timeout, self._socket_timeout = None, connection.socket_timeout
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.takes_commands = True
        self._working = asyncio.create_task(self._work())

    def send(self, command: bytes) -> "asyncio.Future[Any]":
        """Send a command with the others of this turn of the event loop; the future gets its reply."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies.append(reply)
        self._unsent.append(command)
        self._has_unsent.set()
        return reply

    def retire(self) -> None:
        """Take no further command, and close with the last reply that is due, or after `CLOSE_SECONDS`."""
        if self.takes_commands:
            self.takes_commands = False
            self._loop.call_later(CLOSE_SECONDS if self._replies else 0.0, self._working.cancel)

    async def _work(self) -> None:
        failure: Exception = RedisConnectionError("the connection was closed")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send())
                tasks.create_task(self._read())
        except* (RedisError, OSError) as errors:
            failure = errors.exceptions[0]
        finally:
            self.takes_commands = False
            for reply in self._replies:
                if not reply.done():
                    reply.set_exception(failure)
            self._connection.socket_timeout = self._socket_timeout
            await self._connection.disconnect(nowait=True)
            await self._client.connection_pool.release(self._connection)

    async def _send(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            commands, self._unsent = b"".join(self._unsent), []
            await self._connection.send_packed_command(commands, check_health=False)

    async def _read(self) -> None:
        while True:
            answer: Any
            try:
                answer = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
            except RedisConnectionError:
                raise
            except RedisError as error:
                answer = error
            self.replied.read_at = self._loop.time()
            _answer(self._replies.popleft(), answer)
            if not self.takes_commands and not self._replies:
                self._working.cancel()


def _answer(reply: "asyncio.Future[Any]", answer: Any) -> None:
    if reply.done():
        return
    if isinstance(answer, RedisError):
        reply.set_exception(answer)
    else:
        reply.set_result(answer)
