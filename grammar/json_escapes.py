"""Which characters a grammar of llguidance may spell as `\\uXXXX`, for instance a control character as `\\u0001`.

With that spelling, the library matches an undeclared name by its text: `\\u0061` is not the declared name `a`, and would
escape its schema. Invariant: a schema that may spell characters so leaves no undeclared name to a declared one's alias.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What JSON spells only as `\\uXXXX` (llguidance also U+007F). `\\b`, `\\t`, `\\n`, `\\f` and `\\r` have a short escape."""
_NEGATED: Final = re.compile(r"\[\^[^\]]*\]")
_C0: Final = r"\\u\{1?[0-9A-F]\}"
_CLASS: Final = re.compile(rf"\[(?!\[?(?:{_C0}-{_C0}|{_C0}|\\u\{{7F\}})+\])(?:\[[^\]]*\]|[^\[\]])*\]")
"""A class, unless it has control characters only."""
_SPACES_OR_ANY: Final = re.compile(r"\\u\{9\}-\\u\{D\}|\\u\{0\}-\\u\{10FFFF\}")
_CONTROL_IN_PATTERN: Final = re.compile(r"\\u\{(?:[0-7BEF]|1[0-9A-F]|7F)\}")


def has_control(value: Any) -> bool:
    """Return whether a JSON value holds a character that only `\\uXXXX` spells, also in a name."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    if isinstance(value, dict):
        return any(map(has_control, value)) or any(map(has_control, value.values()))
    return isinstance(value, list) and any(map(has_control, value))


def names_control(schema: Any) -> bool:
    """Return whether a value of `const` or `enum`, or a translated pattern, has what can only be written with escapes.

    A class of a pattern that has other characters too may do without them.
    """
    return any(
        any(has_control(node[key]) for key in ("const", "enum") if key in node)
        or _CONTROL_IN_PATTERN.search(_CLASS.sub("", node.get("pattern", "")))
        for node in _nodes(schema)
    )


def has_escapes(schema: Any) -> bool:
    """Return whether the grammar of a relaxed schema has escapes: where values need them, or they cost no exactness.

    Where nothing names a control character, a pattern that only forbids some characters rules them out: it would allow
    `\\u0019` and not `\\u2019`, so a model that begins to write the second one would end with the first.
    """
    if names_control(schema):
        return True
    nodes = list(_nodes(schema))
    patterns = [node["pattern"] for node in nodes if "pattern" in node]
    return all(map(is_closed, nodes)) and (
        any(map(_admits_control, patterns)) or not any(map(_is_open, patterns))
    )


def is_closed(node: dict[str, Any]) -> bool:
    """Return whether no undeclared name of the subschema can be the alias of a declared one."""
    declared = [*node.get("properties", ()), *node.get("required", ())]
    patterns = node.get("patternProperties")
    if not declared and not patterns:
        return True
    may_alias = patterns and any(map(has_control, declared))
    return node.get("additionalProperties") is False and not may_alias


def _admits_control(pattern: str) -> bool:
    return _CONTROL_IN_PATTERN.search(_SPACES_OR_ANY.sub("", _NEGATED.sub("", pattern))) is not None


def _is_open(pattern: str) -> bool:
    return "[^" in pattern or not (pattern.startswith("^") and pattern.endswith("$"))


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the subschemas of a relaxed schema; values and names are none."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for keyword, value in node.items():
            if keyword in ("$defs", "patternProperties", "properties"):
                stack.extend(value.values())
            elif keyword in ("allOf", "anyOf", "prefixItems"):
                stack.extend(value)
            elif keyword in ("additionalProperties", "items"):
                stack.append(value)
