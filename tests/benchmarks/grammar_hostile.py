"""Schemas that ask for more than a grammar should cost; `bench grammar` sends them beside innocent rows.

Invariant: no two requests carry the same bytes, so that no cache of verdicts takes the load off.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import count, cycle
from typing import Any

Schema = dict[str, Any]


def _nested(depth: int, wrap: str) -> Schema:
    def around(inner: Schema, _: int) -> Schema:
        return {"type": "array", "items": inner} if wrap == "items" else {wrap: [inner, {"type": "null"}]}

    return reduce(around, range(depth), {"type": "integer"})


def _one_of_pairs(depth: int) -> Schema:
    """Two alternatives per level that differ in their innermost part only."""

    def level(inner: Schema, number: int) -> Schema:
        alternative = {"type": "object", "properties": {f"p{number}": inner}, "additionalProperties": False}
        return {"oneOf": [alternative, {**alternative, "required": [f"p{number}"]}]}

    return reduce(level, range(depth), {"type": "integer"})


def hostile_schemas() -> dict[str, Schema]:
    """By name. Some are refused by a bound, some by the trial, some are held at a cost."""
    text: Schema = {"type": "string"}
    return {
        "40 levels of anyOf": _nested(40, "anyOf"),
        "12 levels of oneOf": _one_of_pairs(12),
        "500 nested arrays": _nested(500, "items"),
        "enum of 10,000": {"enum": [f"value number {number}" for number in range(10_000)]},
        "enum of 40,000": {"enum": [f"value number {number}" for number in range(40_000)]},
        "reference to itself": {"$ref": "#"},
        "endless required recursion": {
            "type": "object",
            "properties": {"next": {"$ref": "#"}},
            "required": ["next"],
        },
        "maxLength 2,000": {"type": "object", "properties": {"a": {**text, "maxLength": 2000}}},
        "200 strings of maxLength 40": {
            "type": "object",
            "properties": {f"p{number}": {**text, "maxLength": 40} for number in range(200)},
        },
        "repeated repetition": {**text, "pattern": "^((a{1,500}b){1,500}c){1,500}$"},
        "look-ahead": {**text, "pattern": "^(?=.*a)(?=.*b).{8,}$"},
        "wide character classes": {**text, "pattern": r"^(\w|\d|[^\s]){0,3000}\p{L}{0,3000}$"},
        "megabyte of properties": {
            "type": "object",
            "properties": {f"property_{number:06}": text for number in range(30_000)},
        },
        "2,000 optional properties": {
            "type": "object",
            "properties": {f"p{number}": text for number in range(2_000)},
        },
        "items 100 to 5,000": {"type": "array", "items": text, "minItems": 100, "maxItems": 5000},
    }


def endless_hostile_schemas() -> Iterator[tuple[str, Schema]]:
    """Each in turn, for ever, with a comment of its own."""
    schemas = hostile_schemas()
    for number, name in zip(count(), cycle(schemas), strict=False):
        yield name, {**schemas[name], "$comment": f"request {number}"}
