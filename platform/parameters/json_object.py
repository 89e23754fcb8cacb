"""Parses a request body into one JSON object within bounds: size, depth, number of values, finite numbers (RFC 8259).

Invariant: a name that occurs twice in an object is refused, so that no two readers of one body can disagree about it.
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
    """Characters of all strings and names, and one for every value. Counting ends above `most`."""
    size, left = 0, [value]
    while left and size <= limit:
        inner = left.pop()
        size += 1
        if isinstance(inner, str):
            size += len(inner)
        elif isinstance(inner, Mapping | Sequence) and size + len(inner) > limit:
            # Each counts one at least: not even a list of them is made.
            return size + len(inner)
        elif isinstance(inner, Mapping):
            size += sum(map(len, inner))
            left.extend(inner.values())
        elif isinstance(inner, Sequence):
            left.extend(inner)
    return size


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
