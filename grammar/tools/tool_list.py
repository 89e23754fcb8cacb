"""Checks the tools of a request before anything is compiled: their number, names and argument schemas.

Invariant: accepted names are unique for the parser, and only objects satisfy the argument schemas.
"""

import string
from collections.abc import Sequence
from typing import Any, Final

from loraplex.grammar.constraints import SchemaLimits, Tool
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge
from loraplex.grammar.json_schema.slips import read_type

_NAME_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "_-")
MAX_NAME: Final = 64


def check_tools(tools: Sequence[Tool], limits: SchemaLimits) -> None:
    """Raises `GrammarRefused` naming `tools[i].function.name`, or `GrammarTooLarge`."""
    if len(tools) > limits.max_tools:
        raise GrammarTooLarge(f"{len(tools)} tools are given, {limits.max_tools} are allowed", param="tools")
    seen: set[str] = set()
    for tool in tools:
        if not 1 <= len(tool.name) <= MAX_NAME or not _NAME_CHARACTERS.issuperset(tool.name):
            allowed = f"a name is 1 to {MAX_NAME} of a-z, A-Z, 0-9, _ and -"
            raise GrammarRefused(f"the name of a tool is not allowed: {allowed}", param=_name_param(tool))
        if tool.name in seen:
            raise GrammarRefused(f"two tools have the name {tool.name!r}", param=_name_param(tool))
        seen.add(tool.name)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of the tool's arguments, always an object. Raises `GrammarRefused` if they never can be one."""
    schema = tool.parameters
    if schema is True:
        return {"type": "object"}
    named = schema.get("type", "object") if isinstance(schema, dict) else None
    kinds = [read_type(kind) for kind in (named if isinstance(named, list) else [named])]
    if not isinstance(schema, dict) or "object" not in kinds:
        reason = f'the arguments of the tool {tool.name!r} are an object: its schema needs "type": "object"'
        raise GrammarRefused(reason, param=tool.param)
    # A name that is read as this type stays, so that the response says so.
    return {**schema, "type": "object" if isinstance(named, list) else named}


def _name_param(tool: Tool) -> str:
    return tool.param.removesuffix("parameters") + "name"
