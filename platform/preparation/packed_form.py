"""Packs `OutputConstraints` and a tool style into one JSON text.

Invariant: numbers keep all digits; msgpack would limit them to 64 bits.
"""

import json
from dataclasses import fields
from typing import Any, Final

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    OutputFormat,
    Regex,
    StructuralTag,
    Tool,
)
from loraplex.grammar.tools.call_syntax import ToolStyle

_FORMATS: Final[dict[str, type[OutputFormat]]] = {
    each.__name__: each for each in (JsonObject, JsonSchema, Regex, Choice, ContextFreeGrammar, StructuralTag)
}


def pack_constraints(constraints: OutputConstraints, style: ToolStyle) -> bytes:
    """Pack the constraints. Equal bytes mean equal constraints, with the members of objects in the same order."""
    document = _members(constraints) | {
        "format": None
        if constraints.format is None
        else [type(constraints.format).__name__, _members(constraints.format)],
        "tools": [_members(tool) for tool in constraints.tools],
    }
    return json.dumps([style, document]).encode()


def unpack_constraints(packed: bytes) -> tuple[OutputConstraints, ToolStyle]:
    """Unpack what `pack_constraints` has packed."""
    style, document = json.loads(packed)
    tools = tuple(Tool(**tool) for tool in document["tools"])
    constraints = OutputConstraints(**document | {"format": _format(document["format"]), "tools": tools})
    return constraints, ToolStyle(style)


def _members(item: OutputConstraints | OutputFormat | Tool) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _format(packed: list[Any] | None) -> OutputFormat | None:
    if packed is None:
        return None
    name, members = packed
    return Choice(tuple(members["options"])) if name == Choice.__name__ else _FORMATS[name](**members)
