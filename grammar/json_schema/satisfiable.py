"""Finds schema parts that no document satisfies: endless required recursion, reference loops, contradictory bounds.

Invariant: only what is proven empty is reported empty. A grammar must not enter an empty part, since it could never
leave it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from loraplex.grammar.json_schema.values import (
    TYPES,
    allowed_types,
    counts_exclude,
    listed_values,
    ranges_exclude,
    type_of,
)

_BOUNDS: Final = frozenset(
    (
        *("type", "const", "enum", "required"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    )
)

Inhabited: TypeAlias = Callable[[Any], bool]
Types: TypeAlias = frozenset[str]
KnownTypes: TypeAlias = Mapping[str, Types]


def types_of_definitions(root: dict[str, Any]) -> dict[str, Types]:
    """Map each reference `#/$defs/…` of a rewritten schema to the types of its documents; none if it has no document.

    Computes the least fixed point: a definition gets a type once one is found without a cycle.
    """
    definitions = {f"#/$defs/{name}": schema for name, schema in root.get("$defs", {}).items()}
    known: dict[str, Types] = dict.fromkeys(definitions, frozenset())
    readers: dict[str, set[str]] = {name: set() for name in definitions}
    # Each is in the queue once, however many changes it waits to see.
    queue, queued = deque(definitions), set(definitions)
    while queue:
        name = queue.popleft()
        queued.discard(name)
        read: list[str] = []
        found = possible_types(definitions[name], known, read)
        for other in read:
            readers[other].add(name)
        if found != known[name]:
            known[name] = found
            queue.extend(readers[name] - queued)
            queued |= readers[name]
    return known


def possible_types(
    schema: Any, known: KnownTypes, read: list[str] | None = None, found: dict[int, Types] | None = None
) -> Types:
    """Return the types that documents of the schema may have. `read` collects the references that were looked up.

    `found` caches results by the subschema's address while `known` is unchanged: parts are evaluated again and again.
    """
    if isinstance(schema, bool):
        return TYPES if schema else frozenset()
    if found is None:
        return _types(schema, known, read, None)
    if id(schema) not in found:
        found[id(schema)] = _types(schema, known, read, found)
    return found[id(schema)]


def _types(schema: Any, known: KnownTypes, read: list[str] | None, found: dict[int, Types] | None) -> Types:
    def types_of(member: Any) -> Types:
        return possible_types(member, known, read, found)

    types = allowed_types(schema)
    reference = schema.get("$ref")
    if reference is not None:
        types &= known[reference]
        if read is not None:
            read.append(reference)
    for member in schema.get("allOf", ()):
        types &= types_of(member)
    if "anyOf" in schema:
        types &= frozenset().union(*map(types_of, schema["anyOf"]))
    values = listed_values(schema)
    if values is not None:
        types &= frozenset(map(type_of, values))
    return frozenset(
        kind for kind in types if _has_value(kind, schema, lambda member: bool(types_of(member)))
    )


def contradicts_itself(keywords: Mapping[str, Any]) -> bool:
    """Return whether a subschema's own bounds, names and values allow nothing, whatever its parts and references
    mean.
    """
    own = {keyword: value for keyword, value in keywords.items() if keyword in _BOUNDS}
    for keyword in ("properties", "patternProperties"):
        if keyword in keywords:
            own[keyword] = dict.fromkeys(keywords[keyword], True)
    if keywords.get("additionalProperties") is False:
        own["additionalProperties"] = False
    return not possible_types(own, {})


def _has_value(kind: str, schema: dict[str, Any], inhabited: Inhabited) -> bool:
    if kind == "string":
        return not counts_exclude(schema, schema, "Length")
    if kind == "number":
        return not ranges_exclude(schema, schema)
    if kind == "array":
        return _has_array(schema, inhabited)
    if kind == "object":
        return _has_object(schema, inhabited)
    return True


def _has_array(schema: dict[str, Any], inhabited: Inhabited) -> bool:
    least = schema.get("minItems", 0)
    if counts_exclude(schema, schema, "Items"):
        return False
    first = schema.get("prefixItems", [])
    if not all(map(inhabited, first[:least])):
        return False
    return bool(least <= len(first)) or inhabited(schema.get("items", True))


def _has_object(schema: dict[str, Any], inhabited: Inhabited) -> bool:
    required = frozenset(schema.get("required", ()))
    least = schema.get("minProperties", 0)
    if counts_exclude(schema, schema, "Properties") or len(required) > schema.get(
        "maxProperties", len(required)
    ):
        return False
    properties = schema.get("properties", {})
    others = [schema.get("additionalProperties", True), *schema.get("patternProperties", {}).values()]
    declared = required.intersection(properties)
    if not all(inhabited(properties[name]) for name in declared):
        return False
    if len(required) == len(declared) and least <= len(required):
        return True
    if any(map(inhabited, others)):
        return True
    return required == declared and sum(map(inhabited, properties.values())) >= least


def without_empty_parts(schema: Any, known: KnownTypes, found: dict[int, Types] | None = None) -> Any:
    """Return the schema with `false` for each empty part, so that no backend enters it. `found`: see
    `possible_types`.
    """
    found = {} if found is None else found
    if isinstance(schema, bool):
        return schema
    if not possible_types(schema, known, None, found):
        return False
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties"):
            made[keyword] = {
                name: without_empty_parts(member, known, found) for name, member in value.items()
            }
        elif keyword in ("prefixItems", "allOf"):
            made[keyword] = [without_empty_parts(member, known, found) for member in value]
        elif keyword == "anyOf":
            kept = [without_empty_parts(member, known, found) for member in value]
            made[keyword] = [member for member in kept if member is not False]
        elif keyword in ("items", "additionalProperties"):
            made[keyword] = without_empty_parts(value, known, found)
    return made
