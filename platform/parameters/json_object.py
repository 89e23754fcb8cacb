"""Parses a request body into one JSON object within bounds: size, depth, number of values, finite numbers (RFC 8259).

Invariant: a name that occurs twice in an object is refused, so that two parsers cannot read one body differently.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from loraplex.platform.errors import InvalidBody, InvalidParameter


def size_of(value: object, limit: int) -> int:
    """Count the characters of all strings and names, and one for every value. Counting ends above `limit`."""
    size, left = 0, [value]
    while left and size <= limit:
        inner = left.pop()
        size += 1
        if isinstance(inner, str):
            size += len(inner)
        elif isinstance(inner, Mapping | Sequence) and size + len(inner) > limit:
            # Each counts at least one, so they need not be visited.
            return size + len(inner)
        elif isinstance(inner, Mapping):
            size += sum(map(len, inner))
            left.extend(inner.values())
        elif isinstance(inner, Sequence):
            left.extend(inner)
    return size


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of a body: `max_bytes`, nesting of `max_depth`. `max_values` counts names as well.

    `max_digits` of a whole number: the time to parse one grows with the square of its digits. A body arrives within `body_s`
    seconds, without a pause of `stall_s`, and after `grace_s` at `min_bytes_per_s` on average.
    """

    max_bytes: int = 10 * 1024 * 1024
    body_s: float = 60.0
    stall_s: float = 10.0
    grace_s: float = 10.0
    min_bytes_per_s: int = 16_384
    max_depth: int = 64
    max_values: int = 200_000
    max_digits: int = 400


def parse_object(body: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Parse `body` as a JSON object within `limits`. Raises `InvalidBody`, or `InvalidParameter` for a name given twice."""
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
    """Raise for a lone surrogate, which JSON can spell (RFC 8259, 8.2) and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidBody("The body holds a string with a lone surrogate.") from error
