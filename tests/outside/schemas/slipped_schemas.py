"""Random schemas as tools write them, each beside the schema of draft 2020-12 that its author meant."""

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeAlias

Pair: TypeAlias = tuple[Any, Any]
"""(as written, as meant)."""

TEXTS: Final = (
    "a",
    "ab",
    "",
    "\x00",
    "\x01",
    "\x1f",
    "\x7f",
    "a\x1bb",
    "\n",
    "\t",
    '"',
    "\\",
    "/",
    "é",
    "😀",
    "\u2028",
)
NAMES: Final = ("a", "ab", "b", "items", "required", "\x01", "\x1f", "\x7f", "é", "n\n")
PATTERNS: Final = (
    *(
        "^\\x7f$",
        "^[\\x00-\\x1f]+$",
        "^[\\x00-\\x7f]*$",
        '^[^"]*$',
        "^[^\\\\]+$",
        "^[^\\x00-\\x1f]*$",
        "\\x1b",
        "^[a-z]+$",
    ),
)
TYPES: Final = {
    "string": ("STRING", "String", "str"),
    "integer": ("INTEGER", "int"),
    "number": ("NUMBER", "float"),
    "boolean": ("BOOLEAN", "bool"),
    "object": ("OBJECT", "dict"),
    "array": ("ARRAY", "list", "tuple"),
}
VALUES: Final[tuple[Any, ...]] = (
    *TEXTS,
    0,
    1,
    -1,
    2,
    2.5,
    10,
    True,
    None,
    [],
    [1],
    ["a", 1],
    {},
    {"a": 1},
    {"\x01": "a"},
)


def slipped_schema(source: Random) -> Pair:
    """One schema of an object or an array, with a slip in most of its parts."""
    written, meant = source.choice((_object, _object, _tuple))(source, 3)
    if source.random() < 0.2:
        return (
            {"$ref": "#/definitions/A", "definitions": {"A": written}},
            {"$ref": "#/$defs/A", "$defs": {"A": meant}},
        )
    return written, meant


def document(source: Random, meant: Any) -> str:
    """A text about such a document: often valid, else with a part changed, and in any spelling."""
    value = _instance(source, meant.get("$defs", {}).get("A", meant))
    if source.random() < 0.6:
        value = _changed(source, value)
    text = json.dumps(value, ensure_ascii=source.random() < 0.5, separators=(",", ":"))
    if source.random() < 0.3:
        text = text.replace("\x7f", "\\u007f")
    if source.random() < 0.2:
        # Another spelling of a letter, which may be that of a declared name.
        text = text.replace("a", "\\u0061").replace("\\u001f", "\\u001F")
    return text


def _schema(source: Random, depth: int) -> Pair:
    kinds: list[Callable[[Random, int], Pair]] = [_number, _text, _listed, _listed]
    if depth > 0:
        kinds += [_object, _tuple, _any_of]
    written, meant = source.choice(kinds)(source, depth)
    if source.random() < 0.1:
        written = {**written, "nullable": True}
    if source.random() < 0.1:
        written = {**written, "description": None, "pattern": written.get("pattern"), "not": None}
    return written, meant


def _typed(source: Random, name: str) -> Pair:
    return source.choice((name, name, *TYPES[name])), name


def _number(source: Random, depth: int) -> Pair:
    written: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    if source.random() < 0.7:
        written["type"], meant["type"] = _typed(source, source.choice(("integer", "number")))
    for flag, bound, value in (
        ("exclusiveMinimum", "minimum", source.choice((-1, 0, 0.5))),
        ("exclusiveMaximum", "maximum", source.choice((1, 2, 10.5))),
    ):
        form = source.randrange(4)
        if form == 0:
            written |= {bound: value, flag: True}
            meant[flag] = value
        elif form == 1:
            written |= {bound: value, flag: False}
            meant[bound] = value
        elif form == 2:
            written[flag] = meant[flag] = value
    return written, meant


def _text(source: Random, depth: int) -> Pair:
    written, meant = _typed(source, "string")
    rest: dict[str, Any] = {}
    if source.random() < 0.6:
        rest["pattern"] = source.choice(PATTERNS)
    if source.random() < 0.2:
        rest["maxLength"] = source.randint(1, 3)
    return {"type": written, **rest}, {"type": meant, **rest}


def _listed(source: Random, depth: int) -> Pair:
    if source.random() < 0.4:
        found: dict[str, Any] = {"const": source.choice(VALUES)}
    else:
        found = {"enum": source.sample(VALUES, source.randint(1, 4))}
        if source.random() < 0.2:
            found["enum"].append(2**60)
    return found, found


def _tuple(source: Random, depth: int) -> Pair:
    parts = [_schema(source, depth - 1) for _ in range(source.randint(1, 3))]
    written: dict[str, Any] = {"type": "array", "items": [part for part, _ in parts]}
    meant: dict[str, Any] = {"type": "array", "prefixItems": [part for _, part in parts]}
    if source.random() < 0.6:
        rest = (False, False) if source.random() < 0.5 else _schema(source, depth - 1)
        written["additionalItems"], meant["items"] = rest
    least = source.randint(0, len(parts))
    return {**written, "minItems": least}, {**meant, "minItems": least}


def _object(source: Random, depth: int) -> Pair:
    names = source.sample(NAMES, source.randint(1, 4))
    members = {name: _schema(source, depth - 1) for name in names}
    written: dict[str, Any] = {"properties": {name: part for name, (part, _) in members.items()}}
    meant: dict[str, Any] = {
        "type": "object",
        "properties": {name: part for name, (_, part) in members.items()},
    }
    written["type"], _ = _typed(source, "object")
    required = source.sample(names, source.randint(0, len(names)))
    form = source.randrange(4)
    if form == 0:
        for name in required:
            if "required" in written["properties"][name]:
                # Its own list of names stands there.
                written["required"] = [*written.get("required", []), name]
            else:
                written["properties"][name] = {**written["properties"][name], "required": True}
    elif form == 1:
        written["required"] = [*required, *required]
    elif form == 2:
        written["required"] = required
    else:
        written["required"], required = None, []
    meant["required"] = required
    rest = source.randrange(4)
    if rest == 0:
        written["additionalProperties"] = meant["additionalProperties"] = False
    elif rest == 1:
        written["additionalProperties"], meant["additionalProperties"] = _schema(source, 0)
    elif rest == 2:
        written["additionalProperties"] = None
    return written, meant


def _any_of(source: Random, depth: int) -> Pair:
    options = [_schema(source, depth - 1) for _ in range(2)]
    return {"anyOf": [part for part, _ in options]}, {"anyOf": [part for _, part in options]}


def _instance(source: Random, meant: Any) -> Any:
    """A value that is mostly valid."""
    if "anyOf" in meant:
        return _instance(source, source.choice(meant["anyOf"]))
    if "const" in meant or "enum" in meant:
        return source.choice(meant.get("enum", [meant.get("const")]))
    match meant.get("type"):
        case "object":
            names = [
                name for name in meant["properties"] if name in meant["required"] or source.random() < 0.5
            ]
            made = {name: _instance(source, meant["properties"][name]) for name in names}
            if source.random() < 0.3:
                made["other"] = source.choice(VALUES)
            return made
        case "array":
            length = source.randint(meant["minItems"], len(meant["prefixItems"]))
            return [_instance(source, part) for part in meant["prefixItems"][:length]]
        case "string":
            return source.choice(TEXTS)
    return source.choice((-1, 0, 1, 2, 3, 0.5, 0.75, 10.5))


def _changed(source: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and source.random() < 0.8:
        name = source.choice(list(value))
        if source.random() < 0.2:
            return {key: member for key, member in value.items() if key != name}
        return {**value, name: _changed(source, value[name])}
    if isinstance(value, list) and value and source.random() < 0.8:
        index = source.randrange(len(value))
        return [
            *value[:index],
            _changed(source, value[index]),
            *value[index + 1 :],
            *value[: source.randrange(2)],
        ]
    return source.choice(VALUES)
