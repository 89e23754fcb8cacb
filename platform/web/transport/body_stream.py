"""Streams a request body in chunks, with bounds of size, time and rate.

A client that sends slower than `BodyPace` allows is refused, however it spreads its bytes. Nothing is read ahead of the
consumer, so that a slow disk slows the sender down.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, Self

from starlette.requests import Request
from starlette.types import Message

from loraplex.platform.errors import BodyTimeout, BodyTooLarge, ClientGone


class BodyPace(Protocol):
    """How fast a body must arrive: within `body_s`, without a pause of `stall_s`, after `grace_s` at `min_bytes_per_s`."""

    @property
    def body_s(self) -> float: ...

    @property
    def stall_s(self) -> float: ...

    @property
    def grace_s(self) -> float: ...

    @property
    def min_bytes_per_s(self) -> int: ...


class BodyChunks:
    """The body of a request in chunks, at most `max_bytes` in total. `declared_size` 0: its header has none.

    Its iteration raises `BodyTooLarge`, `BodyTimeout`, `ClientGone`.
    """

    def __init__(
        self, request: Request, max_bytes: int, limits: BodyPace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._limits = limits
        self._clock = clock
        self._started: float | None = None
        self._received = 0
        self._more = True
        self.declared_size = declared_size(request) or 0
        self._is_too_large = self.declared_size > max_bytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self._more and not self._is_too_large:
            message = await self._next_message()
            if message["type"] == "http.disconnect":
                raise ClientGone("The client closed the connection within its request.")
            chunk: bytes = message.get("body", b"")
            self._more = message.get("more_body", False)
            self._received += len(chunk)
            self._is_too_large = self._received > self._max_bytes
            if chunk and not self._is_too_large:
                return chunk
        if self._is_too_large:
            raise BodyTooLarge(f"The body is larger than {self._max_bytes} bytes.")
        raise StopAsyncIteration

    async def _next_message(self) -> Message:
        limits, now = self._limits, self._clock()
        if self._started is None:
            self._started = now
        try:
            async with asyncio.timeout(read_timeout(now - self._started, self._received, limits)):
                return await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"The body must keep coming, at {limits.min_bytes_per_s} bytes a second or faster, and within {limits.body_s:g} s."
            ) from None


def read_timeout(elapsed_s: float, received: int, limits: BodyPace) -> float:
    """Return how many seconds the next chunk may take; 0 or less when it is late already."""
    slowest = limits.grace_s + received / limits.min_bytes_per_s
    return min(limits.stall_s, limits.body_s - elapsed_s, slowest - elapsed_s)


def declared_size(request: Request) -> int | None:
    """Return the body's size by its header; None without one, or for one that is no number."""
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else None
