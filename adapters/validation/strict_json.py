"""JSON (RFC 8259) from untrusted bytes: bounded depth, no repeated keys, no NaN or infinity (I-JSON, RFC 7493)."""

import json
import re
from typing import NoReturn

from loraplex.adapters.errors import MalformedJson

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def parse_json(data: bytes, *, max_depth: int) -> object:
    """Return the parsed document. Raises `MalformedJson`; the caller bounds the length of `data`."""
    _check_depth(data, max_depth)
    try:
        text = data.decode("utf-8", errors="strict")
        return json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise MalformedJson(f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise MalformedJson(f"is not JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:
        raise MalformedJson("holds a number with more digits than allowed") from error


def _check_depth(data: bytes, max_depth: int) -> None:
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            raise MalformedJson(f"is nested more than {max_depth} levels deep")


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document: dict[str, object] = {}
    for key, value in pairs:
        if key in document:
            raise MalformedJson(f"repeats the key {key[:100]!r}")
        document[key] = value
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedJson(f"holds {name}, which is not JSON")
