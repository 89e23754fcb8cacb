"""Ends the work on a request when its client leaves.

Invariant: what is behind the work is never cancelled.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from starlette.types import Receive, Scope

from loraplex.platform.errors import ClientGone

T = TypeVar("T")

CONNECTION: Final = "connection"
"""Where the state of a scope has its `Connection`, if its server offers one."""


class Connection(Protocol):
    """A client's connection. It spares the task that would wait for a message of the client's leaving."""

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the connection is lost, soon if it is already, until `unwatch`."""

    def unwatch(self) -> None: ...


class UnlessDisconnected:
    """A context whose block is cancelled when the client leaves; then `ClientGone` is raised in place of what the block raises.

    The request's body has been read.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection: Connection = scope.get("state", {}).get(CONNECTION) or _Messages(receive)
        self._left = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._connection.watch(self._leave)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.unwatch()
        # A call that is already due still comes: what is behind the block must not be cancelled.
        task, self._task = self._task, None
        if self._left and task is not None:
            task.uncancel()
            if error is not None:
                raise ClientGone("The client closed the connection.") from None

    def _leave(self) -> None:
        if self._task is not None:
            self._left = True
            self._task.cancel()


async def unless_disconnected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. When the client leaves, cancel `work` and raise `ClientGone`."""
    async with UnlessDisconnected(scope, receive):
        return await work


class _Messages:
    """The `Connection` of a server that only sends messages."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def watch(self, left: Callable[[], None]) -> None:
        def end(watching: "asyncio.Task[None]") -> None:
            if not watching.cancelled():
                # An error of the connection means that its client is gone, too.
                watching.exception()
                left()

        self._watching = asyncio.create_task(self._disconnected())
        self._watching.add_done_callback(end)

    def unwatch(self) -> None:
        self._watching.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
