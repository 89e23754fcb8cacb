"""Parses a request body into one JSON object within bounds: size, depth, number of values, finite numbers (RFC 8259).

Invariant: a name that occurs twice in an object is refused, so that two parsers cannot read one body differently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.grammar.errors import JsonRefused, JsonTooDeep, RepeatedName
from loraplex.grammar.strict_json import check_values, parse_json
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
        value = parse_json(body.decode(), max_digits=limits.max_digits)
        if not isinstance(value, dict):
            raise InvalidBody("The body must be a JSON object.")
        check_values(value, max_depth=limits.max_depth, max_values=limits.max_values, encodable=True)
    except RepeatedName as error:
        name = error.name[:64]
        raise InvalidParameter(f"`{name}` occurs twice in one object.", param=name) from error
    except JsonTooDeep as error:
        raise InvalidBody(f"The body nests deeper than {limits.max_depth} levels.") from error
    except JsonRefused as error:
        raise InvalidBody(f"The body {error}.") from error
    except ValueError as error:
        raise InvalidBody(f"The body is not valid JSON in UTF-8: {error}.") from error
    return value
