"""Reads what tools write into schemas that declare no draft: older forms of single keywords, null, and names of types.

Invariant: a keyword is read only where one meaning is possible, never a whole older draft. What is read so is named in the
header of the response; anything else stays, and the metaschema refuses it.
"""

from typing import Any, Final

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.bounds import COUNTS
from loraplex.grammar.json_schema.walk import LISTS, MAPS, SINGLE

DECLARE: Final = "a schema without $schema is read as draft 2020-12: declare $schema if it is of another one"
"""Ends the message of a refusal."""
NULLABLE: Final = "nullable"
"""OpenAPI 3.0's keyword. It stays an annotation: `type: ["string", "null"]` allows null."""
_BOUNDS: Final = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
# Serializers write null for what is not set. `type: null` may be the type, and null is a value of `const`.
_UNSET: Final = (
    SINGLE
    | LISTS
    | MAPS
    | frozenset(COUNTS)
    | frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf", "uniqueItems"))
    | frozenset(("$comment", "$ref", "$schema", "deprecated", "description", "examples", "title"))
    | frozenset(("dependentRequired", "enum", "format", "pattern", "readOnly", "required", "writeOnly"))
)
_TYPES: Final = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_ANY: Final = "any"
# Names that Python has for them.
_OTHER_TYPES: Final = {
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "str": "string",
    "tuple": "array",
}


def read_slips(made: dict[str, Any], pointer: str, param: str) -> set[str]:
    """Rewrite one subschema and return the keywords that were read. Raises `GrammarInvalid` for two possible meanings."""
    found = {
        key
        for key, value in made.items()
        if (value is None and key in _UNSET) or (value == [] and key in MAPS)
    }
    for keyword in found:
        del made[keyword]
    return found | _read_items(made) | _read_type(made, pointer, param)


def read_required(node: dict[str, Any]) -> dict[str, Any]:
    """Read the boolean `required` of properties as their names in the object's, each once. Returns `node` if nothing is read.

    The properties are still as they were written: a list of names takes the place of their booleans later.
    """
    properties, names = node.get("properties"), node.get("required") or []
    members: dict[str, Any] = properties if isinstance(properties, dict) else {}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return node
    flags = {
        name: member["required"]
        for name, member in members.items()
        if isinstance(member, dict) and isinstance(member.get("required"), bool)
    }
    wanted = list(dict.fromkeys([*names, *(name for name, is_required in flags.items() if is_required)]))
    if not flags and wanted == names:
        return node
    bare = {name: {key: each for key, each in members[name].items() if key != "required"} for name in flags}
    return node | {"required": wanted} | ({"properties": members | bare} if flags else {})


def read_bounds(made: dict[str, Any], pointer: str, param: str) -> set[str]:
    """Rewrite boolean bounds in any draft: only draft 4 has them, and zod-to-json-schema writes them under 2019-09.

    Raises `GrammarInvalid` where one has no bound.
    """
    found: set[str] = set()
    for flag, bound in _BOUNDS:
        if not isinstance(value := made.get(flag), bool):
            continue
        found.add(flag)
        del made[flag]
        if value and made.get(bound) is None:
            reason = f"{flag} is true, and there is no {bound} that it excludes"
            raise GrammarInvalid(f"{param}: {reason}; {DECLARE}", param=param, pointer=f"{pointer}/{flag}")
        if value:
            made[flag] = made.pop(bound)
    return found


def read_type(name: Any) -> Any:
    """Return the type that a name of any case or of Python means; `any`, or the name itself where it means none."""
    lower = name.lower() if isinstance(name, str) else ""
    return lower if lower in _TYPES or lower == _ANY else _OTHER_TYPES.get(lower, name)


def _read_items(made: dict[str, Any]) -> set[str]:
    """Read the first items, and `additionalItems` as the others. `items` of both kinds is refused by the metaschema."""
    found: set[str] = set()
    if isinstance(first := made.get("items"), list) and "prefixItems" not in made:
        found.add("items")
        del made["items"]
        if first:
            made["prefixItems"] = first
    if "additionalItems" in made and "items" not in made:
        rest = made.pop("additionalItems")
        if found or "prefixItems" in made:
            made["items"] = rest
        found.add("additionalItems")
    return found


def _read_type(made: dict[str, Any], pointer: str, param: str) -> set[str]:
    named = made.get("type", [])
    names = named if isinstance(named, list) else [named]
    read = [read_type(name) for name in names]
    if not all(name in (*_TYPES, _ANY) for name in read):
        reason = f"type must be one of {', '.join(sorted(_TYPES))}, or a list of them"
        raise GrammarInvalid(f"{param}: {reason}; {DECLARE}", param=param, pointer=f"{pointer}/type")
    if _ANY in read:
        del made["type"]
    elif read == names:
        return set()
    else:
        made["type"] = read if isinstance(named, list) else read[0]
    return {"type"}
