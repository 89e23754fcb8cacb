"""From the bytes of a request to one JSON object, within bounds: size, depth, number of values, finite numbers (RFC 8259).

A name that occurs twice in an object is refused, so that no two readers of one body can disagree about it.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request

from loraplex.platform.errors import BodyTimeout, BodyTooLarge, ClientGone, InvalidBody, InvalidParameter

T = TypeVar("T")

LARGE_BODY = 65_536
MANY_VALUES = 20_000
"""Looking at each value takes half a microsecond of the interpreter: bodies that may hold more are looked through elsewhere, and
parsed here in one call of a few milliseconds."""

CheckElsewhere: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Raises what `parse_object` raises for a body."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`max_bytes` of the body within `max_s` seconds, `max_depth` of nesting; `max_values` counts names as well.

    `max_digits` of a whole number: reading one takes the square of their number.
    """

    max_bytes: int = 10 * 1024 * 1024
    max_s: float = 60.0
    max_depth: int = 64
    max_values: int = 200_000
    max_digits: int = 400


async def read_object(
    request: Request,
    limits: BodyLimits,
    check: Callable[[dict[str, Any]], T],
    check_elsewhere: CheckElsewhere,
) -> T:
    """What `check` makes of the body's object; large bodies are parsed off the event loop, and those of many values are
    looked through by `check_elsewhere`.

    Raises what `check` does, and `BodyTooLarge`, `BodyTimeout`, `InvalidBody`, or `ClientGone` when the client left before its end.
    """
    try:
        async with asyncio.timeout(limits.max_s):
            body = await _read_bytes(request, limits.max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {limits.max_s:g} s.") from None
    except ClientDisconnect as error:
        raise ClientGone("The client closed the connection within its request.") from error
    if _most_values(body) > MANY_VALUES:
        await check_elsewhere(body)
        return await asyncio.to_thread(lambda: check(json.loads(body.decode())))
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(_checked, body, limits, check)
    return _checked(body, limits, check)


def _most_values(body: bytes) -> int:
    """No JSON text of these bytes has more values, names not counted."""
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


def parse_object(body: bytes, limits: BodyLimits) -> dict[str, Any]:
    """`body` as a JSON object within `limits`. Raises `InvalidBody`, or `InvalidParameter` for a name given twice."""
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_unique,
            parse_constant=_not_finite,
            parse_float=_finite,
            parse_int=partial(_short, limits.max_digits),
        )
    except RecursionError as error:
        raise InvalidBody(f"The body nests deeper than {limits.max_depth} levels.") from error
    except ValueError as error:
        raise InvalidBody(f"The body is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidBody("The body must be a JSON object.")
    _check_bounds(value, limits)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        name = counts.most_common(1)[0][0]
        _check_encodable(name)
        raise InvalidParameter(f"`{name[:64]}` occurs twice in one object.", param=name[:64])
    return names


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _short(max_digits: int, text: str) -> int:
    if len(text) > max_digits:
        raise ValueError(f"a whole number has more than {max_digits} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _check_bounds(value: Any, limits: BodyLimits) -> None:
    level, count = [value], 0
    for _ in range(limits.max_depth):
        count += len(level)
        if count > limits.max_values:
            raise InvalidBody(f"The body holds more than {limits.max_values} values.")
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidBody(f"The body nests deeper than {limits.max_depth} levels.")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list):
        return value
    if isinstance(value, str) and not value.isascii():
        _check_encodable(value)
    return []


def _check_encodable(text: str) -> None:
    """JSON can spell lone surrogates (RFC 8259, 8.2), which have no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidBody("The body holds a string with a lone surrogate.") from error
