"""Which parts of a schema no document can satisfy: endless required recursion, loops of references, contradictory bounds.

Invariant: only what is proven empty is called empty. A grammar must not enter an empty part, for it could never leave it.
"""

from collections.abc import Callable
from typing import Any

from loraplex.grammar.schema_values import allowed_types, listed_values, type_of

Inhabited = Callable[[Any], bool]


def satisfiable_definitions(root: dict[str, Any]) -> frozenset[str]:
    """The references `#/$defs/…` of a rewritten schema that some document satisfies: the least fixed point."""
    definitions = {f"#/$defs/{name}": schema for name, schema in root.get("$defs", {}).items()}
    satisfied: set[str] = set()
    waiting_for: dict[str, list[str]] = {}
    queue = list(reversed(definitions))
    while queue:
        name = queue.pop()
        if name in satisfied:
            continue
        missing: list[str] = []
        if is_satisfiable(definitions[name], satisfied, missing):
            satisfied.add(name)
            queue.extend(waiting_for.pop(name, ()))
        for other in missing:
            waiting_for.setdefault(other, []).append(name)
    return frozenset(satisfied)


def is_satisfiable(
    schema: Any, satisfied: set[str] | frozenset[str], missing: list[str] | None = None
) -> bool:
    """Whether some document may satisfy the schema. `missing` collects the references that were in the way."""
    if isinstance(schema, bool):
        return schema

    def inhabited(member: Any) -> bool:
        return is_satisfiable(member, satisfied, missing)

    reference = schema.get("$ref")
    if reference is not None and reference not in satisfied:
        if missing is not None:
            missing.append(reference)
        return False
    if not all(map(inhabited, schema.get("allOf", ()))):
        return False
    if "anyOf" in schema and not any(map(inhabited, schema["anyOf"])):
        return False
    types = allowed_types(schema)
    values = listed_values(schema)
    if values is not None:
        types &= frozenset(map(type_of, values))
    return any(_has_value(kind, schema, inhabited) for kind in types)


def _has_value(kind: str, schema: dict[str, Any], inhabited: Inhabited) -> bool:
    if kind == "string":
        return _in_order(schema, "minLength", "maxLength")
    if kind == "number":
        return _has_number(schema)
    if kind == "array":
        return _has_array(schema, inhabited)
    if kind == "object":
        return _has_object(schema, inhabited)
    return True


def _in_order(schema: dict[str, Any], least: str, most: str) -> bool:
    return most not in schema or bool(schema.get(least, 0) <= schema[most])


def _has_number(schema: dict[str, Any]) -> bool:
    for least in ("minimum", "exclusiveMinimum"):
        for most in ("maximum", "exclusiveMaximum"):
            if least in schema and most in schema:
                low, high = schema[least], schema[most]
                if low > high or (low == high and (least, most) != ("minimum", "maximum")):
                    return False
    return True


def _has_array(schema: dict[str, Any], inhabited: Inhabited) -> bool:
    least = schema.get("minItems", 0)
    if not _in_order(schema, "minItems", "maxItems"):
        return False
    first = schema.get("prefixItems", [])
    if not all(map(inhabited, first[:least])):
        return False
    return bool(least <= len(first)) or inhabited(schema.get("items", True))


def _has_object(schema: dict[str, Any], inhabited: Inhabited) -> bool:
    required = schema.get("required", ())
    if not _in_order(schema, "minProperties", "maxProperties"):
        return False
    if len(set(required)) > schema.get("maxProperties", len(required)):
        return False
    properties = schema.get("properties", {})
    closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    if closed and len(properties) < schema.get("minProperties", 0):
        return False
    return all(inhabited(properties.get(name, not closed)) for name in required)


def without_empty_parts(schema: Any, satisfied: frozenset[str]) -> Any:
    """The same schema with `false` for each part that is empty, so that no backend enters it."""
    if isinstance(schema, bool):
        return schema
    if not is_satisfiable(schema, satisfied):
        return False
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties"):
            made[keyword] = {name: without_empty_parts(member, satisfied) for name, member in value.items()}
        elif keyword in ("prefixItems", "allOf"):
            made[keyword] = [without_empty_parts(member, satisfied) for member in value]
        elif keyword == "anyOf":
            kept = [without_empty_parts(member, satisfied) for member in value]
            made[keyword] = [member for member in kept if member is not False]
        elif keyword in ("items", "additionalProperties"):
            made[keyword] = without_empty_parts(value, satisfied)
    return made
