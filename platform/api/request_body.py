"""Reads the JSON body of a request from its connection, within bounds of size and time."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request

from loraplex.platform.errors import BodyTimeout, BodyTooLarge, ClientGone
from loraplex.platform.parameters.json_object import BodyLimits, parse_object

T = TypeVar("T")
LARGE_BODY = 65_536
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
) -> T:
    """Read the body and return what `check` makes of its object.

    Large bodies are parsed off the event loop; `check_in_worker` checks those of many values first. Raises what `check`
    raises, `BodyTooLarge`, `BodyTimeout`, `InvalidBody`, or `ClientGone` when the client left before the body's end.
    """
    try:
        async with asyncio.timeout(limits.max_s):
            body = await _read_bytes(request, limits.max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {limits.max_s:g} s.") from None
    except ClientDisconnect as error:
        raise ClientGone("The client closed the connection within its request.") from error
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


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    return bytes(body)
