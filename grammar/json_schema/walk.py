"""Finds the subschemas of a schema.

Invariant: a value that only looks like a schema (an enum's value, a default, an unknown keyword) is never visited.
"""

from collections.abc import Iterator
from typing import Any, Final

SINGLE: Final = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
LISTS: Final = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
MAPS: Final = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)


def escaped(part: str) -> str:
    """Return one reference token of a JSON Pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")


def is_schema(value: object) -> bool:
    """Return whether the value is an object or a boolean, as a schema must be."""
    return isinstance(value, dict | bool)


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas with their pointers relative to `schema`."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            for name, member in value.items():
                if is_schema(member):
                    yield f"/{escaped(keyword)}/{escaped(name)}", member
        elif keyword in LISTS and isinstance(value, list):
            for index, member in enumerate(value):
                if is_schema(member):
                    yield f"/{keyword}/{index}", member
        elif keyword in SINGLE and is_schema(value):
            yield f"/{keyword}", value


def walk(schema: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `schema` and all subschemas, parents first, with pointers; siblings are in no textual order."""
    stack = [(pointer, schema)]
    while stack:
        place, node = stack.pop()
        yield place, node
        stack.extend((place + suffix, member) for suffix, member in subschemas(node))
