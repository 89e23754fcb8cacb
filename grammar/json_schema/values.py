"""JSON's types, equality as JSON Schema has it (1 equals 1.0, true does not equal 1), and bounds that exclude each other."""

from typing import Any, Final

TYPES: Final = frozenset(("array", "boolean", "null", "number", "object", "string"))


def type_of(value: Any) -> str:
    """One of `TYPES`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def identity(value: Any) -> Any:
    """Return a hashable that is equal only for equal JSON values."""
    if isinstance(value, dict):
        return "object", frozenset((key, identity(member)) for key, member in value.items())
    if isinstance(value, list):
        return "array", tuple(identity(member) for member in value)
    return type_of(value), value


def allowed_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that `type` allows, "integer" counted as "number"."""
    named = schema.get("type")
    if named is None:
        return TYPES
    names = named if isinstance(named, list) else [named]
    return frozenset("number" if name == "integer" else name for name in names)


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of `const` and `enum`, None if there is neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def ranges_exclude(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether no number is within the bounds of both."""
    for low, high in ((first, second), (second, first)):
        for least in ("minimum", "exclusiveMinimum"):
            for most in ("maximum", "exclusiveMaximum"):
                if least not in low or most not in high:
                    continue
                touching = least == "minimum" and most == "maximum"
                if low[least] > high[most] or (low[least] == high[most] and not touching):
                    return True
    return False


def counts_exclude(first: dict[str, Any], second: dict[str, Any], unit: str) -> bool:
    """Return whether no count of `unit` (Length, Items or Properties) is within the bounds of both."""
    return any(
        low.get(f"min{unit}", 0) > high[f"max{unit}"]
        for low, high in ((first, second), (second, first))
        if f"max{unit}" in high
    )
