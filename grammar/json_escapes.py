"""Which characters a grammar of llguidance may spell as `\\uXXXX`, for instance a control character as `\\u0001`.

With that spelling, the library matches an undeclared name by its text: `\\u0061` is not the declared name `a`, and would
escape its schema. Invariant: a schema that may spell characters so leaves no undeclared name to a declared one's alias.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any, Final

_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What JSON spells only as `\\uXXXX` (llguidance also U+007F). `\\b`, `\\t`, `\\n`, `\\f` and `\\r` have a short escape."""
_NEGATED: Final = re.compile(r"\[\^[^\]]*\]")
_SPACES_OR_ANY: Final = re.compile(r"\\u\{9\}-\\u\{D\}|\\u\{0\}-\\u\{10FFFF\}")
_CONTROL_IN_PATTERN: Final = re.compile(r"\\u\{(?:[0-7BEF]|1[0-9A-F]|7F)\}")
_ANY_TEXT: Final = "(?s:.)*"
_COUNTED: Final = frozenset(("maxProperties", "minProperties", "patternProperties"))
_LONGEST_NAME: Final = 64
_MOST_CHARACTERS: Final = 4_096
"""Bounds of a pattern of undeclared names: it nests as deep as a name is long."""


def has_control(value: Any) -> bool:
    """Return whether a JSON value holds a character that only `\\uXXXX` spells, also in a name."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    if isinstance(value, dict):
        return any(map(has_control, value)) or any(map(has_control, value.values()))
    return isinstance(value, list) and any(map(has_control, value))


def needs_escapes(schema: Any) -> bool:
    """Return whether a value of `const` or `enum`, or a translated pattern, names a control character."""
    return lists_control(schema) or any(
        _CONTROL_IN_PATTERN.search(_SPACES_OR_ANY.sub("", _NEGATED.sub("", pattern)))
        for node in _nodes(schema)
        if (pattern := node.get("pattern"))
    )


def lists_control(schema: Any) -> bool:
    """Return whether a value of `const` or `enum` has a control character: without escapes it cannot be written."""
    return any(has_control(node[key]) for node in _nodes(schema) for key in ("const", "enum") if key in node)


def has_escapes(schema: Any) -> bool:
    """Return whether the grammar of a relaxed schema has escapes: where values need them, or they cost no exactness.

    Where nothing names a control character, a pattern that only forbids some characters rules them out: it would allow
    `\\u0019` and not `\\u2019`, so a model that begins to write the second one would end with the first.
    """
    if lists_control(schema):
        return True
    nodes = list(_nodes(schema))
    if not all(map(is_closed, nodes)):
        return False
    return needs_escapes(schema) or not any("pattern" in node and _is_open(node["pattern"]) for node in nodes)


def is_closed(node: dict[str, Any]) -> bool:
    """Return whether no undeclared name of the subschema can be the alias of a declared one."""
    declared, patterns = _declared(node), node.get("patternProperties", {})
    if not declared and not patterns:
        return True
    if node.get("additionalProperties") is not False:
        return False
    return not patterns or not any(map(has_control, declared)) or list(patterns) == [_undeclared(declared)]


def close(node: dict[str, Any]) -> bool:
    """Make the undeclared names of an open object the names of a pattern, which the library reads unescaped.

    Returns False where that is not exact: beside other patterns, or where the library counts undeclared names.
    """
    declared = _declared(node)
    pattern, rest = _undeclared(declared), node.get("additionalProperties", True)
    if pattern is None or not _COUNTED.isdisjoint(node):
        return False
    node["properties"] = {name: node.get("properties", {}).get(name, rest) for name in declared}
    node |= {"patternProperties": {pattern: rest}, "additionalProperties": False}
    return True


def _undeclared(declared: Collection[str]) -> str | None:
    """Return the pattern, in Rust's syntax, of all names but these; None if it would nest or grow too far."""
    if max(map(len, declared), default=0) > _LONGEST_NAME or sum(map(len, declared)) > _MOST_CHARACTERS:
        return None
    return f"^{_none_of(declared)}$"


def _none_of(texts: Collection[str]) -> str:
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    codes = {first: f"\\u{{{ord(first):X}}}" for first in sorted(rests)}
    # The reason for U+0000 is in `json_schema/pattern.py`.
    null = r"\u{0}" if {'"', "\\"} & codes.keys() else ""
    other = f"[^{''.join(codes.values())}{null}]" if codes else "(?s:.)"
    branches = [] if "" in texts else [""]
    branches.append(other + _ANY_TEXT)
    branches += [f"{code}{_none_of(rests[first])}" for first, code in codes.items()]
    return f"(?:{'|'.join(branches)})"


def _declared(node: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys((*node.get("properties", ()), *node.get("required", ()))))


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
