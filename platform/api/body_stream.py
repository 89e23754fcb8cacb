"""Streams a request body in chunks, with bounds of size, time and rate.

A client that sends slower than `BodyPace` allows is refused, however it spreads its bytes. Nothing is read ahead of the
consumer, so that a slow disk slows the sender down.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.requests import ClientDisconnect, Request

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


async def body_chunks(
    request: Request, max_bytes: int, limits: BodyPace, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[bytes]:
    """Yield the body in chunks, at most `max_bytes` in total. Raises `BodyTooLarge`, `BodyTimeout`, `ClientGone`."""
    if (declared_size(request) or 0) > max_bytes:
        raise _too_large(max_bytes)
    stream, started, received = request.stream(), clock(), 0
    while True:
        try:
            async with asyncio.timeout(read_timeout(clock() - started, received, limits)):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise BodyTimeout(
                f"The body must keep coming, at {limits.min_bytes_per_s} bytes a second or faster, and within {limits.body_s:g} s."
            ) from None
        except ClientDisconnect as error:
            raise ClientGone("The client closed the connection within its request.") from error
        received += len(chunk)
        if received > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


def read_timeout(elapsed_s: float, received: int, limits: BodyPace) -> float:
    """Return how many seconds the next chunk may take; 0 or less when it is late already."""
    slowest = limits.grace_s + received / limits.min_bytes_per_s
    return min(limits.stall_s, limits.body_s - elapsed_s, slowest - elapsed_s)


def declared_size(request: Request) -> int | None:
    """Return the body's size by its header; None without one, or for one that is no number."""
    declared = request.headers.get("content-length", "")
    return int(declared[:20]) if declared.isdecimal() else None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
