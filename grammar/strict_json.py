"""Parses one JSON document from untrusted text: RFC 8259 with the limits of I-JSON (RFC 7493).

Invariant: no name occurs twice in an object and every number is finite, so that no two parsers read one text differently.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from loraplex.grammar.errors import JsonNumberRefused, JsonRefused, JsonTooDeep, NotANumber, RepeatedName


def finite_float(text: str) -> float:
    """Parse a number with a fraction or an exponent. Raises `JsonNumberRefused` beyond the range of a double."""
    number = float(text)
    if not math.isfinite(number):
        raise JsonNumberRefused("holds a number that is too large")
    return number


def parse_json(text: str, *, max_digits: int, parse_float: Callable[[str], Any] = finite_float) -> Any:
    """Parse `text`, whose length the caller bounds. A whole number has at most `max_digits` digits, its sign included.

    Raises a `JsonRefused`, or `json.JSONDecodeError` for what is no JSON. Nesting is bounded by Python's stack only, and
    strings may have lone surrogates: see `check_values`.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=parse_float,
            parse_int=partial(_integer, max_digits),
        )
    except RecursionError as error:
        raise JsonTooDeep("nests too deeply") from error


def check_values(
    document: Any, *, max_depth: int, max_values: int | None = None, encodable: bool = False
) -> None:
    """Check a parsed document: how deep arrays and objects nest, and the number of values and names together.

    With `encodable` also that UTF-8 can encode every string, since JSON can spell a lone surrogate (RFC 8259, 8.2).
    Raises a `JsonRefused`.
    """
    level, count = [document], 1
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        nests = False
        # Written out, since a call per value would take most of the time.
        for value in level:
            kind = type(value)
            if kind is str:
                if encodable and not value.isascii():
                    _check_encodable(value)
            elif kind is dict:
                nests = True
                inner += value
                inner += value.values()
            elif kind is list:
                nests = True
                inner += value
        if not nests:
            return
        count += len(inner)
        if max_values is not None and count > max_values:
            raise JsonRefused(f"holds more than {max_values} values")
        level = inner
    raise JsonTooDeep(f"nests deeper than {max_depth} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        # `most_common` would import `heapq`, and a sandboxed process can open no file.
        name = max(counts, key=counts.__getitem__)
        _check_encodable(name)
        raise RepeatedName(name)
    return names


def _refuse_constant(text: str) -> NoReturn:
    raise NotANumber(text)


def _integer(max_digits: int, text: str) -> int:
    if len(text) > max_digits:
        raise JsonNumberRefused(f"holds a whole number of more than {max_digits} digits")
    return int(text)


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonRefused("holds a string with a lone surrogate") from error
