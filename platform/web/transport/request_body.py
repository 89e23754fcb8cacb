"""Reads the JSON body of a request from its connection, within bounds of size, time and memory.

Invariant: every byte is taken from the budget before it is kept. Large bodies of one tenant are read a few chunks at a time, so
that many fast connections of it leave the event loop to others.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request

from loraplex.platform.errors import Overloaded, ShareExceeded
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.web.transport.body_budget import BodyLease
from loraplex.platform.web.transport.body_stream import BodyChunks
from loraplex.platform.web.transport.content_encoding import content_encoding, decompressed

T = TypeVar("T")
LARGE_BODY = 65_536
REFUSAL_DELAY_S = 1.0
MANY_VALUES = 20_000
"""Checking one value takes half a microsecond of the interpreter. Bodies that may hold more values are checked in a worker
process, and then parsed here in one call of a few milliseconds."""
CheckInWorker: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Checks a body in another process. Raises what `parse_object` raises for it."""


async def read_object(
    request: Request,
    limits: BodyLimits,
    check: Callable[[dict[str, Any]], T],
    check_in_worker: CheckInWorker,
    lease: BodyLease,
) -> T:
    """Read the body and return what `check` makes of its object. `lease` has the body's size afterwards.

    Large bodies are parsed off the event loop; `check_in_worker` checks those of many values first. Raises what `check`
    raises, `UnsupportedEncoding`, `BodyTooLarge`, `ShareExceeded`, `Overloaded`, `BodyTimeout`, `InvalidBody`, or
    `ClientGone` when the client left before the body's end.
    """
    body = await read_bytes(request, limits, lease)
    if _max_values(body) > MANY_VALUES:
        await check_in_worker(body)
        return await asyncio.to_thread(lambda: check(json.loads(body.decode())))
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(_checked, body, limits, check)
    return _checked(body, limits, check)


def _max_values(body: bytes) -> int:
    """Return an upper bound of the values in a JSON text, names not counted."""
    return 1 + sum(map(body.count, (b",", b"[", b"{")))


def _checked(body: bytes, limits: BodyLimits, check: Callable[[dict[str, Any]], T]) -> T:
    return check(parse_object(body, limits))


async def read_bytes(request: Request, limits: BodyLimits, lease: BodyLease) -> bytes:
    """Read the body as it is. Raises `UnsupportedEncoding`, `BodyTooLarge`, `ShareExceeded`, `Overloaded`, `BodyTimeout`, `ClientGone`."""
    try:
        return await _read_chunks(request, limits, lease)
    except (ShareExceeded, Overloaded) as error:
        # The traceback has the frame that has the body.
        refusal = error.with_traceback(None)
    lease.release()
    # Refusals of clients that try again at once would keep the event loop busy.
    await asyncio.sleep(REFUSAL_DELAY_S)
    raise refusal


async def _read_chunks(request: Request, limits: BodyLimits, lease: BodyLease) -> bytes:
    encoding = content_encoding(request)
    body, chunks = bytearray(), BodyChunks(request, limits.max_bytes, limits)
    content = decompressed(chunks, limits.max_bytes) if encoding else chunks
    async for chunk in content:
        if not body:
            lease.require(chunks.declared_size)
        lease.grow(len(chunk))
        body += chunk
        if len(body) > LARGE_BODY:
            await lease.next_turn()
    return bytes(body)
